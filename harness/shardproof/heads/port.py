"""`shardproof port`: lists where our driver, readers and cures no longer fit a head, which defects are repaired there,
and which failures are new, in the order in which to fix them.

1. The library's tree is laid out as a walk would have it, and imported. If it cannot be, that is the one thing to say.
2. Two things are read without running anything: which names and arguments that our driver uses are gone
   (`signatures.py`), and which cures, that apply to the newest walked release, no longer do
   (`shardproof.investigate.cure_table`).
3. The plain scenario runs. If it passes, the conformance kit's checks follow: a driver that observes wrongly on the
   head would make everything after it worthless.
4. The fewest scenarios that have every format, option and optimizer run cured (`covering.py`), and every regression
   runs plain (`regressions.py`), side by side.
5. Of each cure that does not apply, its own scenarios run with everything else cured
   (`shardproof.investigate.stale_cures`): either the defect is repaired, or somebody has to write the cure anew.
6. What came out is put together by cause. Ten scenarios that ran into one renamed argument are one line.

*Verifies*: each thing that does not fit, by a result or by the text of the tree; each repair, by its regression.
*Does not verify*: combinations, which a walk is for; that the commit which is named did the repair.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from shardproof.checks.conformance import CHECKS, Check, check_system
from shardproof.errors import HarnessError, UsageError
from shardproof.faults.plain_scenario import plain_scenario
from shardproof.heads.calls import driver_calls
from shardproof.heads.covering import covering, lost
from shardproof.heads.log import Landed, Log, log_between
from shardproof.heads.regressions import Regression, RegressionRun, State, beyond, judged, placed_on, regressions
from shardproof.heads.signatures import Changed, Tree, changes
from shardproof.investigate import cure_table
from shardproof.investigate.stale_cures import checked, questions
from shardproof.issues import cures
from shardproof.issues.cure_check import LATER, CureCheck
from shardproof.issues.cure_check import REPAIRED as CURE_REPAIRED
from shardproof.issues.findings import Finding, section_of
from shardproof.issues.known_issues import KnownIssues
from shardproof.laboratory.attribution import attributed
from shardproof.laboratory.laboratory import Laboratory
from shardproof.ownership import LIBRARY
from shardproof.protocol.releases import package_of
from shardproof.protocol.system import System
from shardproof.report.head_results import reason
from shardproof.report.progress import Progress
from shardproof.result import Result
from shardproof.scenario import Scenario
from shardproof.space.cost import cost_model
from shardproof.verdict import ExitStatus, Verdict
from shardproof.wording.lines import brief
from shardproof.world.commands import OverlayError
from shardproof.world.environments import Environments

OF_NO_HEAD = (
    "an axis value that nobody declared is refused",
    "every limit and constraint can be tabulated",
    "the plain scenario passes",
)
"""Checks of the kit that say nothing about a tree, and the one that is made first, as a scenario."""
SLOW = ("two meshes agree", "every refusal that is said to be the library's is raised by it")
"""Checks that a quick look leaves out."""

CHECKED, WALKED, KEPT = "checks", "scenarios", "regressions"
"""What is counted."""


@dataclass(frozen=True)
class Asked:
    """What is asked. version: of the head, as in `shardproof.protocol.releases`. base: the release that it is compared
    with. quick: without the slow checks, and with one regression of each entry, whose failures are told by their
    face."""

    system: System
    version: str
    base: str
    quick: bool = False


@dataclass(frozen=True)
class Misfit:
    """Something of ours that does not fit. kind: what has to be mended: import, driver, kit, cure or limit. what: one
    line. place: in the head's tree; called: of ours. results: those that it hides."""

    kind: str
    what: str
    place: str = ""
    called: str = ""
    results: tuple[Result, ...] = ()


@dataclass(frozen=True)
class Repair:
    """An entry that no longer fails. passing, failing: names of its regressions. commits: that may have done it."""

    finding: Finding | None
    passing: tuple[str, ...]
    failing: tuple[str, ...] = ()
    commits: tuple[Landed, ...] = ()

    @property
    def name(self) -> str:
        """The entry's id, or the regression's name where it has none."""
        return self.finding.id if self.finding else self.passing[0]


