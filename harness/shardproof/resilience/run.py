"""All trials of a stack: save, record, work out what to try, make each trial, and count.

The steps of one stack, in a folder of its own that is gone afterwards: 1. The old state is saved, and taken to be on
disk for good. 2. The new state is saved and recorded. 3. The whole folder must load as the new state, or nothing that
follows would mean anything; that load is recorded, too. 4. Another run saves both of its states elsewhere, for files of
another run. 5. The planned trials (`planned_trials`) are made, several side by side. Each is a pure function of the two
records, the folders and the seed, and has processes and a folder of its own, so that it comes to the same however many
run at once.

Each trial is kept as soon as it is made (`trial_store`), so that a run which is cut off goes on where it was.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from queue import SimpleQueue
from typing import Protocol

from shardproof.errors import UsageError
from shardproof.folders import at_work_in
from shardproof.resilience.call_fault_runs import struck
from shardproof.resilience.corruptions import Folders
from shardproof.resilience.events import Trace, Tree, tree_of
from shardproof.resilience.planned_trials import Counts, FinishedTrial, PlannedTrial, StackRecording, cases, cases_like
from shardproof.resilience.stack_cures import cured
from shardproof.resilience.stack_processes import Bench, HostError, Lane
from shardproof.resilience.stacks import Stack
from shardproof.resilience.trial import MOST_SHOWN, OUTCOMES, Known, classify
from shardproof.resilience.trial_store import TrialStore
from shardproof.world.interpreter import interpreter

FIRST, OLD, NEW = 1, 2, 3
"""The generations that a trial has to do with. There is one before the old one, since some stacks remove it."""
OWN, OTHER = 1, 2
"""Training runs, whose states differ in everything."""
_DISTRIBUTIONS = ("torch", "numpy")


class Watch(Protocol):
    """Who is told how far the trials are."""

    def stack(self, name: str) -> None:
        """The trials of a stack begin."""

    def resumed(self, name: str, done: int, of: int) -> None:
        """So many trials of a stack had been made by an earlier run."""

    def trials_done(self, done: int, of: int) -> None:
        """So many trials of the stack are made."""


@dataclass(frozen=True)
class ResilienceRequest:
    """What is asked for. out: the folder that keeps the trials, if any. watch: is told how far it is."""

    stacks: Sequence[Stack]
    trials: int
    seed: int
    deadline_s: float
    jobs: int = 1
    out: Path | None = None
    watch: Watch | None = None


@dataclass
class StackResult:
    """All that the trials of one stack showed.

    Attributes:
        counts: how many crash states and strikes there are, tried or not.
        planned: how many trials there should be; after an interruption fewer were made.
        note: what of the state a load does not restore, or not in the same way twice, without any fault either.
        outcomes: those that a trial can have.
    """

    stack: Stack
    steps: int
    syncs: int
    counts: Counts
    planned: int
    tried: list[FinishedTrial] = field(default_factory=list)
    note: str = ""
    outcomes: Sequence[str] = OUTCOMES


@dataclass
class ResilienceOutcome:
    """What a request led to."""

    found: list[StackResult] = field(default_factory=list)
    interrupted: bool = False


@dataclass(frozen=True)
class Prepared:
    """A stack that is ready to be tried."""

    bench: Bench
    known: Known
    source: StackRecording
    note: str = ""

    @property
    def key(self) -> str:
        """Says how the stack saves: what it is made of, and the changes that it makes, in order. Bytes and names are
        left out, since a save may write down its own time, and name a file by chance before it renames it."""
        stack = self.bench.stack
        events = [f"{event.kind} {event.offset}+{len(event.data)}" for event in self.source.trace.events]
        loads = [f"{call.rank} {call.name} {call.nth}" for call in self.source.loads]
        made_of = [stack.driver, repr(stack.options), stack.made_of, stack.cured or "", *stack.requires]
        parts = [*made_of, *_releases(), *events, *loads]
        return hashlib.sha256("\n".join(parts).encode("utf-8", "surrogateescape")).hexdigest()[:16]


def _releases() -> Iterator[str]:
    for name in _DISTRIBUTIONS:
        try:
            yield f"{name}=={version(name)}"
        except PackageNotFoundError:
            yield name


@contextmanager
def prepared(stack: Stack, deadline_s: float, jobs: int = 1) -> Iterator[Prepared]:
    """A stack with its two states saved, the second one recorded.

    Raises:
        HostError: it cannot save, or not load what it saved. TraceError: its save cannot be recorded.
    """
    libraries = _libraries(stack)
    found = cured(stack, libraries, Path(interpreter().site))
    with Bench(stack, deadline_s, libraries, jobs, found.sources if found else {}) as bench:
        lane = bench.lanes[0]
        folder, other = bench.root / "own", bench.root / "other"
        folder.mkdir()
        other.mkdir()
        first, at_first = lane.save(folder, FIRST, OWN), tree_of(folder) if stack.by_load else {}
        old, before = lane.save(folder, OLD, OWN), tree_of(folder)
        new, trace = lane.record(folder, NEW, OWN)
        after = tree_of(folder)
        lane.save(other, FIRST, OTHER)
        lane.save(other, OLD, OTHER)
        known = Known(old, new, lane.save(other, NEW, OTHER), first)
        folders, note = Folders(after, before, tree_of(other)), ""
        if stack.by_load:
            known = _known_by_loads(lane, [before, after, folders.other, at_first])
            note = _not_restored(new, known)
        _require(lane.load(before), known, "old", stack)
        answer, loads = lane.record_load(after)
        _require(answer, known, "new", stack)
        yield Prepared(bench, known, StackRecording(trace, loads, folders, stack.ranks), note)


def _known_by_loads(lane: Lane, trees: Sequence[Tree]) -> Known:
    """The states that loads of undamaged folders give: the old one, the new one, another run's and the first. What
    differs between two loads of the new one is unsteady.

    Raises:
        HostError: a load fails, or gives the same of the old and of the new folder.
    """
    name = lane.bench.stack.name
    answers = [lane.load(tree) for tree in (*trees, trees[1])]
    for answer in answers:
        if answer["ended"] != "ok":
            why = answer.get("why", answer["ended"])
            raise HostError(f"stack {name} cannot load what it saved, though nothing happened to it: {why}")
    old, new, other, first, again = (answer["found"] for answer in answers)
    unsteady = frozenset(part for part in {*new, *again} if new.get(part) != again.get(part))
    known = Known(old, new, other, first, unsteady)
    if known.steady(old) == known.steady(new):
        raise HostError(f"stack {name}: a load gives the same of two checkpoints of different steps, so that no trial "
                        "could be told from another; does `load` read what `save` wrote?")  # fmt: skip
    return Known(known.steady(old), known.steady(new), known.steady(other), known.steady(first), unsteady)


def _not_restored(saved: Mapping[str, str], known: Known) -> str:
    """What a load does not give as it was saved, where the save says what that was."""
    names = sorted(name for name, digest in known.steady(saved).items() if known.new.get(name) != digest)
    told = {"not restored by any load": names, "not the same in two loads": sorted(known.unsteady)}
    return "; ".join(f"{what}, and not judged here: {_shortened(names)}" for what, names in told.items() if names)


def _shortened(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_SHOWN} more" if len(names) > MOST_SHOWN else ""
    return f"{', '.join(names[:MOST_SHOWN])}{more}"


def _require(answer: Mapping[str, object], known: Known, wanted: str, stack: Stack) -> None:
    if (said := classify(answer, known)).outcome != wanted:
        raise HostError(f"stack {stack.name} does not load its {wanted} state whole: {said.outcome} {said.why}")


def _libraries(stack: Stack) -> Sequence[Path]:
    """Folders with what a stack needs beside torch, installed on the spot."""
    from shardproof.protocol.registry import system_named
    from shardproof.protocol.releases import package_of
    from shardproof.world.overlay import build, install

    own = system_named(stack.system) if stack.system else None
    found = [install(stack.requires, interpreter())] if stack.requires else []
    return [*found, *(build(package_of(own), "", interpreter()).paths if own and own.package else ())]


def try_stacks(request: ResilienceRequest) -> ResilienceOutcome:
    """Make the trials of each stack; a Ctrl-C ends them, and what was made by then is kept.

    Raises:
        HostError, TraceError: as `prepared`. UsageError: another process is at work in the folder, or its trials are
            not ours. StoreFull: the disk is full.
    """
    outcome = ResilienceOutcome()
    with ExitStack() as open_:
        kept = None
        if request.out is not None:
            open_.enter_context(at_work_in(request.out))
            kept = open_.enter_context(TrialStore(request.out, {"seed": request.seed, "trials": request.trials}))
        try:
            for stack in request.stacks:
                if request.watch is not None:
                    request.watch.stack(stack.name)
                _try(stack, request, kept, outcome)
        except KeyboardInterrupt:
            outcome.interrupted = True
        else:
            if kept is not None:
                kept.end()
    return outcome


def _try(stack: Stack, request: ResilienceRequest, kept: TrialStore | None, outcome: ResilienceOutcome) -> None:
    with prepared(stack, request.deadline_s, request.jobs) as ready:
        every, counts = cases(ready.source, request.trials, request.seed)
        events = ready.source.trace.events
        found = StackResult(stack, len(events), sum(e.kind.startswith("sync") for e in events), counts, len(every),
                            note=ready.note)  # fmt: skip
        outcome.found.append(found)
        made = kept.begun(stack.name, ready.key) if kept is not None else {}
        made = {case.label: made[case.label] for case in every if case.label in made}
        if made and request.watch is not None:
            request.watch.resumed(stack.name, len(made), len(every))
        try:
            for tried in _side_by_side(ready, [case for case in every if case.label not in made]):
                if kept is not None:
                    kept.add(stack.name, tried)
                made[tried.label] = tried
                if request.watch is not None:
                    request.watch.trials_done(len(made), len(every))
        finally:
            found.tried = [made[case.label] for case in every if case.label in made]


def _side_by_side(ready: Prepared, every: Sequence[PlannedTrial]) -> Iterator[FinishedTrial]:
    """The cases' trials in the order in which they end, one in each lane at a time."""
    free: SimpleQueue[Lane] = SimpleQueue()
    ended: SimpleQueue[Future[FinishedTrial]] = SimpleQueue()

    def work(case: PlannedTrial) -> FinishedTrial:
        lane = free.get()
        try:
            return _made(ready, lane, case)
        finally:
            free.put(lane)

    for lane in ready.bench.lanes:
        free.put(lane)
    pool = ThreadPoolExecutor(len(ready.bench.lanes), thread_name_prefix="trial")
    try:
        for case in every:
            pool.submit(work, case).add_done_callback(ended.put)
        for _ in every:
            yield ended.get().result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def replay(stack: Stack, label: str, seed: int, deadline_s: float) -> tuple[FinishedTrial, Trace]:
    """Make one trial again, by its label; also gives the record that it was worked out of.

    Raises:
        UsageError: the stack's trials have none of that label.
    """
    with prepared(stack, deadline_s) as ready:
        for case in cases_like(label, ready.source, seed):
            if case.label == label:
                return _made(ready, ready.bench.lanes[0], case), ready.source.trace
    form = "shardproof resilience torch-save --trial killed@1"
    raise UsageError.of("--trial", label, f"a trial of stack {stack.name} with seed {seed}", form)


def _made(ready: Prepared, lane: Lane, case: PlannedTrial) -> FinishedTrial:
    if case.strike is not None:
        folders = ready.source.folders
        said = struck(lane, case.strike, folders.old, folders.new, ready.known, NEW, OWN)
    else:
        said = classify(lane.load(_tree(case)), ready.known)
    return FinishedTrial(case.label, case.kind, case.what, said.outcome, said.why)


def _tree(case: PlannedTrial) -> Tree:
    assert case.tree is not None
    return case.tree
