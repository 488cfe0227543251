"""The results of a run on a head: a working tree, a commit, or a release without recorded results.

A walk over a head may lose much of what it was to test, and look better for it. So beside its failures a report says
how much of the walk says nothing, by reason, and what became of the cures that do not apply.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from shardproof.issues.cure_check import REPAIRED, STALE, CureCheck
from shardproof.laboratory.misfits import is_tree, on_head
from shardproof.protocol.registry import all_systems
from shardproof.report.lost_coverage import LostCoverage, lost_coverage
from shardproof.result import Result
from shardproof.verdict import Verdict


@dataclass(frozen=True)
class Head:
    """The results of one system on one head.

    * version: as results name it, without its cures. scenarios: how many results there are.
    * unknown: the first line of the reason → how many scenarios it hid.
    * lost: what it refuses and the newest release does not.
    * checks: of cures that do not apply to it.
    """

    system: str
    version: str
    scenarios: int
    unknown: Mapping[str, int]
    lost: LostCoverage
    checks: tuple[CureCheck, ...] = ()

    @property
    def released(self) -> bool:
        """Whether it is a release that is not declared, such as an older one, and no working tree or commit."""
        return not is_tree(self.version)

    @property
    def hidden(self) -> int:
        """How many scenarios say nothing, since something of ours failed or does not fit."""
        return sum(self.unknown.values())

    @property
    def repaired(self) -> tuple[CureCheck, ...]:
        """The cures that are no longer needed on the head, because their scenarios pass without a cure."""
        return tuple(check for check in self.checks if check.standing == REPAIRED)

    @property
    def stale(self) -> tuple[CureCheck, ...]:
        """Cures that have to be written anew, since what they cured still fails."""
        return tuple(check for check in self.checks if check.standing == STALE)


def heads_of(results: Iterable[Result], checks: Iterable[CureCheck] = ()) -> tuple[Head, ...]:
    """The heads among results, in their order; none of a system that is not there, as that of a plugin may be."""
    systems = {system.name: system for system in all_systems()}
    ran: dict[tuple[str, str], bool] = {}
    found: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        key, info = (result.system, result.version), systems.get(result.system)
        if key not in ran:
            ran[key] = info is not None and on_head(info, result.version)
        if ran[key]:
            found.setdefault((result.system, without_cures(result.version)), []).append(result)
    known = list(checks)
    return tuple(
        Head(
            system,
            version,
            len(own),
            dict(Counter(reason(r) for r in own if r.verdict is Verdict.UNKNOWN).most_common()),
            lost_coverage(systems[system], own),
            tuple(check for check in known if (check.system, without_cures(check.version)) == (system, version)),
        )
        for (system, version), own in found.items()
    )


def reason(result: Result) -> str:
    """The first line of the reason for a scenario without a verdict; results are grouped by the line."""
    return result.reason.split("\n", 1)[0]


def without_cures(version: str) -> str:
    """A version as results name it, without its cures."""
    return version.partition("+cured")[0]