@dataclass(frozen=True)
class New:
    """A failure that no entry explains. names: of the regressions that show it; results: all that do, the first to
    replay. why: what sets it apart from an unknown failure, for a reader."""

    signature: str
    results: tuple[Result, ...]
    names: tuple[str, ...] = ()
    why: str = ""


@dataclass(frozen=True)
class Port:
    """What came out. called: the version that the head gives itself. tried: results by what they were for. read_only:
    what is gone from the tree and nothing ran into. logged: whether there was a log to search. planned: how many
    scenarios there were to run."""

    asked: Asked
    called: str = ""
    misfits: tuple[Misfit, ...] = ()
    repaired: tuple[Repair, ...] = ()
    new: tuple[New, ...] = ()
    tried: Mapping[str, int] = field(default_factory=dict)
    read_only: tuple[Changed, ...] = ()
    still_there: int = 0
    logged: bool = True
    planned: int = 0
    interrupted: bool = False
    duration_s: float = 0.0

    @property
    def release(self) -> str:
        """The version number that the head's own source states, without a local suffix such as `+gabc123`."""
        return self.called.partition("+")[0]

    @property
    def hidden(self) -> int:
        """How many results say nothing about the library, since something of ours does not fit."""
        return len({result.id for misfit in self.misfits for result in misfit.results})

    @property
    def reached(self) -> int:
        """How many scenarios have a result."""
        return sum(number for what, number in self.tried.items() if what != CHECKED)

    @property
    def status(self) -> int:
        """130 after Ctrl-C; 3 where something of ours does not fit, since nothing behind it can be believed; 1 where
        something fails that no entry explains; 0 otherwise."""
        if self.interrupted:
            return ExitStatus.INTERRUPTED
        if self.misfits:
            return ExitStatus.HARNESS
        return ExitStatus.FAILURE if self.new else ExitStatus.OK

    @property
    def verdict(self) -> str:
        """The last line: what to do next."""
        if self.interrupted:
            return f"interrupted: {self.reached} of {self.planned} scenarios were reached; the rest says nothing yet"
        if self.misfits:
            hides = f"it hides {self.hidden} of {self.reached} results" if self.hidden else "no result is hidden by it"
            return f"mend what does not fit first: {hides}"
        if self.new:
            return f"everything of ours fits; {len(self.new)} failures are new: each wants an entry, or a limit"
        if self.repaired:
            return (
                f"everything of ours fits, nothing is new; {len(self.repaired)} entries of issues.toml are out of date"
            )
        package = package_of(self.asked.system)
        if package.declares(self.release):
            return f"nothing changed: {self.release} is declared in releases.toml"
        return (
            f'nothing changed: add [[release]] version = "{self.release}" to releases.toml of {self.asked.system.name}'
        )


Say = Callable[[str], None]
Keep = Callable[[Result], None]


def port(asked: Asked, laboratory: Laboratory, known: KnownIssues, python: str | None, keep: Keep, say: Say) -> Port:
    """Look at a head.

    Args:
        laboratory: entered already. known: all known issues. keep: gets each result as soon as it is there. say: is
            told what is done.

    Raises:
        UsageError: no such commit, tree or clone. StoreFull: the disk filled.
    """
    began = time.monotonic()
    places = Environments(python, ())
    try:
        head = places.install(places.resolve(asked.system, asked.version))
    except OverlayError as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        misfit = Misfit("import", f"{lines[-1]}: the tree cannot be imported", _place_in(lines))
        return Port(asked, misfits=(misfit,), duration_s=time.monotonic() - began)
    called, release = head.version, head.asked_of_limits
    say(f"{asked.system.name} {asked.version} calls itself {called}; reading what our driver uses of it")
    gone = _read(asked, places)
    stale = _stale(asked, python)
    found = _Found(asked, known, laboratory, keep)
    found.run(release, stale, say)
    misfits = list(found.misfits(gone))
    misfits += list(found.cures(gone, misfits))
    misfits += [
        Misfit("limit", f"{each.axis} {each.value} is refused: {each.reason}")
        for each in lost(asked.system, asked.base, release)
    ]
    log = log_between(package_of(asked.system), asked.version, asked.base)
    repaired = tuple(_with_commits(asked.system, repair, log) for repair in found.repaired())
    return Port(
        asked, called, tuple(misfits), repaired, tuple(found.new(gone)), found.counts,
        tuple(each for each in gone if each not in found.met(gone)),
        found.still_there, log is not None and bool(log.base), found.planned, found.interrupted,
        time.monotonic() - began,
    )  # fmt: skip


