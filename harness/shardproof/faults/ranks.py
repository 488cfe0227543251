"""Faults of ranks: one is killed, stopped or raises, before an operation or at a point where it works on files.

Each place has a number, so that every place of every rank can be struck once, one after the other, and any of them
again: `boundary.kill-rank@7`, `boundary.kill-at-file@12`. Ranks come one after the other within a place. Of two ranks,
for example, 1 and 2 are each before its first operation, and 3 and 4 before the second; and at files 1 and 2 are each
where it opens its first file of a checkpoint, and 3 and 4 where it does the next thing to one.

A point of a save or a load is what Python tells of itself before it does it (PEP 578): it opens a file, lists a folder,
renames or removes one; and the bytes of each tensor that torch's archives write or read. So the points of a rank are
the same in every run, whatever the other ranks do. Where a folder is made is none: all ranks may try, and one does it.

*Does not strike*: processes and other writers that a library starts beside the rank, and files that C++ code opens.
Crashes at each of their system calls are tried by `shardproof.resilience`, which sees all of them. Ids start with
`boundary.`. Imports torch in ranks only.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from shardproof.ownership import planted
from shardproof.program import LOADS, Op, expand
from shardproof.protocol.system import RankContext, RankSystem

Strike = Callable[[RankContext], None]

Around = Callable[[Callable[[], None], Op, RankContext, RankSystem], None]
"""What a boundary fault does: it performs an operation on one rank, with something going wrong around it. It is given
what performs the operation, the operation, what the rank knows, and the system on that rank."""

_TOLD = frozenset(
    {
        "open", "os.listdir", "os.scandir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink",
        "os.truncate",
    }
)  # fmt: skip
"""Events of Python, of whose arguments the first names a file or a folder."""
_RECORDS = {"PyTorchFileWriter": "write_record", "PyTorchFileReader": "get_storage_from_record"}
"""What torch's archives do without telling Python. The first argument is the record's name."""
_BYTES_OF_A_TENSOR = "data/"


def killed(context: RankContext) -> None:
    """The rank is killed here."""
    context.struck()
    os.kill(os.getpid(), signal.SIGKILL)


def stopped(context: RankContext) -> None:
    """The rank is stopped here, and nobody lets it go on."""
    context.struck()
    os.kill(os.getpid(), signal.SIGSTOP)


def failed(context: RankContext) -> None:
    """The rank raises here, as when a disk fails."""
    context.struck()
    raise planted(OSError(errno.EIO, f"Input/output error ({context.fault})"))


def in_first_step(strike: Strike) -> Around:
    """The `around` that strikes rank 0 in its first step."""

    def around(act: Callable[[], None], op: Op, context: RankContext, system: RankSystem) -> None:
        if op.kind == "step" and op.iteration == 0 and context.rank == 0:
            strike(context)
        act()

    return around


def before_operation(strike: Strike) -> Callable[[int], Around]:
    """What gives the `around` of a place: the number goes through the ranks of the first operation, then through those
    of the second, and so on."""

    def numbered(number: int) -> Around:
        def around(act: Callable[[], None], op: Op, context: RankContext, system: RankSystem) -> None:
            places = [(each.index, rank) for each in expand(context.scenario) for rank in range(each.mesh.world)]
            if (op.index, context.rank) in places[number - 1 : number]:
                strike(context)
            act()

        return around

    return numbered


def at_file(strike: Strike) -> Callable[[int], Around]:
    """What gives the `around` of a point of a save or a load: the number goes through the ranks at the first point of
    each, then at the second, and so on, over all saves and loads of the program."""

    def numbered(number: int) -> Around:
        def around(act: Callable[[], None], op: Op, context: RankContext, system: RankSystem) -> None:
            if op.kind != "save" and op.kind not in LOADS:
                act()
                return
            world = max(each.mesh.world for each in expand(context.scenario))
            point, rank = divmod(number - 1, world)

            def reached() -> None:
                context.event_occurred()
                if context.rank == rank:
                    strike(context)

            with _points(context, point + 1, reached):
                act()

        return around

    return numbered


@contextmanager
def _points(context: RankContext, number: int, reached: Callable[[], None]) -> Iterator[None]:
    """Count the points of this rank, on from where its last save or load has ended, also in another session, and say
    when one of a number is reached."""
    from unittest import mock

    import torch

    kept = context.directory / f"points.rank{context.rank}"
    counter = _Counter(number, int(kept.read_text()) if kept.exists() else 0, reached)
    inside = f"{context.directory}/checkpoint"
    active = True

    def on_audit_event(event: str, given: tuple[Any, ...]) -> None:
        if not active or event not in _TOLD or not isinstance(given[0], str | bytes | os.PathLike):
            return
        if os.path.abspath(os.fsdecode(given[0])).startswith(inside):
            counter.point()

    def counted(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(archive: Any, name: str, *given: Any) -> Any:
            if name.startswith(_BYTES_OF_A_TENSOR):
                counter.point()
            return method(archive, name, *given)

        return call

    sys.addaudithook(on_audit_event)  # for good: a rank's process runs one scenario
    try:
        with ExitStack() as stack:
            for owner, name in _RECORDS.items():
                method = getattr(getattr(torch._C, owner), name)
                stack.enter_context(mock.patch.object(getattr(torch._C, owner), name, counted(method)))
            yield
    finally:
        active = False
        kept.write_text(str(counter.made))


class _Counter:
    """The points of one rank, in whichever thread, but in no other process."""

    def __init__(self, number: int, made: int, reached: Callable[[], None]) -> None:
        self._number, self.made, self._reached = number, made, reached
        self._process, self._lock = os.getpid(), threading.Lock()

    def point(self) -> None:
        """The rank is at a point."""
        if os.getpid() != self._process:
            return
        with self._lock:
            self.made += 1
            here = self.made == self._number
        if here:
            self._reached()
