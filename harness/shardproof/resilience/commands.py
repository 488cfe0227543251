"""`shardproof resilience --command '…'`: a training script as it is, killed while it writes, and started again.

The command has the places of `shardproof trainer --command`. A run of it is cut early; the same command, which resumes
in that folder, runs under strace, and every change that it makes there is recorded. From the record follows each folder
that a kill may leave (`states`): up to any change, inside of any write, and without what no sync had put on disk. Each
of these folders is put in the place of the script's own, the same command is run in it once more, and its last
checkpoint is compared with that of the recorded run:

    resumed   equal: the run came to the end that it would have come to without a kill
    anew      equal to a run from the beginning, though there was a checkpoint: the steps before are lost
    error     the command fails, and would however often it is started: somebody has to repair the folder by hand
    silent    it ends well, with another checkpoint
    hang      it does not end. crash: a signal ended it
    unsteady  two tries in the same folder did not come to the same

A run that begins anew ends as one that resumes. So the recorded run resumes from a checkpoint of which one value of
each tensor was changed before: no run from the beginning can come to its end.

*Verifies*: what is in the last checkpoint, and that the record explains all that the run changed in its folder. *Does
not verify*: state that no checkpoint holds; other orders in which ranks may have written; what the script keeps
elsewhere. No process is killed: the folders are made from the record, so that none depends on chance.
"""

from __future__ import annotations

import hashlib
import os
import random
import shlex
import shutil
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from shardproof.errors import UsageError, printable
from shardproof.folders import at_work_in
from shardproof.resilience.events import Event, Trace, tree_of, write_tree
from shardproof.resilience.planned_trials import Counts, FinishedTrial, planned_crash
from shardproof.resilience.run import ResilienceOutcome, ResilienceRequest, StackResult
from shardproof.resilience.stack_processes import HostError
from shardproof.resilience.stacks import Stack
from shardproof.resilience.states import State, crash_states, states_called
from shardproof.resilience.trace import TraceError, lines_of, recorded_of, recording, require_complete
from shardproof.resilience.trial import TrialVerdict
from shardproof.resilience.trial_store import TrialStore
from shardproof.trainer.command import text
from shardproof.trainer.command.arms import CommandArms
from shardproof.trainer.command.asked import AskedCommand
from shardproof.trainer.command.checkpoints import Checkpoint, change_values, compared
from shardproof.trainer.command.runs import Ran, Runs
from shardproof.verdict import Verdict

OUTCOMES = ("resumed", "anew", "error", "silent", "hang", "crash", "unsteady")
KINDS = ("killed", "torn", "lost")
"""Of `states.KINDS`. A trial is a run of the command, so that states which take many to tell apart are left out."""
TRIALS = 40
"""So many trials, unless more or fewer are asked for."""
MOST_RECORD = 1 << 29
"""Bytes of strace's record that are read."""
RECORDED_PATIENCE = 3
"""How many times the deadline a run under strace may take."""
LONG_AGO_S = 1_000_000


@dataclass(frozen=True)
class CommandTrials:
    """A command that is ready to be tried.

    Attributes:
        trace: what the recorded run changed. base: the folder in which it resumed. end: its last checkpoint.
        fresh: the last checkpoint of a run from the beginning, where it differs from that; else None.
        unsteady: names that differ between two equal runs.
    """

    runs: Runs
    trace: Trace
    base: Path
    end: Checkpoint
    fresh: Checkpoint | None
    unsteady: frozenset[str]

    @cached_property
    def states(self) -> list[tuple[str, str, bool]]:
        """Label and kind of each state, and whether it lies between two files."""
        return [(one.label, one.kind, is_between_files(one, self.trace.events))
                for one in crash_states(self.trace, KINDS)]  # fmt: skip

    def made(self, state: State) -> FinishedTrial:
        """The trial of a state. A wrong outcome counts once it came again."""
        planned = planned_crash(state, self.trace)
        first = self._tried(state)
        if first.outcome != "resumed" and self._tried(state, patience=2).outcome != first.outcome:
            first = TrialVerdict("unsteady", f"{first.outcome} in one of two tries: {first.why}")
        return FinishedTrial(state.label, state.kind, planned.what, first.outcome, first.why)

    def _tried(self, state: State, patience: int = 1) -> TrialVerdict:
        folder = self.runs.out / "state"
        shutil.rmtree(folder, ignore_errors=True)
        write_tree(state.tree, folder)
        _set_times(folder, state, self.trace, self.base)
        return self._judged(self.runs.anew("trial", self.runs.asked.whole, folder, patience=patience))

    def _judged(self, ran: Ran) -> TrialVerdict:
        if ran.status is None:
            return TrialVerdict("hang", f"it did not come to an end within {ran.seconds:.0f} s")
        if ran.status:
            return TrialVerdict("crash" if ran.status < 0 else "error", printable(ran.said_last))
        if not ran.checkpoints:
            return TrialVerdict("silent", "it ended well, and left no checkpoint")
        last = ran.checkpoints[-1]
        if last.number != self.end.number:
            return TrialVerdict("silent", text.of_numbers("The run", last.number, self.end.number))
        if (apart := differing(self.end, last, self.unsteady)) is None:
            return TrialVerdict("resumed")
        if self.fresh and differing(self.fresh, last, self.unsteady) is None:
            return TrialVerdict("anew", "It trained from the beginning again, and ended well.")
        return TrialVerdict("silent", apart)


