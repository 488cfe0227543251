"""Lines of text about one result: what it showed in a sentence, the same in brief, and one difference in full."""

from __future__ import annotations

import re
from collections.abc import Sequence

from shardproof.diff import Difference
from shardproof.result import Result
from shardproof.verdict import Verdict
from shardproof.wording.error_place import place_of
from shardproof.wording.waits import told_waits


def headline(result: Result) -> str:
    """A result in one sentence: the best explanation, or what was seen."""
    if result.verdict is Verdict.PASS:
        return "every compared bit is as expected"
    if result.explanations:
        return result.explanations[0].text
    if result.headline_arm is not None and result.headline_arm.sentence:
        return f"{result.headline_arm.name}: {result.headline_arm.paragraphs[0]}"
    if result.error is not None:
        rank = "" if result.error.rank is None else f" on rank {result.error.rank}"
        message = first_line(result.error.message)
        if not message:  # a bare assertion: what it asserts, and where
            place = place_of(result.error)
            message = ", at ".join(filter(None, [place.code, place.full])) if place else "no message"
        waits = told_waits(result.error) if result.error.type == "deadline" else ""
        return f"{result.error.type}{rank}: {message}{f'. {waits}' if waits else ''}"
    if result.differences:
        return ", ".join(item.text for item in result.evidence) + f" ({len(result.differences)} differences)"
    return folded(result.reason) or "no further detail"


def folded(text: str) -> str:
    """A text of several lines, such as an error and its traceback, in one: the first, and the last where it says more.
    `shardproof explain` has all of them."""
    lines = [line.strip() for line in text.splitlines() if line.strip()] or [""]
    told = lines[0] if len(lines) == 1 or lines[-1] in lines[0] else f"{lines[0]} … {lines[-1]}"
    return f"{told} ({len(lines)} lines in the report)" if len(lines) > 2 else told


def unsupported_pair(result: Result) -> str:
    """What upstream does not say that the release of a failure works with, in a sentence; empty if it is nothing."""
    pairs = " and ".join(pair.partition(":")[0] for pair in result.outside_support)
    return f"Upstream does not say that it works with {pairs}" if pairs and result.verdict.is_failure else ""


def brief(result: Result) -> str:
    """A result in one line: its signature without system and verdict, or why there is none.

    Of what a library said when it could not be installed or imported: what failed, and the last error.
    """
    told = result.reason if result.verdict is Verdict.UNKNOWN else result.signature or result.reason
    text = told.removeprefix(f"{result.system} {result.verdict.value}: ")
    lines = [line.strip() for line in text.splitlines() if line.strip()] or [""]
    errors = [line for line in lines[1:] if re.match(r"[\w.]*(Error|Exception|ERROR)\b", line)]
    last = (errors or lines)[-1]
    return first_line(lines[0] if lines[0].endswith(last) else f"{lines[0]} {last}")


def first_line(text: str) -> str:
    """The first line of a message, shortened to 300 characters."""
    line = text.strip().split("\n", 1)[0]
    return line if len(line) <= 300 else line[:299] + "…"


def difference_lines(difference: Difference) -> list[str]:
    """One difference, in the wording of `torch.testing.assert_close` where it applies."""
    key = difference.key
    where = "" if key.where == "live" else f" ({key.where})"
    ranks = f" on rank{'s' * (len(difference.ranks) > 1)} {_numbers(difference.ranks)}" if difference.ranks else ""
    lines = [f"{key.role} {key.fqn}{where}, operation {key.op}{ranks}: {difference.kind}"]
    if difference.detail:
        lines.append(f"  {difference.detail}")
    text = difference.total == 1 and difference.expected_first[:1] in ("'", '"')
    if difference.first_index or (difference.kind in ("bits", "norm") and not text):
        share = difference.mismatched / difference.total if difference.total else 1.0
        span = f", from index {difference.first_index} to {difference.last_index}" if difference.first_index else ""
        lines.append(f"  Mismatched elements: {difference.mismatched} / {difference.total} ({share:.1%}){span}")
    if difference.max_ulp is not None:
        lines.append(f"  Greatest difference: {difference.max_ulp} ULP")
    if difference.expected_first or difference.observed_first:
        lines.append(
            f"  Expected {difference.expected_first or 'nothing'} but got {difference.observed_first or 'nothing'}"
        )
    return lines


def _numbers(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
