"""Faults of asynchronous saves: training goes on while one is in flight, and the save reads a tensor late.

An asynchronous save returns before its files are complete, so that training can go on. It must have its own copy of
everything by then. A save that still reads the live tensors writes what a later step has put there, and a checkpoint
with tensors of two steps loads without a word. Whether that shows is a matter of time, and time is what these faults
take away:

1. The save returns, and is not waited for. From here on every read that it makes is counted, in each thread and forked
   process that it has started: torch operations, but for those that only look at a tensor in another way, and each
   time that the bytes of a tensor go into a file.
2. At its k-th read the save is held. Training waits for that, and then takes its next step.
3. The save goes on, with all that it reads from the k-th read on now read late. Then it is waited for.

The step is a collective, so that no rank can take it alone, and the saves of several ranks wait for each other in
collectives of their own. So each collective of a save is first a meeting: the ranks that take part wait there for each
other. A save that waits for one that is held is held as well. Otherwise its rank would wait for the save, the save for
the held rank, and that one for the step. In torch.distributed.checkpoint, for example, rank 0 gathers the plans of all
and reads them, while rank 1 waits for its part of the whole plan. At a meeting all take over the highest count of
reads, so that a number means the same part of the save on every rank, and each read of every rank has its own number.

With k from 1 until nothing is written after the read any more, each point between two reads is forced once (`faults
--strike SYSTEM --every`). What was written is compared with what was there when the save was called, as of every save.

*Verifies*: at each of these points of every rank, that the next step is in no tensor that is written.
*Does not verify*: a tensor that is read while the step writes it, half old and half new; two steps in a row; reads of
a process that was spawned and not forked, or of a daemon thread; and reads by C++ code or numpy that no torch operation
comes before.
*Assumes* that the ranks of a group make the collectives of a save on it in the same order and in one thread each, and
that a save does not wait for another rank in any other way, such as by a receive or for a file.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import quote

from shardproof.faults.ranks import Around
from shardproof.program import Op, expand
from shardproof.protocol.system import RankContext, RankSystem
from shardproof.scenario import Scenario

_POLL_S = 0.0005
_COLLECTIVES = ("c10d", "_c10d_functional")
_BETWEEN_TWO = ("send", "recv", "p2p")

Finish = Callable[[], None]


def late_read(number: int) -> Around:
    """The `around` that holds the first asynchronous save at its read of this number, from 1, during the next step."""
    return _Overlap(number).around


def late_read_of_live(number: int) -> Around:
    """The same with a save that has no copy of what it saves: torch's stager gives back what it is given, and what
    would be a forked process, which has the memory of when it was forked, is a thread. A system whose library makes a
    copy of its own has `without_copies`."""
    return _Overlap(number, live=True).around


class _Overlap:
    """One rank's save that is in flight. Rank side; a process runs one scenario.

    Args:
        live: let it have no copy of what it saves.
    """

    def __init__(self, number: int, *, live: bool = False) -> None:
        self.number, self.live = number, live
        self.finish: list[Finish] = []
        self.watch = ExitStack()
        self.signs: _Signs | None = None

    def around(self, act: Finish, op: Op, context: RankContext, system: RankSystem) -> None:
        """Begin the save and leave it in flight, or take the step beside it."""
        if op.index == _overlapped(context.scenario):
            self.signs = _Signs(context.directory, context.rank)
            self.signs.folder.mkdir()
            if self.live:
                self.watch.enter_context(_without_copies())
                self.watch.enter_context(getattr(system, "without_copies", nullcontext)())
            self.watch.enter_context(_reads_watched(_Reader(self.signs, self.number, context.struck)))
            with in_flight(system, self.finish.append):
                act()
        elif self.signs is not None and self.finish:
            self.signs.wait_until_held()
            act()
            self.signs.release()
            try:
                self.finish.pop()()
            finally:
                self.signs.end()
        else:
            act()
        if not self.finish:
            self.watch.close()


@contextmanager
def in_flight(system: RankSystem, begun: Callable[[Finish], None]) -> Iterator[None]:
    """Have an asynchronous save not waited for: `begun` is given what waits for it. Nothing, if a system's saves are
    over when they return."""
    before = getattr(system, "in_flight", None)
    if before is None:
        yield
        return
    system.in_flight = begun  # type: ignore[attr-defined]
    try:
        yield
    finally:
        system.in_flight = before  # type: ignore[attr-defined]


def _overlapped(scenario: Scenario) -> int | None:
    """The index of the first save that a step of the same ranks follows at once."""
    for op, next_ in pairwise(expand(scenario)):
        if (op.kind, next_.kind, next_.session) == ("save", "step", op.session):
            return op.index
    return None


class _Signs:
    """What the threads and processes of one rank's save tell its training thread and other ranks' saves, and it them:
    files in a folder of the rank, beside those of the other ranks."""

    def __init__(self, directory: Path, rank: int) -> None:
        self.folder = directory / f"in_flight.rank{rank}"
        self._directory = directory
        self._held, self._go, self._over = (self.folder / name for name in ("held", "go", "over"))

    def reading(self, worker: object) -> Path:
        """The file of a thread or process that is about to start, there as long as it may still read."""
        file = self.folder / f"reads.{os.getpid()}.{id(worker)}"
        file.touch()
        return file

    def hold(self) -> None:
        """Stop here until the step is over."""
        self._held.touch()
        while not self._go.exists():
            time.sleep(_POLL_S)

    def meet(self, ranks: Sequence[int], meeting: str, reads: int) -> int:
        """Wait until the saves of all these ranks have come to a collective, or are over, held as long as one of them
        is held before it.

        Args:
            meeting: the collective's name, the same on every rank. reads: how many reads this save has made.

        Returns:
            The highest number of reads that one of them has made.
        """
        unfinished = self.folder / f"{meeting}.unfinished"
        unfinished.write_text(str(reads))
        unfinished.rename(self.folder / meeting)
        return max(self._met(_Signs(self._directory, rank), meeting) for rank in ranks)

    def _met(self, other: _Signs, meeting: str) -> int:
        while True:
            held, over = other._held.exists(), other._over.exists()  # asked first: before the meeting, not behind it
            if (other.folder / meeting).exists():
                return int((other.folder / meeting).read_text())
            if over:
                return 0
            if held:
                self.hold()
            time.sleep(_POLL_S)

    def wait_until_held(self) -> None:
        """Wait until the save is held, or is over."""
        while not self._held.exists():
            if not any(self.folder.glob("reads.*")):
                self.end()
                return
            time.sleep(_POLL_S)

    def end(self) -> None:
        """Mark this rank's save as finished, so that the saves of other ranks stop waiting for it at collectives."""
        self._over.touch()

    def release(self) -> None:
        """Let the save go on; nothing is held after this."""
        self._go.touch()

    @property
    def released(self) -> bool:
        """Whether the step is over."""
        return self._go.exists()