def differing(expected: Checkpoint, observed: Checkpoint, unsteady: frozenset[str]) -> str | None:
    """How a checkpoint differs from another, in a sentence; None where it does not. What it has besides does not count,
    since a kill leaves files behind that no load reads."""
    found = compared(expected, observed)
    if found.why:
        return text.not_read(found) if found.unread else None
    left = tuple(one for one in found.found if one.name not in unsteady and one.kind != "extra")
    return text.of_last(left) if left else None


def is_between_files(state: State, events: Sequence[Event]) -> bool:
    """Whether a kill came between two changes that are no writes of one file."""
    if state.kind != "killed":
        return False
    around = events[max(0, state.crash - 1) : state.crash + 1]
    return len(around) < 2 or any(one.kind != "write" for one in around) or around[0].path != around[1].path


def _set_times(folder: Path, state: State, trace: Trace, base: Path) -> None:
    """Give files and folders times of change in the order in which the run changed them: some scripts choose by them
    which checkpoint is the newest."""
    before = sorted(trace.base, key=lambda path: (base / path).lstat().st_mtime_ns)
    order = {path: number - len(before) for number, path in enumerate(before)}
    for number, event in enumerate(trace.events[: state.crash], 1):
        if not event.kind.startswith("sync"):
            for path in filter(None, (event.path, event.target)):
                order[path] = order[os.path.dirname(path)] = number
    now = folder.stat().st_mtime - LONG_AGO_S
    for path in state.tree:
        moment = now + order.get(path, 0)
        os.utime(folder / path, (moment, moment), follow_symlinks=False)


def prepared(runs: Runs) -> CommandTrials:
    """The runs before the trials, the last of them recorded.

    Raises:
        HostError: the command fails, is not deterministic, or does not resume. TraceError: it cannot be recorded.
        UsageError: it cannot be started, or leaves nothing in its folder.
    """
    arms = CommandArms(runs)
    twice = arms.twice()
    if twice.verdict != Verdict.PASS.value:
        raise _refused(twice.sentence)
    cut = runs.of("cut-1", runs.asked.cut)
    if not cut.ended_well or not cut.checkpoints:
        nothing = text.nothing_to_resume(runs.asked.cut, cut)
        raise _refused(nothing if cut.ended_well else text.of_failure("cut", cut).sentence)
    unsteady = frozenset(arms.unsteady)
    ran, fresh = _recorded(runs, cut, changed=True), None
    if not _came_to_an_end(ran, arms.last):
        ran = _recorded(runs, cut, changed=False)
        if not _came_to_an_end(ran, arms.last):
            raise _refused(f"{text.of_failure('resumed', ran).sentence} Nothing was killed yet.")
    elif differing(arms.last, ran.checkpoints[-1], unsteady) is not None:
        fresh = arms.last
    elif not compared(cut.checkpoints[-1], cut.checkpoints[-1]).why:
        raise _refused(text.BEGINS_ANEW)
    base = runs.out / "kept" / f"base-of-{ran.name}"
    return CommandTrials(runs, _trace_of(runs, ran, base), base, ran.checkpoints[-1], fresh, unsteady)


def _refused(sentence: str) -> HostError:
    return HostError(f"no kill was tried: {sentence}")


def _came_to_an_end(ran: Ran, last: Checkpoint) -> bool:
    return ran.ended_well and bool(ran.checkpoints) and ran.checkpoints[-1].number == last.number


def _recorded(runs: Runs, cut: Ran, *, changed: bool) -> Ran:
    """The run that resumes, under strace."""
    name = f"recorded{'' if changed else '-unchanged'}"
    base = runs.out / "kept" / f"base-of-{name}"
    if not base.is_dir():
        half = base.with_suffix(".half")
        shutil.rmtree(half, ignore_errors=True)
        shutil.copytree(cut.folder, half, symlinks=True)
        if changed:
            change_values(half)
        half.rename(base)
    under = [*recording(_record(runs, name)), "--"]
    return runs.of(name, runs.asked.whole, base=base, under=under, patience=RECORDED_PATIENCE)


def _record(runs: Runs, name: str) -> Path:
    return runs.out.absolute() / "logs" / f"{name}.strace"


