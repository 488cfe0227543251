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

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from shardproof.cluster.executors import executor_of
from shardproof.folders import at_work_in
from shardproof.investigate.shrink import NewCauses
from shardproof.investigate.stale_cures import checked, questions
from shardproof.laboratory.executor import Executor
from shardproof.report.files import write_reports
from shardproof.report.model import Report
from shardproof.report.progress import Progress
from shardproof.request import Outcome, Request
from shardproof.result import Result
from shardproof.scenario import Scenario
from shardproof.space.preparation import needs, preparation
from shardproof.store import DATABASE, Run, Store, now


def run(request: Request) -> Outcome:
    """Execute a request and write its reports.

    Raises:
        UsageError: the folder cannot be written, another run is at work in it, or its database is not a sound one of
            ours.
        StoreFull: the disk filled; everything committed before is kept.
    """
    with at_work_in(request.out), Store(request.out / DATABASE) as store:
        interrupted = False
        with executor_of(request) as executor:  # its servers import torch while the plan is stored
            run_id, todo = _begin(store, request)
            try:
                for results in _examined(store, run_id, todo, request, executor):
                    store.finished_many(run_id, results)
                _check_cures(store, run_id, request, executor)
            except KeyboardInterrupt:
                interrupted = True
        store.prune(run_id)
        report = Report.from_store(store, run_id, request.issues)
        if not interrupted:
            report = replace(report, run=replace(report.run, ended_at=now()))
        page = write_reports(report, request.out, request.json, request.junit)
        if report.run.ended_at:  # only now: a run that was killed before its reports goes on with them
            store.end_run(run_id, report.run.ended_at)
        return Outcome(report, page, interrupted)


def _begin(store: Store, request: Request) -> tuple[str, list[Scenario]]:
    """The run to work on, and the scenarios of it that have no verdict yet.

    That is the one that the request names, or the folder's latest run if it was cut off and has the same plan and
    releases, or the same command and a plan to which scenarios were added; otherwise a new one.
    """
    if request.goes_on:
        store.replan(request.goes_on, request.plan.scenarios)
        return request.goes_on, store.unfinished(request.goes_on)
    latest, releases = store.latest_run(), request.versions()
    stored = store.planned(latest) if latest else []
    if latest and _goes_on(store.run(latest), stored, request, releases):
        todo = store.unfinished(latest)
        if not request.quiet:
            print(f"resuming run {latest}: {len(stored) - len(todo)} of {len(stored)} done", file=sys.stderr)
        return latest, todo
    every = list(request.plan.scenarios)
    return store.begin_run(request.command, request.seed, releases, request.plan.excluded, every), every


def _goes_on(run: Run, stored: Sequence[Scenario], request: Request, releases: Mapping[str, str]) -> bool:
    """Whether a run was cut off that a request means: one of the same plan, or of the same command, which had added
    cells of the plan with another program, as `trainer` does by what the first ones show.

    Args:
        stored: what the run was going to execute.
    """
    planned = set(request.plan.scenarios)
    added = {scenario for scenario in stored if scenario not in planned}
    if run.ended_at is not None or run.versions != releases or len(planned) + len(added) != len(stored):
        return False
    programs = {scenario.program for scenario in planned}
    of_the_plan = all(any(replace(one, program=program) in planned for program in programs) for one in added)
    return of_the_plan and (not added or tuple(run.command) == tuple(request.command))


def _examined(
    store: Store, run_id: str, todo: Sequence[Scenario], request: Request, executor: Executor
) -> Iterator[tuple[Result, ...]]:
    """Each scenario's result, and after it what fails behind a known issue; then the simplest scenario of each new
    cause, of a walk that asks for it."""
    estimates = {scenario.id: request.plan.estimate_s(scenario) for scenario in todo}
    ready_s = preparation((s for s in todo if s not in request.plan.refused), request.python).seconds
    stream = None if request.quiet else sys.stderr
    causes = NewCauses(request.plan.shrink_s, stream)
    with Progress(estimates, stream, ready_s=ready_s, needs=needs) as progress:
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
