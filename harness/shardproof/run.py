"""The whole flow, scenario to report. Read this first: it is the map of everything.

    request ── plan ──► store (planned) ──► executor ────► results ──► store ──► reports
                                            │ observe: world (fresh ranks, or lockstep) → records → store
                                            │ judge:   twin and reference → assemble → diff → diagnosis
                                            │ attribute: a failure that looks like a known defect runs with that cured
                                            └ confirm: any other is observed again in fresh ranks

1. `shardproof.cli.main` makes a `Request` of the command line: the plan, where results go, what counts as known.
2. The plan is stored before anything runs, so that a scenario that vanishes is seen (`_begin`).
3. The executor (`shardproof.laboratory.executor`) has a laboratory take each scenario from ranks to a verdict
   (`shardproof.laboratory.laboratory`): the one of this machine, which stores what was observed before anyone looks at
   it, or one of a cluster's node.
4. Each result is compared with the known issues and stored as soon as it exists (`run`).
5. In a walk that asks for it, such as `nightly`, the simplest scenario of each new cause is shrunk further, and what
   comes out is added to the results. After a walk over a head it is asked what became of the cures that do not apply
   there (`shardproof.investigate.stale_cures`).
6. The reports are written from the store, never from memory, so that `shardproof report` can write them again.

A run is resumed when its folder holds an unfinished one of the same plan and releases. Ctrl-C, a dead server or a full
disk keep everything that was committed. docs/architecture.md follows one scenario through all of this.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from pathlib import Path

from shardproof.errors import UsageError, printable
from shardproof.folders import at_work_in
from shardproof.investigate.shrink import NewCauses
from shardproof.investigate.stale_cures import checked, questions
from shardproof.issues.known_issues import KnownIssues
from shardproof.laboratory.executor import Executor, LocalExecutor, installed_versions
from shardproof.laboratory.laboratory import Laboratory
from shardproof.protocol.registry import all_systems
from shardproof.report.files import write_reports
from shardproof.report.head_results import CureCheck
from shardproof.report.model import Report
from shardproof.report.progress import Progress
from shardproof.result import Result
from shardproof.scenario import Scenario
from shardproof.space.plan import Plan
from shardproof.store import Run, Store, now
from shardproof.verdict import ExitStatus

DATABASE = "results.sqlite"


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a run was asked for.

    * out: folder of the database and the reports.
    * command: the arguments, for the record.
    * python: interpreter of the ranks.
    * releases: package under test → releases that will run.
    * known: issues that count as known; empty when scenario files were named, which report their plain verdicts.
    * issues: all entries, for what reports say of a finding.
    * json, junit: further files to write.
    * quiet: no progress is shown.
    * ray: the cluster that scenarios run on; none for this machine.
    """

    plan: Plan
    out: Path
    command: tuple[str, ...]
    seed: int
    jobs: int
    deadline_s: float
    plugins: tuple[str, ...] = ()
    python: str | None = None
    releases: Mapping[str, str] = field(default_factory=dict)
    known: KnownIssues = field(default_factory=KnownIssues)
    issues: KnownIssues = field(default_factory=KnownIssues)
    json: Path | None = None
    junit: Path | None = None
    quiet: bool = False
    ray: OnRay | None = None


@dataclass(frozen=True)
class OnRay:
    """A cluster of Ray's to run on.

    * address: empty for what `ray.init` finds.
    * most: slots at once (`shardproof.cluster.handout`); as many as there is room for without.
    """

    address: str = ""
    most: int | None = None


@dataclass(frozen=True)
class Outcome:
    """How a run ended. interrupted: by Ctrl-C, with `report` holding what was reached."""

    report: Report
    page: Path
    interrupted: bool

    @property
    def status(self) -> ExitStatus:
        """The exit status that the command line promises. A planned scenario without a verdict is the harness's
        fault, unless the user pressed Ctrl-C."""
        report = replace(self.report, missing=()) if self.interrupted else self.report
        return report.status


