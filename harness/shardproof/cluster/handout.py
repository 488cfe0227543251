"""The executor of a cluster: hands scenarios out to slots on its nodes, and takes their results in.

A *slot* is a process on a node that holds CPUs of it (and GPUs, where scenarios ask for some), with a laboratory in it.
It has as many CPUs as the largest scenario of the run has ranks, or as its node has, if those are fewer. A scenario
takes as many of a slot's CPUs as it has ranks, at most all of them, so that small ones run side by side; one whose
ranks are simulated takes one. What a slot holds is the cluster's account, so that two runs on one cluster share it as
any two programs do.

One thread, the caller's, does everything here (`_answers`):

1. It looks what nodes there are, and asks for the slots that they have room for: a node that joins is taken in.
2. A slot that has started says whether its node is fit. A node that is not is left out, and the reason is said.
3. The next scenario goes to the slot with the most free CPUs. All that belongs to a scenario happens there.
4. A slot that is lost, with its node or alone, gives back what it had: each scenario runs again in another slot, with
   nothing beside it, and its result says so. One that has lost three slots is not tried again: its result is `unknown`.

An error that a node's own code raised is an `unknown` result too. A full disk of a node stops the run, as one of this
machine would. When no node is left, the run waits a minute for one, and ends; what was stored is kept.

*Does not verify*: that a node which is believed lost has stopped. If it has not, it may still run the scenario that
was given to another; what it says is not heard.
"""

from __future__ import annotations

import sys
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Protocol, Self

from shardproof.cluster.node import Answer, Setting, Work, needed_cpus
from shardproof.errors import HarnessError, UsageError, printable
from shardproof.laboratory.laboratory import Observed
from shardproof.result import Result
from shardproof.scenario import Scenario
from shardproof.store import StoreFull
from shardproof.verdict import Verdict

LOOK_S = 2.0
"""How often the cluster is asked for its nodes."""
NO_NODE_S = 60.0
"""So long a run waits for a node when it has none."""
QUEUED_S = 20.0
"""After so long without any slot, it is said that the cluster gives none."""
MOST_LOSSES = 3
"""A scenario that has lost so many slots is not run again; a node that so many slots in a row died on while they
started is left out."""


class SlotLostError(Exception):
    """The process of a slot is gone, or cannot be reached; nothing is known of what it did."""


@dataclass(frozen=True)
class Node:
    """A machine of a cluster. name: for a reader, such as its address. cpus, gpus: that it has."""

    id: str
    name: str
    cpus: int
    gpus: int


class Slot(Protocol):
    """A process on a node. A future of it fails with SlotLostError when it is gone, else with what its code raised."""

    def ready(self) -> Future[str]:
        """See `NodeLaboratory.ready`. It waits until the node has the CPUs and GPUs free."""
        ...

    def examine(self, scenario: Scenario, work: Work) -> Future[Answer]:
        """See `NodeLaboratory.examine`."""
        ...

    def close(self) -> None:
        """End the laboratory behind the slot, with every process that the laboratory started."""
        ...


class Cluster(Protocol):
    """What an executor needs of a cluster. It is a context; without it there are no nodes."""

    def nodes(self) -> Sequence[Node]:
        """The nodes that are alive."""
        ...

    def slot(self, node: Node, cpus: int, gpus: int, setting: Setting) -> Slot:
        """A new slot of a node. Returns at once."""
        ...

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


@dataclass(frozen=True)
class _Task:
    """What is to be done on a scenario, and how slots that had it were lost."""

    scenario: Scenario
    work: Work
    lost: tuple[str, ...] = ()


@dataclass(eq=False)
class _Held:
    """A slot of ours."""

    node: Node
    cpus: int
    slot: Slot
    ready: bool = False
    taken: int = 0
    gone: bool = False


_Event = tuple[_Held, _Task | None, "Future[str] | Future[Answer]"]


