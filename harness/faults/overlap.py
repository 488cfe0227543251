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

With k from 1 until nothing is held any more, each point between two reads is forced once (`faults --strike SYSTEM
--every`). What was written is compared with what was there when the save was called, as of every save.

*Verifies*: at each of these points, on every rank at once, that the next step is in no tensor that is written.
*Does not verify*: a tensor that is read while the step writes it, half old and half new; two steps in a row; reads of
a process that was spawned and not forked, or of a daemon thread; and reads by C++ code or numpy that no torch operation
comes before.
*Assumes* that ranks read alike until the save's first bytes are written: only then may one wait for the others.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from harness.faults.collectives import Around
from harness.program import Op, expand
from harness.systems.protocol import RankContext, RankSystem

_POLL_S = 0.0005
_COLLECTIVES = ("c10d", "_c10d_functional")

Finish = Callable[[], None]


def late_read(number: int) -> Around:
    """The `around` that holds the first asynchronous save at its read of this number, from 1, during the next step."""
    return _Overlap(number).around


def late_read_of_live(number: int) -> Around:
    """The same with a save that has no copy of what it saves: torch's stager gives back what it is given."""
    inner = _Overlap(number).around

    def around(act: Finish, op: Op, context: RankContext, system: RankSystem) -> None:
        from unittest import mock

        from torch.distributed.checkpoint.staging import DefaultStager

        with mock.patch.object(DefaultStager, "stage", lambda stager, state, **_: state):
            inner(act, op, context, system)

    return around


class _Overlap:
    """One rank's save that is in flight. Rank side; a process runs one scenario."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.finish: list[Finish] = []
        self.watch = ExitStack()
        self.signs: _Signs | None = None

    def around(self, act: Finish, op: Op, context: RankContext, system: RankSystem) -> None:
        """Begin the save and leave it in flight, or take the step beside it."""
        if self.signs is None and op.kind == "save" and _followed_by_step(op, context):
            self.signs = _Signs(context.directory / f"in_flight.rank{context.rank}")
            self.watch.enter_context(_reads_watched(self.signs, self.number, context.struck))
            with in_flight(system, self.finish.append):
                act()
        elif self.signs is not None and self.finish:
            self.signs.wait_until_held()
            act()
            self.signs.release()
            self.finish.pop()()
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


def _followed_by_step(op: Op, context: RankContext) -> bool:
    follows = [next_ for next_ in expand(context.scenario) if next_.index == op.index + 1]
    return any(next_.kind == "step" and next_.session == op.session for next_ in follows)


class _Signs:
    """What the threads and processes of one rank's save tell its training thread, and it them: files in a folder, so
    that forked processes can tell it too."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._folder, self._held, self._go = folder, folder / "held", folder / "go"

    def reading(self, worker: object) -> Path:
        """The file of a thread or process that is about to start, there as long as it may still read."""
        file = self._folder / f"reads.{os.getpid()}.{id(worker)}"
        file.touch()
        return file

    def hold(self) -> None:
        """Stop here until the step is over."""
        self._held.touch()
        while not self._go.exists():
            time.sleep(_POLL_S)

    def wait_until_held(self) -> None:
        """Wait until the save is held, or has no read left."""
        while not self._held.exists() and any(self._folder.glob("reads.*")):
            time.sleep(_POLL_S)

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
    """How many reads this thread of a save has made. over: what it calls when it makes no more; None in a thread that
    belongs to no save."""

    reads = 0
    wrote = False
    over: Finish | None = None


@contextmanager
def _reads_watched(signs: _Signs, number: int, struck: Finish) -> Iterator[None]:
    """Count the reads of every thread and forked process that is started from here on, and hold each at its read of
    this number."""
    from multiprocessing.process import BaseProcess
    from unittest import mock

    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    reader = _Reader()

    def read() -> None:
        if reader.over is None:
            return
        reader.reads += 1
        if reader.reads == number and not signs.released:
            struck()
            signs.hold()

    class Reading(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            with torch._C.DisableTorchFunction():
                if func.namespace not in _COLLECTIVES:
                    if not func.is_view:
                        read()
                elif reader.wrote and reader.over is not None:  # it waits for the other ranks, with all of it written
                    reader.over()
                return func(*args, **(kwargs or {}))

    def noted(start: Callable[[Any], None]) -> Callable[[Any], None]:
        def noted_start(worker: Any) -> None:
            if _may_read(worker):
                worker.in_flight = signs.reading(worker)
            start(worker)

        return noted_start

    def watched(run: Callable[[Any], None]) -> Callable[[Any], None]:
        def watched_run(worker: Any) -> None:
            file = getattr(worker, "in_flight", None)
            if file is None:
                run(worker)
                return
            reader.over = lambda: file.unlink(missing_ok=True)
            try:
                with Reading():  # type: ignore[no-untyped-call]
                    run(worker)
            finally:
                reader.over()

        return watched_run

    write = torch._C.PyTorchFileWriter.write_record

    def written(writer: Any, name: str, *args: Any) -> None:
        if name.startswith("data/"):  # the bytes of a storage; the other records of an archive are about it
            read()
        reader.wrote = True
        write(writer, name, *args)

    with (
        mock.patch.object(threading.Thread, "start", noted(threading.Thread.start)),
        mock.patch.object(threading.Thread, "run", watched(threading.Thread.run)),
        mock.patch.object(BaseProcess, "start", noted(BaseProcess.start)),
        mock.patch.object(BaseProcess, "run", watched(BaseProcess.run)),
        mock.patch.object(torch._C.PyTorchFileWriter, "write_record", written),
    ):
        yield