def run(request: Request) -> Outcome:
    """Execute a request and write its reports.

    Raises:
        UsageError: the folder cannot be written, another run is at work in it, or its database is not a sound one of
            ours.
        StoreFull: the disk filled; everything committed before is kept.
    """
    with at_work_in(request.out), Store(request.out / DATABASE) as store:
        interrupted = False
        with _executor(request) as executor:  # its servers import torch while the plan is stored
            run_id, todo = _begin(store, request)
            try:
                for results in _examined(store, run_id, todo, request, executor):
                    store.finished_many(run_id, results)
                _check_cures(store, run_id, request, executor)
            except KeyboardInterrupt:
                interrupted = True
        store.prune(run_id)
        report = Report.of(store, run_id, request.issues)
        if not interrupted:
            report = replace(report, run=replace(report.run, ended_at=now()))
        page = write_reports(report, request.out, request.json, request.junit)
        if report.run.ended_at:  # only now: a run that was killed before its reports goes on with them
            store.end_run(run_id, report.run.ended_at)
        return Outcome(report, page, interrupted)


def _begin(store: Store, request: Request) -> tuple[str, list[Scenario]]:
    """The run to work on, and the scenarios of it that have no verdict yet.

    That is the folder's latest run if it was cut off and has the same plan and releases; otherwise a new one.
    """
    latest, releases = store.latest_run(), versions(request)
    planned = {scenario.id for scenario in request.plan.scenarios}
    if latest and _goes_on(store, store.run(latest), planned, releases):
        todo = store.unfinished(latest)
        print(f"resuming run {latest}: {len(planned) - len(todo)} of {len(planned)} done", file=sys.stderr)
        return latest, todo
    every = list(request.plan.scenarios)
    return store.begin_run(request.command, request.seed, releases, request.plan.excluded, every), every


def _goes_on(store: Store, run: Run, planned: Set[str], releases: Mapping[str, str]) -> bool:
    unfinished = run.ended_at is None and run.versions == releases
    return unfinished and {scenario.id for scenario in store.planned(run.id)} == planned


def _executor(request: Request) -> Executor:
    systems, logs = {scenario.system for scenario in request.plan.scenarios}, request.out / "logs"
    if request.ray is None:
        laboratory = Laboratory(
            jobs=request.jobs, deadline_s=request.deadline_s, plugins=request.plugins, python=request.python,
            keep=logs, systems=systems,
        )  # fmt: skip
        return LocalExecutor(laboratory, request.known)
    from shardproof.cluster.handout import ClusterExecutor
    from shardproof.cluster.node import setting_of
    from shardproof.cluster.on_ray import RayCluster

    samples = request.plan.supported or request.plan.scenarios
    return ClusterExecutor(
        RayCluster(request.ray.address, logs / "ray.log"),
        setting_of(samples, request.plugins, request.python, request.deadline_s, request.known),
        most=request.ray.most,
        keep=logs,
        say=lambda line: None if request.quiet else print(printable(line), file=sys.stderr, flush=True),
    )


def _examined(
    store: Store, run_id: str, todo: Iterable[Scenario], request: Request, executor: Executor
) -> Iterator[tuple[Result, ...]]:
    """Each scenario's result, and after it what fails behind a known issue; then the simplest scenario of each new
    cause, of a walk that asks for it."""
    causes = NewCauses(request.plan.shrink_s)
    estimates = {scenario.id: request.plan.estimate_s(scenario) for scenario in todo}
    with Progress(estimates, None if request.quiet else sys.stderr) as progress:
        for results in executor.attributed(todo, lambda scenario, blob: store.observed(run_id, scenario.id, blob)):
            for result in results:
                progress.finished(result)
                causes.add(result)
            yield results
        shrunk = causes.shrunk(lambda s: executor.examine_one(s, confirm=False), executor.examine_one)
        if shrunk:
            yield shrunk


def _check_cures(store: Store, run_id: str, request: Request, executor: Executor) -> None:
    """Ask, in a walk, what became of the cures that do not apply to a head; not twice, where a run is resumed."""
    if not request.known.issues:
        return
    known = {(check.system, check.version, check.cure) for check in store.cure_checks(run_id)}
    asked = [q for q in questions(store.results(run_id)) if (q.system, q.version, q.cure) not in known]
    if asked:
        if not request.quiet:
            print(f"asking what became of {len(asked)} cures that do not apply", file=sys.stderr)
        store.checked(run_id, checked(asked, lambda scenarios: executor.attributed(scenarios, lambda *_: None)))


def versions(request: Request) -> dict[str, str]:
    """The release of everything that a run's results depend on, as the interpreter of its ranks has them."""
    systems = {scenario.system for scenario in request.plan.scenarios}
    return {**installed_versions(systems, request.python), **request.releases}


