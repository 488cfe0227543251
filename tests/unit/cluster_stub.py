"""A cluster of threads in this process, whose nodes can be lost, unfit or full. For tests of the handing out."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Self

from shardproof.cluster.handout import Node, SlotLostError
from shardproof.cluster.node import Answer, Setting, Work
from shardproof.scenario import Scenario

Examine = Callable[["StubSlot", Scenario, Work], Answer]


class StubCluster:
    """Nodes of some CPUs each.

    Args:
        cpus, gpus: by the node's name. examine: what a slot does with a scenario; it may raise.
        unfit: node's name → why.
        ready: what a slot does at first, and why it is not fit.
    """

    def __init__(
        self, examine: Examine, cpus: dict[str, int], gpus: dict[str, int] | None = None,
        unfit: dict[str, str] | None = None, ready: Callable[[StubSlot], str] | None = None,
    ) -> None:  # fmt: skip
        self.examine, self.ready = examine, ready or (lambda slot: (unfit or {}).get(slot.node.name, ""))
        self.alive = {name: Node(name, name, count, (gpus or {}).get(name, 0)) for name, count in cpus.items()}
        self.slots: list[StubSlot] = []
        self.open = False

    def __enter__(self) -> Self:
        self.open = True
        return self

    def __exit__(self, *error: object) -> None:
        self.open = False

    def nodes(self) -> Sequence[Node]:
        return list(self.alive.values())

    def slot(self, node: Node, cpus: int, gpus: int, setting: Setting) -> StubSlot:
        slot = StubSlot(self, node, cpus, gpus, setting)
        self.slots.append(slot)
        return slot

    def lose(self, name: str) -> None:
        """A node and everything on it is gone."""
        del self.alive[name]
        for slot in self.slots:
            if slot.node.name == name:
                slot.lose()


class StubSlot:
    """A slot whose calls are threads. most: the most CPUs that scenarios took of it at once."""

    def __init__(self, cluster: StubCluster, node: Node, cpus: int, gpus: int, setting: Setting) -> None:
        self.cluster, self.node, self.cpus, self.gpus, self.setting = cluster, node, cpus, gpus, setting
        self.closed, self.most, self._taken = False, 0, 0
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(cpus + 1)
        self._open: set[Future[Any]] = set()

    def ready(self) -> Future[str]:
        return self._started(lambda: self.cluster.ready(self))

    def examine(self, scenario: Scenario, work: Work) -> Future[Answer]:
        return self._started(lambda: self._examined(scenario, work))

    def close(self) -> None:
        self.closed = True
        self._pool.shutdown(wait=False)

    def lose(self) -> None:
        """Every call that has no answer fails, and so does every later one."""
        with self._lock:
            self.closed, calls = True, list(self._open)
            self._open.clear()
        for future in calls:
            future.set_exception(SlotLostError("its process is gone"))

    def _examined(self, scenario: Scenario, work: Work) -> Answer:
        with self._lock:
            self._taken += min(scenario.mesh.world, self.cpus)
            self.most = max(self.most, self._taken)
        try:
            return self.cluster.examine(self, scenario, work)
        finally:
            with self._lock:
                self._taken -= min(scenario.mesh.world, self.cpus)

    def _started(self, call: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        with self._lock:
            if self.closed:
                future.set_exception(SlotLostError("its process is gone"))
                return future
            self._open.add(future)
        self._pool.submit(self._run, call, future)
        return future

    def _run(self, call: Callable[[], Any], future: Future[Any]) -> None:
        value, error = None, None
        try:
            value = call()
        except Exception as raised:
            error = raised
        with self._lock:
            if future not in self._open:
                return
            self._open.remove(future)
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(value)