def _trace_of(runs: Runs, ran: Ran, base: Path) -> Trace:
    record, before = _record(runs, ran.name), tree_of(base)
    if (size := record.stat().st_size) > MOST_RECORD:
        raise TraceError(
            f"the record of what the run wrote has {size >> 20} MiB, and at most {MOST_RECORD >> 20} MiB are read: "
            "take a smaller model, or fewer steps (--steps)"
        )
    found = list(recorded_of(lines_of(record), runs.work, before))
    trace = Trace(before, tuple(event for _, event, _ in found), tuple(call for *_, call in found))
    require_complete(trace, tree_of(ran.folder))
    if not trace.events:
        raise _refused("the resumed run changed nothing in its folder. Does it save between the two of --steps?")
    return trace


def drawn(states: Sequence[tuple[str, str, bool]], most: int, seed: int) -> set[str]:
    """The labels of as many states: those between two files first, then of each kind about as many."""
    draw = random.Random(seed)
    between = [label for label, _, is_between in states if is_between]
    chosen = draw.sample(between, min(len(between), most))
    waiting = {kind: [label for label, own, is_between in states if own == kind and not is_between] for kind in KINDS}
    for labels in waiting.values():
        draw.shuffle(labels)
    while len(chosen) < most and any(waiting.values()):
        chosen += [labels.pop() for labels in waiting.values() if labels]
    return set(chosen[:most])


def stack_of(asked: AskedCommand) -> Stack:
    """A command as a row of the scorecard."""
    resume = f" --resume {shlex.quote(asked.resume)}" if asked.resume else ""
    ranks = next(iter(asked.worlds), 1)
    world = f" --world {ranks}" if asked.worlds else ""
    words = f"--command {shlex.quote(asked.text)} --steps {asked.cut},{asked.whole}{world}{resume}"
    return Stack(asked.name, asked.text, "", ranks=ranks, words=words)


def try_command(asked: AskedCommand, request: ResilienceRequest, runs: Runs) -> ResilienceOutcome:
    """Make the trials of a command; a Ctrl-C ends them, and what was made by then is kept.

    Raises:
        HostError, TraceError, UsageError: as `prepared`. StoreFull: the disk is full.
    """
    outcome = ResilienceOutcome()
    stack, watch = stack_of(asked), request.watch
    with ExitStack() as open_:
        open_.enter_context(at_work_in(runs.out))
        by = {"seed": request.seed, "trials": request.trials}
        kept = open_.enter_context(TrialStore(runs.out, by))
        try:
            ready = prepared(runs)
            labels = drawn(ready.states, request.trials, request.seed)
            found = _result(stack, ready, len(labels))
            outcome.found.append(found)
            made = kept.begun(stack.name, _key(asked, ready.trace))
            if watch is not None:
                watch.stack(stack.name)
                if made:
                    watch.resumed(stack.name, len(made), len(labels))
            for state in states_called(labels, ready.trace, KINDS):
                if state.label not in made:
                    made[state.label] = ready.made(state)
                    kept.add(stack.name, made[state.label])
                found.tried.append(made[state.label])
                if watch is not None:
                    watch.trials_done(len(found.tried), len(labels))
        except KeyboardInterrupt:
            outcome.interrupted = True
        else:
            kept.end()
            runs.forget()
            shutil.rmtree(runs.out / "state", ignore_errors=True)
    return outcome


def _result(stack: Stack, ready: CommandTrials, planned: int) -> StackResult:
    events, counted = ready.trace.events, Counter(kind for _, kind, _ in ready.states)
    syncs = sum(event.kind.startswith("sync") for event in events)
    between = sum(is_between for *_, is_between in ready.states)
    note = f"{between} states lie between two files"
    if ready.fresh is None:
        note += "; a run that begins anew cannot be told from one that resumes, in checkpoints of this format"
    if not any(event.kind in ("unlink", "rmdir") for event in events):
        note += "; nothing was removed, so that a limit on old checkpoints was not tried, which more steps may reach"
    return StackResult(stack, len(events), syncs, Counts(counted.total(), 0), planned, note=note, outcomes=OUTCOMES)


def _key(asked: AskedCommand, trace: Trace) -> str:
    events = [f"{event.kind} {event.offset}+{len(event.data)}" for event in trace.events]
    return hashlib.sha256("\n".join([asked.key, *events]).encode()).hexdigest()[:16]


def replay_command(label: str, runs: Runs) -> tuple[FinishedTrial, Trace]:
    """Make one trial again; also gives the record.

    Raises:
        UsageError: there is none of that label.
    """
    with at_work_in(runs.out):
        ready = prepared(runs)
        for state in states_called({label}, ready.trace, KINDS):
            return ready.made(state), ready.trace
    form = f"shardproof resilience {stack_of(runs.asked).words} --trial killed@1"
    raise UsageError.of("--trial", label, "a trial of this command", form)
