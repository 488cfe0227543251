"""`shardproof claims`: which entries of `issues.toml` are out of date on a head, since upstream has gone on.

An entry says "still there" until somebody edits it. Upstream repairs the defect meanwhile, or says that it did, and
nobody is told: a walk of a head counts the failure that no longer comes as nothing, and one that does come as known.
So once a week the log of the library's clone is searched for every number that an entry names. It takes a second and
needs no run. Those entries that a commit names are then run on the head, since a number in a log proves nothing: pull
request 5929 is in the log of Megatron-LM, and one of two regressions that name it fails as before.

*Verifies*: an entry is out of date if its regression passes and it says of no repair, or if it says that it is repaired
by the head's release and the regression fails with its face.
*Does not verify*: entries without a number, unless all that speak of a repair are asked for; defects hidden behind
others.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import PurePosixPath
from typing import Any

from shardproof.heads.log import Commit, Log, numbers_of, tag_of
from shardproof.heads.regressions import Regression, RegressionRun, State, beyond, judged, placed_on, regressions, there
from shardproof.issues.findings import Finding, section_of
from shardproof.issues.known_issues import KnownIssues, known_issues_of
from shardproof.laboratory.laboratory import Laboratory
from shardproof.protocol.registry import all_systems
from shardproof.protocol.releases import Package, package_of
from shardproof.protocol.system import System
from shardproof.report.progress import Progress
from shardproof.result import Result
from shardproof.scenario import Scenario
from shardproof.space.cost import cost_model
from shardproof.verdict import ExitStatus
from shardproof.world.overlay import commit_of

_DAY = re.compile(r"\d{4}-\d{2}-\d{2}")


@dataclass(frozen=True)
class Claim:
    """An entry, and the commits of the log that name one of its numbers. names: of its regressions."""

    finding: Finding
    landed: tuple[tuple[int, Commit], ...]
    names: tuple[str, ...]


@dataclass(frozen=True)
class Searched:
    """The entries of one system, against one log. since: where the search begins, for a reader. entries: how many have
    a number. claims: those that have landed, and those that were asked for beside them."""

    system: System
    revision: str
    since: str
    entries: int
    claims: tuple[Claim, ...]


@dataclass(frozen=True)
class Answered:
    """A claim, and its regressions on the head. release: what the head calls itself."""

    claim: Claim
    tried: tuple[RegressionRun, ...]
    release: str

    @property
    def word(self) -> str:
        """The verdict of a claim's regressions taken together: `repaired`, `repaired in part`, `still there`, `other
        failure` or `nothing`."""
        states = {tried.state for tried in self.tried}
        passing = states & {State.REPAIRED, State.AS_SAID}
        failing = states & {State.THERE, State.BACK}
        if passing:
            return "repaired in part" if failing or State.OTHERWISE in states else "repaired"
        if failing:
            return "still there"
        return "other failure" if State.OTHERWISE in states else "says nothing"

    @property
    def wrong(self) -> str:
        """How its entry is out of date; empty where it is not."""
        fixed = self.claim.finding.fixed
        if self.word.startswith("repaired") and not fixed:
            return "the entry says nothing of a repair"
        if self.word == "still there" and there(self.claim.finding, self.release) is False:
            return f"the entry says that it is fixed in {fixed}"
        return ""


def searched(system: System, revision: str, since: str, *, every: bool = False) -> Searched:
    """What has landed of the numbers that a system's entries name.

    Args:
        revision: of the clone. since: a day or a revision; empty for the newest declared release, as far as its tag is
            in the clone. every: also the entries that say that they are repaired, whatever they name.

    Raises:
        UsageError: no clone, no such revision, or the system's package has no repository.
    """
    package = package_of(system)
    commit_of(package, revision)
    log = log_since(package, revision, since)
    findings = section_of(system).findings
    every_entry = {finding.id: finding for each in all_systems() for finding in section_of(each).findings}
    numbers = {finding.id: _numbers(finding, every_entry, package) for finding in findings}
    shown = {issue.id: PurePosixPath(issue.scenario) for issue in known_issues_of(system)}
    claims = []
    for finding in findings:
        landed = tuple(log.naming(numbers[finding.id]))
        own = shown.get(finding.id)
        names = finding.regressions or ((own.stem,) if own and own.parts[0] == "regressions" else ())
        if landed or (every and finding.fixed):
            claims.append(Claim(finding, landed, names))
    told = log.since or log.base or "the beginning"
    return Searched(system, log.revision, told, sum(map(bool, numbers.values())), tuple(claims))


def _numbers(finding: Finding, every: Mapping[str, Finding], package: Package) -> tuple[int, ...]:
    """The numbers that an entry names, or its cause, of which it is another face."""
    cause = every.get(finding.cause)
    return numbers_of(finding, package) or (_numbers(cause, every, package) if cause else ())


def log_since(package: Package, revision: str, since: str) -> Log:
    """The log of a clone up to a revision. since: as `searched` takes it."""
    commit = commit_of(package, revision)
    if _DAY.fullmatch(since):
        return Log(package, commit, since=since)
    return Log(package, commit, commit_of(package, since) if since else tag_of(package, package.newest.version))


def answered(found: Searched, laboratory: Laboratory, known: KnownIssues, answers: list[Answered]) -> None:
    """Run the regressions of all claims on the head, and put what each says into `answers` as far as it is reached."""
    version = f"git:{found.revision}"
    base = package_of(found.system).newest.version
    names = {name for claim in found.claims for name in claim.names}
    wanted = [kept for kept in regressions(found.system, section_of(found.system).findings) if kept.name in names]
    of_scenario = {placed_on(kept.scenario, version): kept for kept in wanted}
    once = partial(laboratory.examine_one, confirm=False)

    def work(scenario: Scenario) -> tuple[Regression, Result]:
        kept = of_scenario[scenario]
        return kept, beyond(kept, once(scenario), known, once)

    results: dict[str, tuple[Regression, Result]] = {}
    estimates = {scenario.id: cost_model().estimate_s(scenario) for scenario in of_scenario}
    try:
        with Progress(estimates, sys.stderr) as progress:
            for kept, result in laboratory.side_by_side(work, of_scenario):
                progress.finished(result)
                results[kept.name] = kept, result
    finally:
        for claim in found.claims:
            reached = [results[name] for name in claim.names if name in results]
            tried = tuple(
                judged(replace(kept, finding=claim.finding), (result,), base, known) for kept, result in reached
            )
            if tried:
                answers.append(Answered(claim, tried, tried[0].result.version.partition("+")[0]))


def status(answers: Sequence[Answered]) -> int:
    """1 where an entry is out of date; 3 where one could not be run; 0 otherwise."""
    if any(answer.wrong for answer in answers):
        return ExitStatus.FAILURE
    return ExitStatus.HARNESS if any(answer.word == "says nothing" for answer in answers) else ExitStatus.OK


def lines(found: Searched, answers: Mapping[str, Answered]) -> Iterator[str]:
    """What was found, for a reader. answers: by the entry's id."""
    repository = package_of(found.system).repository
    landed = sum(bool(claim.landed) for claim in found.claims)
    yield (
        f"{found.system.name} at {found.revision[:10]}, since {found.since}: "
        f"{found.entries} entries name a number of {repository}, {landed} of them have landed"
    )
    for claim in found.claims:
        answer = answers.get(claim.finding.id)
        said = f": {answer.word}" if answer else ""
        wrong = f"; out of date: {answer.wrong}" if answer and answer.wrong else ""
        fixed = f" (fixed: {claim.finding.fixed})" if claim.finding.fixed else ""
        yield f"  {claim.finding.id}{fixed}{said}{wrong}"
        yield from (f"    {commit.line}" for _, commit in claim.landed)
        yield from (f"    {_describe_run(tried)}" for tried in (answer.tried if answer else ()))


def _describe_run(tried: RegressionRun) -> str:
    result: Result = tried.result
    why = f": {result.reason.splitlines()[0]}" if tried.state is State.NOTHING and result.reason else ""
    other = f": {result.signature}" if tried.state is State.OTHERWISE else ""
    return f"{tried.regression.name} {result.verdict.value}, {tried.state.value}{why}{other}"


def document(found: Searched, answers: Mapping[str, Answered]) -> dict[str, Any]:
    """The same in JSON types."""
    return {
        "system": found.system.name, "revision": found.revision, "since": found.since, "entries": found.entries,
        "claims": [_claim(claim, answers.get(claim.finding.id)) for claim in found.claims],
    }  # fmt: skip


def _claim(claim: Claim, answer: Answered | None) -> dict[str, Any]:
    return {
        "entry": claim.finding.id,
        "fixed": claim.finding.fixed,
        "landed": [
            {"number": number, "commit": commit.id, "day": commit.day, "subject": commit.subject}
            for number, commit in claim.landed
        ],
        "says": answer.word if answer else "",
        "out_of_date": answer.wrong if answer else "",
        "regressions": {
            tried.regression.name: {"state": tried.state.value, **tried.result.to_json()}
            for tried in (answer.tried if answer else ())
        },
    }
