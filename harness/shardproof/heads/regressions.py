"""Runs a system's regression scenarios on a head, and states for each whether its entry of `issues.toml` still
holds.

On the newest walked release the answer is known, since the entry says it: a regression fails there, unless the entry
says that the release, or an older one, repaired it. So one run on the head is enough to know what has changed.

*Verifies*: a failure counts as the entry's only if the patterns of known issues cover all of its evidence.
*Does not verify*: regressions of defects that hide behind others; a plain run never shows those.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from packaging.version import Version

from shardproof.issues.cures import available
from shardproof.issues.findings import Finding
from shardproof.issues.known_issues import KnownIssues, bound_of
from shardproof.protocol.registry import system_named
from shardproof.protocol.system import System
from shardproof.result import Result
from shardproof.scenario import Scenario
from shardproof.space.files import load_space
from shardproof.verdict import Verdict
from shardproof.versions import is_version, with_cures


class State(Enum):
    """What a regression says on a head. The values are those of the JSON."""

    THERE = "still there"
    REPAIRED = "repaired"
    AS_SAID = "passes, as its entry says"
    BACK = "came back"  # its entry says that this head, or an older release, repaired it
    OTHERWISE = "fails in another way"
    NOTHING = "says nothing"


@dataclass(frozen=True)
class Regression:
    """A regression. name: of its file. finding: its entry; None where it has none. scenario: on no release, with the
    cures that it needs."""

    name: str
    finding: Finding | None
    scenario: Scenario


@dataclass(frozen=True)
class RegressionRun:
    """A regression on a head. behind: what fails behind it, or beside it, and has no entry."""

    regression: Regression
    result: Result
    state: State
    behind: tuple[Result, ...] = ()


def regressions(system: System, findings: Sequence[Finding], *, one_each: bool = False) -> tuple[Regression, ...]:
    """The regressions of a system, in the order of its entries; those without an entry last.

    Args:
        one_each: of each entry the first only.
    """
    owner = {name: finding for finding in findings for name in finding.regressions}
    folder = system.folder.joinpath("regressions")
    files = sorted(file.name for file in folder.iterdir()) if folder.is_dir() else []
    names = [name.removesuffix(".toml") for name in files if name.endswith(".toml")]
    order = {finding.id: place for place, finding in enumerate(findings)}
    names.sort(key=lambda name: (order[owner[name].id] if name in owner else len(order), name))
    found: list[Regression] = []
    for name in names:
        finding = owner.get(name)
        if one_each and finding and any(kept.finding is finding for kept in found):
            continue
        (scenario,) = load_space(f"regressions/{system.name}-{name}").scenarios
        found.append(Regression(name, finding, scenario))
    return tuple(found)


def placed_on(scenario: Scenario, version: str) -> Scenario:
    """A scenario on a head, with the cures that it had; one whose ranks load on another release, on the head alone."""
    return replace(scenario, version=with_cures(version, scenario.cures), load_version="same")


def there(finding: Finding | None, release: str) -> bool | None:
    """Whether an entry says that a release has its defect; None where it does not say."""
    if finding is None:
        return None
    fixed, since = (
        each if each and each.comparable else None for each in map(bound_of, (finding.fixed, finding.since))
    )
    if fixed and Version(release) >= fixed.version:
        return False
    if since and Version(release) < since.version:
        return False if since.exact else None
    return True if not finding.fixed or fixed else None


def beyond(kept: Regression, result: Result, known: KnownIssues, examine: Callable[[Scenario], Result]) -> Result:
    """A regression's result on a head or, where another known defect ends it there before its own can show itself,
    what it shows with everything else cured. On Megatron-LM's main of August 2026, for example, a load under another
    learning rate raises, and whether the state behind it is resharded wrongly cannot be seen before that is cured."""
    if not result.verdict.is_failure or kept.finding is None or _is_own(kept.finding, result, known):
        return result
    if not (result.known_issue or known.match(result)):
        return result
    system = system_named(result.system)
    own = next((cure for cure in available(system) if cure.id == kept.finding.cure), None)
    wanted = own.all_but_this if own else ""
    cured = replace(result.scenario, version=with_cures(result.scenario.release, wanted))
    return examine(cured) if available(system) else result


def judged(kept: Regression, results: Sequence[Result], base: str, known: KnownIssues) -> RegressionRun:
    """What a regression says on a head.

    Args:
        results: its own on the head, and what fails behind it. base: the release that it is compared with.
    """
    first, *rest = results
    behind = tuple(result for result in rest if result.verdict.is_failure and not result.known_issue)
    return RegressionRun(kept, first, _state(kept.finding, first, base, known), behind)


def _state(finding: Finding | None, result: Result, base: str, known: KnownIssues) -> State:
    if result.verdict in (Verdict.UNKNOWN, Verdict.UNSUPPORTED):
        return State.NOTHING
    own = result.version.partition("+")[0]
    before, now = there(finding, base), there(finding, own) if is_version(own) else None
    if result.verdict is Verdict.PASS:
        said = before is False or now is False or (finding and finding.fixed)
        return State.AS_SAID if said else State.REPAIRED
    if not (result.known_issue or known.match(result)):
        return State.NOTHING if result.not_cured else State.OTHERWISE
    if finding and not _is_own(finding, result, known):
        return State.NOTHING
    return State.BACK if before is False and not now else State.THERE


def _is_own(finding: Finding, result: Result, known: KnownIssues) -> bool:
    """Whether a failure is that of an entry, or has a part of its face; not that of another which looks otherwise."""
    if finding.id in (result.known_issue or "").split("+"):
        return True
    return any(issue.match.covers(item) for issue in known.entries_named(finding.id) for item in result.evidence)