def _read(asked: Asked, places: Environments) -> list[Changed]:
    """What our driver uses that the base has and the head has not; nothing where the base is not to be had."""
    tree = package_of(asked.system).tree.replace("/", ".")
    try:
        base, head = (
            places.install(places.resolve(asked.system, version)).paths for version in (asked.base, asked.version)
        )
    except (HarnessError, UsageError):
        return []
    return changes(*driver_calls(asked.system, tree), Tree(base, tree), Tree(head, tree))


def _stale(asked: Asked, python: str | None) -> dict[str, str]:
    """Cure → why it does not apply to the head, of those that apply to the base."""
    found = cure_table.applicability(asked.system, [asked.base, asked.version], python)
    ids = [cure.id for cure in cures.cures_of(asked.system)]
    applied = [cure for cure in ids if found[cure, asked.base] == cure_table.APPLIES]
    return {cure: why for cure in applied if (why := found[cure, asked.version]) != cure_table.APPLIES}


def _with_commits(system: System, repair: Repair, log: Log | None) -> Repair:
    if log is None or repair.finding is None:
        return repair
    finding = repair.finding
    cure = next((cure for cure in cures.cures_of(system) if cure.id == finding.cure), None)
    return replace(repair, commits=log.explaining(finding, cure))


def _place_in(lines: Iterable[str]) -> str:
    """The innermost place below `site-packages` in the last lines of an error, other than our own."""
    frame = re.compile(rf'{LIBRARY}([^"]+)", line (\d+)')
    places = [found for line in lines if (found := frame.search(line))]
    return f"{places[-1][1]}:{places[-1][2]}" if places else ""


def explaining(gone: Iterable[Changed], result: Result) -> Changed | None:
    """What is gone from the tree that a result ran into: an error of ours, or one that ended in the library's frames
    because we called it so."""
    said = result.error.message if result.error else result.reason
    return next((each for each in gone if said and each.explains(said)), None)


