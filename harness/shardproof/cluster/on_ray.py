"""A cluster as Ray has it. The only module that imports `ray`, which is installed by the extra `shardproof[ray]`.

A slot is an actor that is bound to its node and holds as many CPUs and GPUs of it as Ray accounts for. Ray sets which
GPUs the actor's process sees, and the ranks, which descend from it, see the same. The actor belongs to the driver: when
that ends, however it ends, Ray ends the actor, and the actor's laboratory goes with it.

Ray writes what it has to say of its nodes to the driver's standard output. That is the run's, so that it goes into a
file, `logs/ray.log` of the run's folder.
"""

from __future__ import annotations

import logging
import re
import socket
import sys
from collections.abc import Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack, redirect_stdout, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from shardproof.cluster.handout import Node, SlotLostError
from shardproof.cluster.node import Answer, NodeLaboratory, Setting, Work
from shardproof.errors import HarnessError, UsageError
from shardproof.scenario import Scenario

CLOSE_S = 10.0
"""So long slots may take to end by themselves."""

ANSWER_S = 10.0
"""So long an address may take to accept a connection. Ray itself goes on asking for more than five minutes."""

_HOST_AND_PORT = re.compile(r"(?:ray://)?\[?(.+?)\]?:([0-9]{1,9})")


class RayCluster:
    """See `shardproof.cluster.handout.Cluster`.

    Args:
        address: of a running cluster; empty for what `ray.init` finds, or a cluster of this machine alone.
        log: file for what Ray has to say.
    """

    def __init__(self, address: str, log: Path) -> None:
        self._ray, self._address, self._log = require_ray(), address, log
        self._opened = ExitStack()
        self._slots: list[_RaySlot] = []

    def __enter__(self) -> Self:
        self._log.parent.mkdir(parents=True, exist_ok=True)
        self._opened.enter_context(redirect_stdout(self._opened.enter_context(self._log.open("a", encoding="utf-8"))))
        try:
            _require_answer(self._address)
            self._ray.init(address=self._address or None, log_to_driver=False, logging_level=logging.ERROR)
        except (OSError, OverflowError, ValueError, RuntimeError, self._ray.exceptions.RayError) as error:
            self._opened.close()
            why = " ".join(f"{type(error).__name__}: {error}".split())
            given, form = self._address, "--ray-address 10.0.0.7:6379"
            raise UsageError.of("--ray-address", given, f"that of a running Ray cluster ({why})", form) from None
        self._opened.callback(self._ray.shutdown)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._opened:
            wait([slot.ended for slot in self._slots if slot.ended], CLOSE_S)
            for slot in self._slots:
                slot.kill()

    def nodes(self) -> Sequence[Node]:
        """See `shardproof.cluster.handout.Cluster`.

        Raises:
            HarnessError: the cluster is gone.
        """
        try:
            known = self._ray.nodes()
        except self._ray.exceptions.RayError as error:
            raise HarnessError(
                f"the Ray cluster is gone ({_first_line(error)}); what was stored is kept, and the same command goes on"
                " with it"
            ) from error
        return [
            Node(
                node["NodeID"], f"{node['NodeManagerAddress']} ({node['NodeID'][:8]})",
                int(node["Resources"].get("CPU", 0)), int(node["Resources"].get("GPU", 0)),
            )
            for node in known
            if node["Alive"]
        ]  # fmt: skip

    def slot(self, node: Node, cpus: int, gpus: int, setting: Setting) -> _RaySlot:
        """See `shardproof.cluster.handout.Cluster`."""
        affinity = self._ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node.id, soft=False)
        actor = self._ray.remote(NodeLaboratory).options(
            num_cpus=cpus, num_gpus=gpus, scheduling_strategy=affinity, max_concurrency=cpus + 1, max_restarts=0,
            max_task_retries=0,
        )  # fmt: skip
        slot = _RaySlot(self._ray, actor.remote(setting, cpus))
        self._slots.append(slot)
        return slot


class _RaySlot:
    """A slot of the cluster executor as a Ray actor: a `NodeLaboratory` in a process on a node."""

    def __init__(self, ray: Any, actor: Any) -> None:
        self._ray, self._actor = ray, actor
        self.ended: Future[None] | None = None

    def ready(self) -> Future[str]:
        return self._called(self._actor.ready)

    def examine(self, scenario: Scenario, work: Work) -> Future[Answer]:
        return self._called(self._actor.examine, scenario, work)

    def close(self) -> None:
        self.ended = self._called(self._actor.close)

    def kill(self) -> None:
        with suppress(self._ray.exceptions.RayError, ValueError):
            self._ray.kill(self._actor)

    def _called(self, method: Any, *arguments: object) -> Future[Any]:
        """The future of a call, with errors as `shardproof.cluster.handout.Slot` has them."""
        future: Future[Any] = Future()
        exceptions = self._ray.exceptions

        def told(asked: Future[Any]) -> None:
            error = asked.exception()
            if error is None:
                future.set_result(asked.result())
            elif isinstance(error, exceptions.RayError) and not isinstance(error, exceptions.RayTaskError):
                future.set_exception(SlotLostError(_first_line(error)))
            else:
                future.set_exception(HarnessError(str(error)))

        try:
            method.remote(*arguments).future().add_done_callback(told)
        except exceptions.RayError as error:
            future.set_exception(SlotLostError(_first_line(error)))
        return future


def _first_line(error: BaseException) -> str:
    """What Ray says of a loss, without the advice that follows."""
    lines = [line.strip() for line in str(error).splitlines()]
    return next(filter(None, lines), type(error).__name__)


def require_ray() -> Any:
    """The module `ray`.

    Raises:
        UsageError: it is not installed, or cannot be imported.
    """
    try:
        import ray
        import ray.util.scheduling_strategies
    except ImportError as error:
        allowed = f"local, or ray where it can be imported ({error}; it is installed by the extra 'ray')"
        form = f"{sys.executable} -m pip install 'shardproof[ray]'"
        raise UsageError.of("--executor", "ray", allowed, form) from None
    return ray


def _require_answer(address: str) -> None:
    """Somebody listens at the address. Words such as `auto` are left to Ray.

    Raises:
        OSError: nobody does.
        OverflowError: there is no such port.
    """
    told = _HOST_AND_PORT.fullmatch(address)
    if told:
        socket.create_connection((told[1], int(told[2])), ANSWER_S).close()
