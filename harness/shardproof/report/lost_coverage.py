"""Measures how much of a walk is lost on a head: scenarios that the head refuses and the newest release runs.

A limit that is right for an old release may be wrong for a working tree or a commit: the argument that it misses may be
there under another name, or in another file. The scenarios are then `unsupported`, which is no failure, and a walk of a
head could pass with half of it not run. So what a head refuses is compared with what the newest declared release
refuses; what is lost is counted by reason, and above a tenth it is more than a run may pass over.

*Verifies*: that a head's limits refuse no more than the newest release's.
*Does not verify*: that the limits of the newest release are right.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from shardproof.protocol.releases import package_of
from shardproof.protocol.system import System
from shardproof.result import Result
from shardproof.verdict import Verdict

MOST_LOST = 0.1
"""The share of a head's scenarios that may be lost before its walk is no pass."""


@dataclass(frozen=True)
class LostCoverage:
    """What a head loses. lost: scenarios that only the head refuses. of: scenarios that it was asked. newest: the
    release it is compared with. reasons: why, and how many each, the most first."""

    lost: int
    of: int
    newest: str
    reasons: Mapping[str, int]

    @property
    def share(self) -> float:
        return self.lost / self.of if self.of else 0.0

    @property
    def too_much(self) -> bool:
        """Whether so much is lost that a run over the rest is no pass."""
        return self.share > MOST_LOST

    @property
    def text(self) -> str:
        """One line for the reader, and one a reason; empty where nothing is lost."""
        if not self.lost:
            return ""
        head = f"{self.lost} of {self.of} scenarios ({self.share:.0%}) are refused here, and not on {self.newest}:"
        return "\n".join([head, *(f"  {count} × {reason}" for reason, count in self.reasons.items())])


def lost_coverage(info: System, results: Iterable[Result]) -> LostCoverage:
    """What the results of one head come to, beside the newest declared release of its library."""
    newest, found, of = package_of(info).newest.version, Counter[str](), 0
    for result in results:
        of += 1
        if result.verdict is Verdict.UNSUPPORTED and not info.refusal(replace(result.scenario, version=newest)):
            found[result.reason] += 1
    return LostCoverage(found.total(), of, newest, dict(found.most_common()))