def _may_read(worker: Any) -> bool:
    """Whether a thread or process that was started may belong to a save: not one that goes on for good, such as the
    server of a `multiprocessing.Manager` or the thread that feeds a queue."""
    serves = getattr(worker._target, "__name__", "") == "_run_server"
    return not serves and not (isinstance(worker, threading.Thread) and worker.daemon)


class _Reader(threading.local):
    """What a thread of a save does; each thread has its own. saves: whether it belongs to a save at all."""

    def __init__(self, signs: _Signs, number: int, struck: Finish) -> None:
        self.signs, self._number, self._struck = signs, number, struck
        self.saves = False
        self._reads = 0
        self._wrote = self._late = False
        self._met = Counter[str]()

    def reads(self) -> None:
        """It is about to read; held here at the read of the number. That strikes, unless the save has written already:
        then this may be behind all tensors, and only what it still writes tells."""
        if not self.saves:
            return
        self._reads += 1
        if self._reads == self._number and not self.signs.released:
            self._late = True
            if not self._wrote:
                self._struck()
            self.signs.hold()

    def writes(self, name: str) -> None:
        """It is about to write a record of torch's archives."""
        if name.startswith("data/"):  # the bytes of a storage; the other records of an archive are about it
            self.reads()
        self._wrote = True
        if self._late:
            self._struck()

    def meets(self, func: Any, args: Sequence[Any]) -> None:
        """It is about to make a collective, by torch's operator of that."""
        if not self.saves or any(name in func.__name__ for name in _BETWEEN_TWO):
            return
        if (group := _group(func, args)) is not None:
            name, ranks = group
            self._met[name] += 1
            self._reads = self.signs.meet(ranks, f"met.{quote(name, safe='')}.{self._met[name]}", self._reads)


