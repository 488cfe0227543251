"""What an optimizer answered, for a terminal, and as JSON."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

from shardproof.errors import printable
from shardproof.optimizers.answers import QUESTIONS, Answer, AnsweredQuestion
from shardproof.optimizers.examine import Examination
from shardproof.trainer.values.wording import ROUNDED

_INDENT = 6
_BY_DESIGN = {
    "sharded": "Rounding comes from a sum or a matrix product over a whole tensor, which sharding adds up in another "
    "order.",
    "position": "Optimizers that look at a tensor as a whole, at its norm, rows or blocks, answer no by design.",
    "groups": "Optimizers that estimate one number over all param groups answer no by design.",
}


def head(examination: Examination) -> str:
    """What is asked, of which release, and where."""
    about, asked = examination.about, examination.asked
    given = "".join(f" {name}={text}" for name, text in asked.arguments)
    release = f"{about['distribution']} {about['version']}".strip()
    with_torch = "" if about["distribution"] == "torch" else f", torch {about['torch']}"
    return f"{asked.path}{given} ({release}{with_torch}) under FSDP2 on a mesh of {asked.ranks}, CPU and gloo"


def line(found: AnsweredQuestion, width: int = 110) -> str:
    """An answer, and below it why it is not yes."""
    first = f"{found.said:<20}{QUESTIONS[found.question][0]}"
    why = found.why
    refused = found.failed or found.answer is not Answer.NO
    if not refused and (found.rounding or found.question != "sharded") and found.question in _BY_DESIGN:
        why = _joined(why, _BY_DESIGN[found.question])
    if not why:
        return first
    return f"{first}\n" + textwrap.fill(
        printable(why), width, initial_indent=" " * _INDENT, subsequent_indent=" " * _INDENT,
        break_on_hyphens=False, break_long_words=False,
    )  # fmt: skip


def _joined(why: str, design: str) -> str:
    return f"{why.rstrip('.')}. {design}" if why else design


def notes(examination: Examination) -> str:
    """What a reader should know beside the answers; empty for nothing."""
    told = (note for note in sorted(examination.not_compared) if not note.startswith(ROUNDED))
    return "".join(f"note: {printable(note)}\n" for note in told)


def document(examination: Examination, found: Sequence[AnsweredQuestion]) -> dict[str, Any]:
    """The same as JSON."""
    about = {name: examination.about.get(name, "") for name in ("distribution", "version", "torch")}
    return {
        "optimizer": examination.asked.path,
        "arguments": dict(examination.asked.arguments),
        "mesh": examination.asked.ranks,
        "model": examination.model,
        **about,
        "answers": [one.to_json() for one in found],
    }
