"""The fault in which two collectives that are under way at once complete in the other order.

A library that begins a collective and does not wait for it may begin another one meanwhile. In which order the two end
is up to the network, unless one needs what the other gives, and then whoever begins it has to wait first. So a
collective is put off until somebody waits for it. If another one is begun before that, the two are a pair: the second
is made, and has ended, before the first is begun. Every rank does so alike, so that all make their collectives in the
same order. Whatever a library does with the results must come to the same; another value, or a hang, says that it
relied on an order that nobody promised.

*Does not reorder* collectives of C++ code, of two threads, or those that a library begins inside of torch's coalescing
manager, which the emulated device makes one by one; and never more than two at once.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Any

from shardproof.faults.collectives import Collective, meeting
from shardproof.faults.ranks import Around
from shardproof.program import Op
from shardproof.protocol.system import RankContext, RankSystem


def exchanged(number: int) -> Around:
    """The `around` in which the pair of this number changes places, of those that are under way at once in the steps of
    every rank, counted over all of them: some libraries learn in a first step what to fetch early in the next one. Only
    calls that give a handle are looked at; all others, and those that are waited for at once, are made as they come."""
    order = _Order(number)

    def around(act: Callable[[], None], op: Op, context: RankContext, system: RankSystem) -> None:
        if op.kind != "step":
            act()
            return
        with meeting(order.meet, context):
            act()
            order.catch_up()

    return around


class _Order:
    """What is put off of one rank's collectives, and which pair is to change places."""

    def __init__(self, number: int) -> None:
        self.number, self.pairs = number, 0
        self.waiting: Any = None
        self.begun: list[Any] = []  # handles, which torch's C++ side does not keep alive

    def meet(self, one: Collective) -> Any:
        """Put a collective off, or make it before the one that waits."""
        if one.func.namespace != "c10d" or self.pairs >= self.number:
            self.catch_up()
            return one.make()
        if self.waiting is None or self.waiting.made is not None:
            return self._put_off(one)
        self.pairs += 1
        if self.pairs < self.number:
            self.catch_up()
            return self._put_off(one)
        from torch.distributed import Work

        made = one.make()
        Work.unbox(made[-1] if isinstance(made, tuple | list) else made).wait()
        one.struck()
        return made

    def catch_up(self) -> None:
        """Make what is put off."""
        if self.waiting is not None:
            self.waiting.now()

    def _put_off(self, one: Collective) -> Any:
        self.waiting = _put_off(one)
        self.begun.append(self.waiting)
        alone = len(one.func._schema.returns) == 1
        return self.waiting.boxed() if alone else (one.args[0], self.waiting.boxed())


def _put_off(one: Collective) -> Any:
    """The handle of a collective that is made when somebody waits for it."""
    import torch
    from torch.distributed import Work

    class PutOff(Work):
        made: Any = None

        def now(self) -> Any:
            if self.made is None:
                with torch.utils._python_dispatch._disable_current_modes(), torch._C.DisableTorchFunction():
                    made = one.make()
                self.made = Work.unbox(made[-1] if isinstance(made, tuple | list) else made)
            return self.made

        def wait(self, timeout: datetime.timedelta = datetime.timedelta(0)) -> bool:
            return bool(self.now().wait())

        def is_completed(self) -> bool:
            return bool(self.now().is_completed())

        def get_future(self) -> Any:
            return self.now().get_future()

    return PutOff()