def _group(func: Any, args: Sequence[Any]) -> tuple[str, list[int]] | None:
    """The name and the ranks of the process group on which an operator works; None where it only waits."""
    from torch._C._distributed_c10d import _resolve_process_group
    from torch.distributed import ProcessGroup, get_process_group_ranks

    for argument, value in zip(func._schema.arguments, args, strict=False):
        if argument.name in ("process_group", "group_name"):
            group = _resolve_process_group(value) if argument.name == "group_name" else ProcessGroup.unbox(value)
            return group.group_name, get_process_group_ranks(group)
    return None


@contextmanager
def _without_copies() -> Iterator[None]:
    """Have saves read the live tensors: no stager copies them, and no fork."""
    from multiprocessing.process import BaseProcess
    from unittest import mock

    from torch.distributed.checkpoint.staging import DefaultStager

    threads: dict[int, threading.Thread] = {}

    def begins(worker: Any) -> None:
        if getattr(worker, "_start_method", "") != "fork" or not _may_read(worker):
            start(worker)
            return
        thread = threads[id(worker)] = threading.Thread(target=worker.run, daemon=True)
        thread.start()

    def ends(worker: Any, timeout: float | None = None) -> None:
        thread = threads.get(id(worker))
        join(worker, timeout) if thread is None else thread.join(timeout)

    def lives(worker: Any) -> bool:
        thread = threads.get(id(worker))
        return is_alive(worker) if thread is None else thread.is_alive()

    start, join, is_alive = BaseProcess.start, BaseProcess.join, BaseProcess.is_alive
    with (
        mock.patch.object(DefaultStager, "stage", lambda stager, state, **_: state),
        mock.patch.object(BaseProcess, "start", begins),
        mock.patch.object(BaseProcess, "join", ends),
        mock.patch.object(BaseProcess, "is_alive", lives),
    ):
        yield


@contextmanager
def _reads_watched(reader: _Reader) -> Iterator[None]:
    """Have `reader` told what every thread and forked process does that is started from here on."""
    from multiprocessing.process import BaseProcess
    from unittest import mock

    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    class Reading(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            with torch._C.DisableTorchFunction():
                if func.namespace in _COLLECTIVES:
                    reader.meets(func, args)
                elif not func.is_view:
                    reader.reads()
                return func(*args, **(kwargs or {}))

    def noted(start: Callable[[Any], None]) -> Callable[[Any], None]:
        def noted_start(worker: Any) -> None:
            if _may_read(worker):
                worker.in_flight = reader.signs.reading(worker)
            start(worker)

        return noted_start

    def watched(run: Callable[[Any], None]) -> Callable[[Any], None]:
        def watched_run(worker: Any) -> None:
            file = getattr(worker, "in_flight", None)
            if file is None:
                run(worker)
                return
            reader.saves = True
            try:
                with Reading():  # type: ignore[no-untyped-call]
                    run(worker)
            finally:
                file.unlink(missing_ok=True)

        return watched_run

    write = torch._C.PyTorchFileWriter.write_record

    def written(writer: Any, name: str, *args: Any) -> None:
        reader.writes(name)
        write(writer, name, *args)

    with (
        mock.patch.object(threading.Thread, "start", noted(threading.Thread.start)),
        mock.patch.object(threading.Thread, "run", watched(threading.Thread.run)),
        mock.patch.object(BaseProcess, "start", noted(BaseProcess.start)),
        mock.patch.object(BaseProcess, "run", watched(BaseProcess.run)),
        mock.patch.object(torch._C.PyTorchFileWriter, "write_record", written),
    ):
        yield