class _Found:
    """The results of `shardproof port` as they come in: conformance checks, scenarios of the walk, regressions and
    cures."""

    def __init__(self, asked: Asked, known: KnownIssues, laboratory: Laboratory, keep: Keep) -> None:
        self.asked, self._known, self._laboratory, self._keep = asked, known, laboratory, keep
        self.interrupted, self.planned = False, 0
        self.counts = dict.fromkeys((CHECKED, WALKED, KEPT), 0)
        self._kit: list[Misfit] = []
        self._walked: list[Result] = []
        self._tried: list[RegressionRun] = []
        self._cures: list[CureCheck] = []

    def run(self, release: str, stale: Iterable[str], say: Say) -> None:
        """Run the kit, the covering scenarios and the regressions, and then those of cures that no longer apply; Ctrl-C
        ends it and keeps what is there.

        Args:
            stale: the ids of those cures.
        """
        system, version = self.asked.system, self.asked.version
        for cure in cures.cures_of(system):  # a name without a file is told before anything runs
            for name in cure.shown_by:
                cure_table.scenario_of(system, name)
        kept = regressions(system, section_of(system).findings, one_each=self.asked.quick)
        of_scenario = {placed_on(each.scenario, version): each for each in kept}
        walked = [s for s in covering(system, version, release) if s not in of_scenario]
        self.planned = 1 + len(walked) + len(of_scenario)
        try:
            self._check(say)
            self._side_by_side(walked, of_scenario)
            self._ask_cures(frozenset(stale), say)
        except KeyboardInterrupt:
            self.interrupted = True

    def _check(self, say: Say) -> None:
        """The conformance kit, if the plain scenario passes."""
        system, version = self.asked.system, self.asked.version
        results = self._examined(replace(plain_scenario(system), version=version), quick=self.asked.quick)
        for result in results:
            self._keep(result)
        self.counts[WALKED] += 1
        if results[0].verdict is not Verdict.PASS:
            self._walked += results
            say(f"the plain scenario does not pass, so that the conformance kit says nothing: {brief(results[0])}")
            return
        left_out = (*OF_NO_HEAD, *(SLOW if self.asked.quick else ()))
        for name in (name for name in CHECKS if name not in left_out):
            found = list(check_system(system, self._laboratory, version, [name]))
            self.counts[CHECKED] += 1
            for check in found:
                say(check.line)
            self._kit += self._no_longer(name, [check for check in found if check.wrong])

    def _no_longer(self, name: str, wrong: Sequence[Check]) -> Iterator[Misfit]:
        """The checks that do not hold on the head, without those that do not hold on the base either."""
        if not wrong:
            return
        on_base = check_system(self.asked.system, self._laboratory, self.asked.base, [name])
        before = {check.name for check in on_base if check.wrong}
        for check in wrong:
            if check.name not in before:
                yield Misfit("kit", f"{check.name}: {check.wrong}".split("\n", 1)[0])

    def _side_by_side(self, walked: Sequence[Scenario], of_scenario: Mapping[Scenario, Regression]) -> None:
        every = [*walked, *of_scenario]
        estimates = {scenario.id: cost_model().estimate_s(scenario) for scenario in every}

        def work(scenario: Scenario) -> tuple[Regression | None, tuple[Result, ...]]:
            kept, results = of_scenario.get(scenario), self._examined(scenario, quick=self.asked.quick)
            return kept, (self._beyond(kept, results) if kept else results)

        with Progress(estimates, sys.stderr) as progress:
            for kept, results in self._laboratory.side_by_side(work, every):
                for result in results:
                    progress.finished(result)
                    self._keep(result)
                if kept is None:
                    self._walked += results
                else:
                    self._tried.append(judged(kept, results, self.asked.base, self._known))
                self.counts[WALKED if kept is None else KEPT] += 1

    def _beyond(self, kept: Regression, results: tuple[Result, ...]) -> tuple[Result, ...]:
        """The results of a regression. If another known defect ends the regression early, the scenario is run again
        with that defect cured, so that the result says something about its own defect."""
        seen = beyond(kept, results[0], self._known, partial(self._laboratory.examine_one, confirm=False))
        return results if seen is results[0] else (seen,)

    def _examined(self, scenario: Scenario, *, quick: bool) -> tuple[Result, ...]:
        """A result with the known issues that it is due to, and what fails behind it. A quick look goes by the face."""
        first = self._laboratory.examine_one(scenario, confirm=False)
        if quick and (named := self._known.match(first)):
            return (replace(first, known_issue=named),)
        examine = partial(self._laboratory.examine_one, confirm=False)
        return attributed(first, self._known, examine, self._laboratory.confirmed, self._laboratory.witness)

    @property
    def _every(self) -> list[Result]:
        return [*self._walked, *(tried.result for tried in self._tried)]

    def met(self, gone: Sequence[Changed]) -> list[Changed]:
        """The changed or removed library functions that at least one failing result can be traced to."""
        return [cause for result in self._every if (cause := explaining(gone, result))]

    def misfits(self, gone: Sequence[Changed]) -> Iterator[Misfit]:
        """What the driver and the readers do not fit, a line a reason, those that hide most first; then the kit's."""
        found: dict[str, Misfit] = {}
        for result in self._every:
            cause = explaining(gone, result)
            if cause is None and result.verdict is not Verdict.UNKNOWN:
                continue
            if cause is None:
                misfit = Misfit("driver", reason(result))
            else:
                misfit = Misfit("driver", cause.what, cause.place, cause.called)
            found.setdefault(misfit.what, misfit)
            found[misfit.what] = replace(found[misfit.what], results=(*found[misfit.what].results, result))
        yield from sorted(found.values(), key=lambda misfit: -len(misfit.results))
        yield from self._kit
        yield from self._refused()

    def _refused(self) -> Iterator[Misfit]:
        """What a limit refuses on the head and not on the base, a line a reason."""
        found: dict[str, list[Result]] = {}
        for result in self._every:
            on_base = replace(result.scenario, version=self.asked.base)
            if result.verdict is Verdict.UNSUPPORTED and self.asked.system.refusal(on_base) is None:
                found.setdefault(result.reason, []).append(result)
        for why, results in found.items():
            yield Misfit("limit", f"refused there, and not on {self.asked.base}: {why}", results=tuple(results))

    def _ask_cures(self, stale: frozenset[str], say: Say) -> None:
        """For each cure that no longer applies to the head, run the cure's scenarios with the remaining cures applied,
        to see whether the defect is still present."""
        asked = [question for question in questions(self._walked) if question.cure in stale]
        if asked:
            say(f"running the scenarios of {len(asked)} cures that do not apply there")
        self._cures = checked(asked, self._once)

    def _once(self, scenarios: Iterable[Scenario]) -> Iterator[tuple[Result, ...]]:
        work = partial(self._laboratory.examine_one, confirm=False)
        for result in self._laboratory.side_by_side(work, scenarios):
            self._keep(result)
            yield (result,)

    def cures(self, gone: Sequence[Changed], misfits: Sequence[Misfit]) -> Iterator[Misfit]:
        """The cures that do not apply to the head, though what they cured still fails or nothing shows that it does
        not; without those of which only something else that does not fit keeps us from knowing."""
        for check in self._cures:
            hidden = any(each.explains(check.shows) for each in gone) or any(m.what in check.shows for m in misfits)
            if check.standing not in (CURE_REPAIRED, LATER) and not hidden:
                why, _, place = check.why.partition(": ")
                place = place.replace(", line ", ":") if ", line " in place else place
                yield Misfit("cure", f"cure {check.cure} is {check.standing}: {why}; {check.shows}", place)

    def repaired(self) -> Iterator[Repair]:
        """The entries of which a regression passes that failed on the base."""
        by_entry: dict[str, list[RegressionRun]] = {}
        for tried in self._tried:
            by_entry.setdefault(
                tried.regression.finding.id if tried.regression.finding else tried.regression.name, []
            ).append(tried)
        gone = {check.cure for check in self._cures if check.standing == CURE_REPAIRED}
        for finding in section_of(self.asked.system).findings:
            if finding.cure in gone and finding.id not in by_entry and not finding.fixed:
                yield Repair(finding, (f"the scenario of cure {finding.cure}",))
        for several in by_entry.values():
            passing = tuple(tried.regression.name for tried in several if tried.state is State.REPAIRED)
            failing = tuple(tried.regression.name for tried in several if tried.result.verdict.is_failure)
            if passing:
                yield Repair(several[0].regression.finding, passing, failing)

    def new(self, gone: Sequence[Changed]) -> Iterator[New]:
        """The failures that no entry explains, by signature; then what an entry says is repaired and is not."""
        found: dict[str, New] = {}
        names = {tried.result.id: tried.regression.name for tried in self._tried}
        otherwise = [t.result for t in self._tried if t.state is State.OTHERWISE]
        fresh = [r for r in self._walked if r.verdict.is_failure and not r.known_issue]
        for result in (*fresh, *otherwise, *(r for tried in self._tried for r in tried.behind)):
            if explaining(gone, result):
                continue
            before = found.get(result.signature, New(result.signature, ()))
            name = (names[result.id],) if result.id in names else ()
            found[result.signature] = replace(before, results=(*before.results, result), names=(*before.names, *name))
        yield from sorted(found.values(), key=lambda new: -len(new.results))
        for tried in self._tried:
            if tried.state is State.BACK and tried.regression.finding:
                why = f"{tried.regression.finding.id} says that it is fixed in {tried.regression.finding.fixed}"
                yield New(tried.result.signature, (tried.result,), (tried.regression.name,), why)

    @property
    def still_there(self) -> int:
        """How many regressions fail as their entries say."""
        return sum(tried.state is State.THERE for tried in self._tried)