Part = tuple[Run, list[Scenario], list[Result], list[CureCheck]]


def read_parts(databases: Sequence[Path]) -> list[Part]:
    """The latest run of each database, with what it planned and its results.

    Raises:
        UsageError: one of them is no database of ours, holds no run, or shares scenarios with another.
    """
    parts: list[Part] = []
    for database in databases:
        if not database.is_file():
            raise UsageError.of(
                "RUN", str(database.parent), f"a folder with a {DATABASE}", "shardproof merge part1 part2 --out all"
            )
        with Store(database) as store:
            latest = store.latest_run()
            if latest is None:
                raise UsageError.of(
                    "RUN", str(database.parent), "a folder with a run", "shardproof merge part1 part2 --out all"
                )
            found = (store.planned(latest), store.results(latest), store.cure_checks(latest))
            parts.append((store.run(latest), *found))
    _require_apart(parts)
    return parts


def _require_apart(parts: Sequence[Part]) -> None:
    """Check that parts belong together: they ran on the same torch and the like, and no scenario is in two of them.

    Raises:
        UsageError: they do not.
    """
    form = "shardproof merge part1 part2 --out all"
    common = [_environment(run) for run, *_ in parts]
    for found in common:
        if found != common[0]:
            raise UsageError.of("versions of a part", found, common[0].items(), form)
    ids = Counter(scenario.id for _, planned, *_ in parts for scenario in planned)
    twice = [scenario_id for scenario_id, times in ids.items() if times > 1]
    if twice:
        raise UsageError.of("scenarios in several parts", twice[:3], "each scenario in one part", form)


def _environment(run: Run) -> dict[str, str]:
    """The versions that all parts of a run have in common: not those of what is under test, which a matrix of jobs
    varies, and which every result names for itself."""
    own = {name for system in all_systems() for name in (*system.distributions, system.under_test)}
    return {name: version for name, version in run.versions.items() if name not in own or name == "torch"}


def absent_parts(parts: Sequence[Part]) -> list[str]:
    """The parts that are not there: where a run was `--shard 1/4` of some selection, the others of the four that
    nobody handed in, as the words that would run them."""
    found: dict[tuple[str, ...], set[str]] = {}
    for run, *_ in parts:
        asked, shard = _without_shard(run.command)
        if shard:
            found.setdefault(asked, set()).add(shard)
    return [
        " ".join((*asked, "--shard", f"{number}/{shard.partition('/')[2]}"))
        for asked, shards in found.items()
        for shard in sorted(shards)[:1]
        for number in range(1, int(shard.partition("/")[2]) + 1)
        if f"{number}/{shard.partition('/')[2]}" not in shards
    ]


_WHERE = ("--out", "--json", "--junit", "-j", "--jobs", "--executor", "--ray-address")
"""Options of a run that do not change what runs."""


def _without_shard(command: Sequence[str]) -> tuple[tuple[str, ...], str]:
    """The words of a command that say what runs, without its `--shard`, and the value of that."""
    words = iter([part for word in command for part in (word.split("=", 1) if word.startswith("--") else [word])])
    kept, shard = [], ""
    for word in words:
        if word == "--shard":
            shard = next(words, "")
        elif word in _WHERE:
            next(words, "")
        elif not re.fullmatch("-j[0-9]+", word):
            kept.append(word)
    return tuple(kept), shard


def _releases(parts: Sequence[Part], run: Run) -> dict[str, str]:
    """The versions of a run, and with them what other parts ran of the same."""
    return {
        name: ", ".join(dict.fromkeys(other.versions[name] for other, *_ in parts if name in other.versions))
        for name in run.versions
    }


def merge_runs(parts: Sequence[Part], target: Path, known: KnownIssues) -> Report:
    """Join runs into a new run of the database `target`."""
    first = parts[0][0]
    with Store(target) as store:
        exclusions = {reason: n for run, *_ in parts for reason, n in run.exclusions.items()}
        versions = {name: version for run, *_ in parts for name, version in _releases(parts, run).items()}
        every = [scenario for _, planned, *_ in parts for scenario in planned]
        run_id = store.begin_run(first.command, first.seed, versions, exclusions, every)
        store.finished_many(run_id, [result for _, _, results, _ in parts for result in results])
        store.checked(run_id, [check for _, _, _, checks in parts for check in checks])
        store.end_run(run_id)
        return Report.of(store, run_id, known)
