"""The plain lines in which terminal, page and job summary describe a head.

A head is a working tree, a commit or a release that nobody walked. A walk over one may lose scenarios in two ways: what
of ours does not fit hides them, or they are refused where the newest release runs them. And cures may not apply, since
the defect is repaired there or its lines moved. A reader who sees only failures would take both for good news.

*Verifies* nothing: `shardproof.report.head_results`, `shardproof.report.lost_coverage` and
`shardproof.investigate.stale_cures` do.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from shardproof.issues.cure_check import NOT_SHOWN
from shardproof.report.head_results import Head
from shardproof.report.model import Report

SHOWN = 5
"""So many reasons are told of one head; the page lists every one among the causes."""

UNDECLARED = "a release that `shardproof doctor` does not list"
"""What a version is that nobody walked, and that is neither a working tree nor a commit."""


@dataclass(frozen=True)
class DescribedHead:
    """A head and what is said of it, a line each; text from outside is as it came."""

    head: Head
    lines: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.head.system} {self.head.version}"

    @property
    def kind(self) -> str:
        return UNDECLARED if self.head.released else "a head"


def describe_heads(report: Report) -> tuple[DescribedHead, ...]:
    """The heads of a run, each with at least one line."""
    return tuple(DescribedHead(head, tuple(_lines(head))) for head in report.heads)


_UNSAID = "repaired there, and its entry does not say so yet"


def _lines(head: Head) -> Iterator[str]:
    if not head.hidden and not head.lost.lost:
        told = f"of its {head.scenarios} scenarios the newest release refuses what is refused here"
        yield f"nothing of the walk was lost: {told}"
    for reason, count in list(head.unknown.items())[:SHOWN]:
        share = f"{count / head.scenarios:.0%}".replace("%", " %")
        yield f"{share} of the walk was lost: {count} scenario{'s' * (count > 1)}, because: {reason}"
    if len(head.unknown) > SHOWN:
        yield f"and {len(head.unknown) - SHOWN} reasons more, among the causes"
    yield from (f"lost coverage: {line.strip()}" for line in head.lost.text.splitlines())
    if unsaid := [check.cure for check in head.repaired if not check.shows]:
        absent = "known defects that do not show there" if head.released else _UNSAID
        yield f"{absent}: {', '.join(unsaid)}"
    if said := [check.cure for check in head.repaired if check.shows]:
        yield f"repaired there, as the entry says: {', '.join(said)}"
    unfit = (
        "known defect whose cure is not made for this release" if head.released else "stale cure, to be written anew"
    )
    yield from (f"{unfit}: {check.cure}; without it: {check.shows}" for check in head.stale)
    if silent := [check.cure for check in head.checks if check.standing == NOT_SHOWN]:
        yield f"cures that do not apply, and nothing is shown of their defects: {', '.join(silent)}"
