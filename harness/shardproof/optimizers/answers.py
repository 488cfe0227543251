"""The questions asked of an optimizer, the possible answers, and the sentences that explain an answer. No torch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from shardproof.result import Failure
from shardproof.verdict import ExitStatus

QUESTIONS: dict[str, str] = {
    "sharded": "sharded steps equal unsharded ones",
    "position": "an element's update does not depend on where it lies",
    "few_rows": "a parameter with fewer rows than ranks",
    "state_dict": "state_dict and load_state_dict",
    "dcp": "a DCP checkpoint, loaded on the same mesh",
    "reshard": "a DCP checkpoint, loaded on another world size",
    "offload": "CPUOffloadPolicy",
    "bf16": "bf16 parameters",
    "groups": "param groups with settings of their own",
    "tensor_lr": "a learning rate that is a tensor",
}
"""Question → what is true where the answer is yes."""


class Answer(Enum):
    """What one question came to.

    `refuses`: the optimizer says by an error of its own that it does not do this. `nothing to compare`: it keeps no
    state, and empty never equals anything. `cannot be asked`: it fails, or needs something else, before the question.
    `unknown`: an error of ours, or an answer that did not come again in fresh ranks.
    """

    YES = "yes"
    NO = "no"
    REFUSES = "refuses"
    NOTHING = "nothing to compare"
    CANNOT = "cannot be asked"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class AnsweredQuestion:
    """The answer to a question. why: one sentence; empty for a plain yes. rounding: a no whose differences are all as
    small as another order of addition makes them. failed: a run ended with an error. traceback: of the rank that raised
    it, if one did."""

    question: str
    answer: Answer
    why: str = ""
    rounding: bool = False
    failed: bool = False
    traceback: str = ""

    @property
    def said(self) -> str:
        """The answer in the words of reports."""
        return "no (rounding)" if self.rounding else self.answer.value

    def to_json(self) -> dict[str, Any]:
        return {"question": self.question, "answer": self.said, "why": self.why, "traceback": self.traceback}


def exit_status(found: Iterable[AnsweredQuestion]) -> ExitStatus:
    """3 with an unknown, 1 with a no, 0 with a yes, 4 where nothing could be asked."""
    answers = {one.answer for one in found}
    if Answer.UNKNOWN in answers:
        return ExitStatus.HARNESS
    if Answer.NO in answers:
        return ExitStatus.FAILURE
    return ExitStatus.OK if Answer.YES in answers else ExitStatus.NOTHING_RUN


_STATES = re.compile(
    r"(not|n't|un|only)[ -]?(currently |yet |be )?support|not (yet )?implemented|not allowed|only works|requires? ",
    re.IGNORECASE,
)
_FRAME = re.compile(r'^ *File "(?P<file>[^"]+)", line \d+, in .*(?:\n +(?P<line>.*))?', re.MULTILINE)


def is_statement(failure: Failure, home: str) -> bool:
    """Whether an error is the optimizer's own word that it does not do what was asked of it: it was raised in the
    optimizer's own code, and is a NotImplementedError, says that something is not supported, or refuses what its
    constructor was given.

    Args:
        home: folder or file of the optimizer's own code.
    """
    frames = list(_FRAME.finditer(failure.traceback))
    if not frames or not frames[-1]["file"].startswith(home):
        return False
    if failure.type == "NotImplementedError" or _STATES.search(failure.message):
        return True
    raised = (frames[-1]["line"] or "").startswith("raise ")
    return raised and any(frame["line"] and "return cls(" in frame["line"] for frame in frames)


def of_failure(question: str, failure: Failure, where: str, home: str) -> AnsweredQuestion:
    """The answer that an error gives.

    Args:
        where: which run it ended, such as `on the ranks`.
    """
    message = " ".join(failure.message.split())
    told = f"{failure.type}: {message[:MOST_OF_A_MESSAGE]}{'…' if len(message) > MOST_OF_A_MESSAGE else ''}"
    answer = Answer.REFUSES if is_statement(failure, home) else Answer.NO
    return AnsweredQuestion(question, answer, f"{where}: {told}", failed=True, traceback=failure.traceback)


MOST_OF_A_MESSAGE = 240


def of_deviations(
    question: str, reply: Mapping[str, Any], between: str, *, forgiving: bool = False
) -> AnsweredQuestion | None:
    """The no that a comparison gives; None where it found nothing.

    Args:
        reply: of `compare.serve`. between: what was compared, as `on the ranks against whole tensors`.
        forgiving: differences that are rounding count for nothing, where two ways to compute are compared.
    """
    found = [d for d in reply["deviations"] if not (forgiving and d["rounding"])]
    if not found:
        return None
    first, rounding = found[0], all(d["rounding"] for d in found)
    names = dict.fromkeys(d["name"].partition("|")[0] for d in found if d["kind"] == first["kind"])
    others = f"; {len(names) - 1} more like it" if len(names) > 1 else ""
    return AnsweredQuestion(question, Answer.NO, f"{between}: {sentence(first)}{others}", rounding)


def sentence(deviation: Mapping[str, Any]) -> str:
    """A deviation in words."""
    name = deviation["name"].replace("|", "'s ") if "|" in deviation["name"] else deviation["name"]
    left, right = deviation["left"], deviation["right"]
    match deviation["kind"]:
        case "bits" if deviation["total"] == 1:
            return f"{name} is {right} instead of {left}{_apart(deviation)}"
        case "bits":
            where = f"{deviation['count']} of {deviation['total']} elements of {name} differ"
            return f"{where}, the first at {deviation['index']}: {right} instead of {left}{_apart(deviation)}"
        case "missing":
            return f"{name} is missing"
        case "ranks":
            return f"ranks disagree about {name}: {right}" + (f"; on whole tensors it is {left}" if left else "")
        case "shape" | "dtype":
            return f"{name} has {deviation['kind']} {right} instead of {left}"
        case kind:
            return f"{name}: {kind}: {right}"


def _apart(deviation: Mapping[str, Any]) -> str:
    if deviation["role"] != "param" or deviation["share"] >= ABSURD:
        return ""
    ulps = f"at most {deviation['ulps']} ULP and " if 0 <= deviation["ulps"] < MOST_ULPS else "at most "
    return f"; {ulps}{deviation['share']:.2g} of the largest change so far"


ABSURD, MOST_ULPS = 1e6, 100_000