class ClusterExecutor:
    """Runs scenarios on the nodes of a cluster. See `shardproof.laboratory.executor.Executor`.

    Args:
        most: slots at once; as many as there is room for without.
        keep: folder that receives the logs of failed scenarios, one subfolder each.
        say: shows a line to the user.
    """

    def __init__(
        self, cluster: Cluster, setting: Setting, *, most: int | None, keep: Path, say: Callable[[str], None]
    ) -> None:
        self._cluster, self._setting, self._most, self._keep, self._say = cluster, setting, most, keep, say
        self._cpus = max((needed_cpus(scenario) for scenario in setting.samples), default=1)
        on_gpus = [scenario for scenario in setting.samples if scenario.device == "cuda"]
        self._gpus = max((needed_cpus(scenario) for scenario in on_gpus), default=0)
        self._held: list[_Held] = []
        self._left_out: dict[str, str] = {}  # node's id → why
        self._died: Counter[str] = Counter()  # node's id → slots in a row that died while they started
        self._events: SimpleQueue[_Event] = SimpleQueue()
        self._looked, self._idle_since, self._told, self._worked = -LOOK_S, 0.0, False, False

    def __enter__(self) -> Self:
        self._cluster.__enter__()
        try:
            self._idle_since = time.monotonic()
            self._look()
            if not self._held:
                allowed = f"local, or ray on a cluster of which a node has {self._wanted()}"
                raise UsageError.of("--executor", "ray", allowed, "--executor local")
        except BaseException:
            self.__exit__(*sys.exc_info())
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            for held in self._held:
                held.slot.close()
        finally:
            self._cluster.__exit__(kind, error, trace)

    def attributed(self, scenarios: Iterable[Scenario], observed: Observed) -> Iterator[tuple[Result, ...]]:
        """See `shardproof.laboratory.executor.Executor`."""
        for answer in self._answers(_Task(scenario, "attributed") for scenario in scenarios):
            for scenario, blob in answer.observations:
                observed(scenario, blob)
            yield answer.results

    def examine_one(self, scenario: Scenario, *, confirm: bool = True) -> Result:
        """See `shardproof.laboratory.executor.Executor`."""
        (answer,) = self._answers([_Task(scenario, "confirmed" if confirm else "once")])
        return answer.results[0]

    def _answers(self, tasks: Iterable[_Task]) -> Iterator[Answer]:
        """Yield the answer to each task in the order in which slots finish, not the order in which tasks were given."""
        waiting, running = deque(tasks), 0
        while waiting or running:
            self._look()
            running += self._hand_out(waiting)
            try:
                held, task, future = self._events.get(timeout=LOOK_S)
            except Empty:
                continue
            if task is None:
                self._started(held, future)
                continue
            running -= 1
            held.taken -= _taken_by(task, held)
            if (answer := self._taken_in(held, task, future)) is None:
                waiting.appendleft(replace(task, lost=(*task.lost, self._lost(held, future.exception()))))
            else:
                yield answer

    # --- nodes and their slots --------------------------------------------------------------------------

    def _look(self) -> None:
        """Ask for slots on the nodes that have room for more.

        Raises:
            HarnessError: no node has been there for some time.
        """
        now = time.monotonic()
        if now - self._looked >= LOOK_S:
            self._looked = now
            for node in self._cluster.nodes():
                if node.id not in self._left_out:
                    self._ask_for_slots(node)
        if any(held.ready for held in self._held):
            self._idle_since, self._told = now, False
        elif not self._held and now - self._idle_since >= NO_NODE_S:
            raise HarnessError(
                f"no node of the cluster is left{self._why_left_out()}; what was stored is kept, and the same command"
                " goes on with it"
            )
        elif self._held and not self._told and now - self._idle_since >= QUEUED_S:
            self._told = True
            self._say(f"waiting for a node to start or to have {self._wanted()} free; {len(self._held)} asked")

    def _ask_for_slots(self, node: Node) -> None:
        cpus, gpus = min(self._cpus, node.cpus), min(self._gpus, node.gpus)
        if not cpus or (self._gpus and not gpus):
            return
        room = min(node.cpus // cpus, node.gpus // gpus if gpus else node.cpus)
        for _ in range(room - sum(held.node.id == node.id for held in self._held)):
            if self._most is not None and len(self._held) >= self._most:
                return
            held = _Held(node, cpus, self._cluster.slot(node, cpus, gpus, self._setting))
            self._held.append(held)
            held.slot.ready().add_done_callback(partial(self._ended, held, None))

    def _started(self, held: _Held, future: Future[str] | Future[Answer]) -> None:
        """A slot has said whether its node is fit, or has died before.

        Raises:
            UsageError: no node is fit.
        """
        node, error = held.node, future.exception()
        if isinstance(error, SlotLostError):
            self._died[node.id] += 1
            self._drop(held)
            if self._died[node.id] >= MOST_LOSSES and node.id not in self._left_out:
                self._leave_out(node, f"slots die while they start: {error}")
            return
        reason = "".join(traceback.format_exception_only(error)).strip() if error else str(future.result())
        self._died[node.id] = 0
        if reason:
            self._leave_out(node, reason)
        elif not held.gone:
            held.ready = self._worked = True

    def _leave_out(self, node: Node, reason: str) -> None:
        """Give a node no scenario from now on.

        Raises:
            UsageError: it was the last one, and there was none that could run anything.
        """
        if node.id not in self._left_out:
            self._left_out[node.id] = f"{node.name}: {reason}"
            self._say(f"node {node.name} is left out: {reason}")
        for held in [held for held in self._held if held.node.id == node.id]:
            self._drop(held)
        if not self._held and not self._worked:
            raise UsageError(f"--executor ray: no node can run this{self._why_left_out()}")

    def _why_left_out(self) -> str:
        return "".join(f"; {reason}" for reason in self._left_out.values())

    def _drop(self, held: _Held) -> None:
        """Have no more to do with a slot."""
        if not held.gone:
            held.gone, held.ready = True, False
            self._held.remove(held)
            self._looked = -LOOK_S  # its node, if that is there, has room again
            with suppress(SlotLostError):
                held.slot.close()

    def _wanted(self) -> str:
        """What a slot needs, for a reader."""
        cpus = f"{self._cpus} CPUs, or all of its own,"
        return f"{cpus} and {self._gpus} GPUs" if self._gpus else cpus.rstrip(",")

    # --- scenarios --------------------------------------------------------------------------------------

    def _hand_out(self, waiting: deque[_Task]) -> int:
        """Give the first tasks to slots, as long as the next one finds room; how many."""
        given = 0
        while waiting:
            free = max((held for held in self._held if held.ready), key=lambda h: h.cpus - h.taken, default=None)
            if free is None:
                break
            need = _taken_by(waiting[0], free)
            if free.cpus - free.taken < need:
                break
            task = waiting.popleft()
            free.taken += need
            given += 1
            free.slot.examine(task.scenario, task.work).add_done_callback(partial(self._ended, free, task))
        return given

    def _ended(self, held: _Held, task: _Task | None, future: Future[str] | Future[Answer]) -> None:
        """Called in whatever thread a future is done in."""
        self._events.put((held, task, future))

    def _taken_in(self, held: _Held, task: _Task, future: Future[str] | Future[Answer]) -> Answer | None:
        """What a slot answered; None where it was lost and the task is to be done again.

        Raises:
            StoreFull: the disk of its node is full.
        """
        error = future.exception()
        if isinstance(error, SlotLostError):
            self._drop(held)
            if len(task.lost) + 1 < MOST_LOSSES:
                return None
            lost = "; ".join((*task.lost, f"{held.node.name}: {error}"))
            return Answer((_unknown(task.scenario, f"every slot that it was given to was lost: {lost}"),))
        if error is not None:
            text = "".join(traceback.format_exception(error))
            return Answer((_unknown(task.scenario, f"an error on node {held.node.name}: {text}"),))
        answer = future.result()
        assert isinstance(answer, Answer)
        if answer.full:
            raise StoreFull(f"node {held.node.name}: {answer.full}")
        self._keep_logs(answer)
        if task.lost:
            first = answer.results[0]
            restarted = "; ".join((*task.lost, *filter(None, [first.restarted])))
            answer = replace(answer, results=(replace(first, restarted=restarted), *answer.results[1:]))
        return answer

    def _lost(self, held: _Held, error: BaseException | None) -> str:
        what = f"node {held.node.name} of the cluster was lost: {error}"
        self._say(f"{what}; what ran there runs again elsewhere")
        return what

    def _keep_logs(self, answer: Answer) -> None:
        for scenario_id, logs in answer.logs.items():
            folder = self._keep / scenario_id
            folder.mkdir(parents=True, exist_ok=True)
            for name, content in logs.items():
                (folder / Path(name).name).write_bytes(content)


def _taken_by(task: _Task, held: _Held) -> int:
    """The CPUs of a slot that a task takes: all, where slots were lost under it, so that it loses no others' work."""
    return held.cpus if task.lost else min(needed_cpus(task.scenario), held.cpus)


def _unknown(scenario: Scenario, reason: str) -> Result:
    return Result(scenario, scenario.system, scenario.version, Verdict.UNKNOWN, reason=printable(reason))
