"""A trainer on one rank: builds the cell, calls the trainer's methods, and records the state that is found on it.

The process group is there already, and the environment says what `torchrun` would: RANK, WORLD_SIZE, LOCAL_RANK,
MASTER_ADDR and MASTER_PORT. A trainer with `fit` runs as a whole in its first operation; what was observed after each
update is handed out as the operations behind it come.
"""

from __future__ import annotations

import inspect
import json
import os
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import CodeType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from shardproof.errors import UsageError
from shardproof.mechanisms.probe_module import Probe, Slot, build_model
from shardproof.models import model_spec
from shardproof.observe.record import Record, whole
from shardproof.program import NO_CHECKPOINT, Op
from shardproof.protocol.system import RankContext
from shardproof.scenario import DTypePolicy
from shardproof.trainer.arms import (
    ALIKE,
    ALTERED,
    ANEW,
    AT_THE_END,
    COPIES,
    CUT,
    KEYS,
    NOTE,
    OTHER,
    PLAIN,
    RESUMED,
    SECOND_RESUME,
    SHARED,
    STOPPED,
    TIED,
    TOLD,
    TOO_SELDOM,
    TWICE,
    WHOLE,
    seed_of,
    trainer_of,
)  # fmt: skip
from shardproof.trainer.base import Cell, Trainer
from shardproof.trainer.cells import MESH, MESH_AXIS, values_of
from shardproof.trainer.rank.calls import Calls
from shardproof.trainer.rank.collectives import Collectives
from shardproof.trainer.rank.emulated import class_for, device_for
from shardproof.trainer.rank.found import State
from shardproof.trainer.rank.gradients import Gradients
from shardproof.trainer.rank.inputs import Inputs
from shardproof.trainer.rank.lasting import lasting
from shardproof.trainer.rank.loaded_keys import LoadedKeys
from shardproof.trainer.rank.loading import values
from shardproof.trainer.rank.measured import Measured, called
from shardproof.trainer.rank.pieces import Held
from shardproof.trainer.rank.plain import numbers_of
from shardproof.trainer.rank.ran import Ran
from shardproof.trainer.rank.state_calls import StateCalls
from shardproof.trainer.rank.walk import walk
from shardproof.trainer.rank.workers import copied_generators
from shardproof.trainer.values import wording
from shardproof.trainer.values.own_folders import own_folders


class Rank:
    """The `RankSystem` of a trainer.

    built: where the cell's own folder is made, if not beside its checkpoints. state: what the trainer's `state()` said
    after the latest operation. It is asked as a part of the operation, so that what it raises counts as the trainer's.
    named: what of it no attribute is, or not by this name. tied: pairs of names of what must be one parameter.
    parameters: of modules, by identity, as they were found latest; of_modules: how each is had while lines run;
    buffers: the same of buffers, by name.
    """

    def __init__(self, context: RankContext, built: Path | None = None) -> None:
        self.context, self.built = context, built or context.directory
        self.described = trainer_of(context.scenario)
        made = class_for(self.described, context.scenario.device)
        with self._device():
            self.trainer: Trainer = made()
        self.taken: list[list[Record]] = []
        self.probes: list[Probe] = []
        self.declined = False
        self.same: dict[str, bool] = {}
        self.cell: Cell | None = None
        self.state: dict[str, Any] = {}
        self.named: set[str] = set()
        self.tied: list[tuple[str, str]] = []
        self.calls = Calls()
        self.gradients = Gradients(lambda: self.of_modules)
        self.inputs, self.collectives = Inputs(), Collectives()
        self.measured, self.loaded_keys = Measured(), LoadedKeys()
        self.state_calls = StateCalls(context.directory)
        self.ran = Ran(self._known, self.state_calls, lambda: self.buffers)
        self.parameters: dict[int, Held] = {}
        self.of_modules: dict[int, Callable[[], torch.Tensor | None]] = {}
        self.buffers: dict[str, Callable[[], torch.Tensor | None]] = {}
        self.files: dict[int, set[tuple[str, int, int]]] = {}
        self.left_as_it_is = False

    def build(self, op: Op) -> None:
        """Make the trainer's model and optimizer for the cell."""
        cell = self._enter(op)
        self._call(lambda: self.trainer.build(cell))

    def step(self, op: Op) -> None:
        """One update; of a trainer with `fit`, nothing, since it has been done."""
        if self.described.fits:
            return
        for probe in self.probes:
            probe.start_step()
        with self._watched(op):
            self._call(lambda: self.trainer.step(op.iteration))

    def save(self, op: Op) -> None:
        """Write a checkpoint into a folder, which is empty but for the last save of the arm `used`: there all ranks
        meet, since another one may still read what is in it."""
        folder = self._folder(op.checkpoint)
        if op.checkpoint == ANEW and dist.is_initialized():
            dist.barrier()
        self._call(lambda: self.trainer.save(folder))

    def load(self, op: Op) -> None:
        """Read a checkpoint, which all ranks have written: a library may leave it to a restart that they have."""
        if dist.is_initialized():
            dist.barrier()
        folder = self.context.directory / f"checkpoint{op.checkpoint}"
        files = files_of(folder)
        self.left_as_it_is = self.files.get(op.checkpoint) == files
        self.files[op.checkpoint] = files
        with self.loaded_keys.watched(), self.state_calls.reading():
            self._call(lambda: self.trainer.load(folder))

    def fit(self, op: Op) -> None:
        """Train until `op.iteration` updates are done, and keep what is observed after each."""
        cell = self._enter(op)
        self.trainer._taken = lambda: self._take(op)
        folder = None if op.checkpoint == NO_CHECKPOINT else self._folder(op.checkpoint)
        resume = None if op.taken < 0 else self.context.directory / f"checkpoint{op.taken}"
        with self._watched(op), self._device(), self.ran.watched():
            self.trainer.fit(cell, op.iteration, folder, resume)
        self.trainer._taken = None

    def _known(self) -> dict[int, Callable[[], torch.Tensor | None]]:
        """The parameters that are known so far, of modules and of optimizers, by identity."""
        return {**self.of_modules, **self.measured.known()}

    def _take(self, op: Op) -> None:
        """Keep what is there after an update in the midst of `fit`."""
        with self.ran.paused():
            self.taken.append(list(self._records(op.index, self._asked())))

    def observe(self, op: Op) -> Iterable[Record]:
        """The state that hangs on the trainer now or, of one with `fit`, after the update of this operation."""
        if not self.described.fits:
            with self._device():
                return list(self._records(op.index, self.state))
        if op.kind != "step":
            notes = list(self._notes(op.index))
            if self.measured.backwards:  # since the latest update, as of an accumulation that is not over
                notes.append(self.measured.record(op.index, self.context.rank, self.parameters))
            return [*notes, *self._at_the_end(op)]
        if not self.taken and op.arm in (RESUMED, STOPPED, SECOND_RESUME):
            return []  # the judge says that the run ended early
        if not self.taken:
            raise RuntimeError(
                f"{TOO_SELDOM}: there is no observation for step {op.iteration}; call it after each update"
            )
        return [record._replace(op=op.index) for record in self.taken.pop(0)]

    def _at_the_end(self, op: Op) -> list[Record]:
        """The state when `fit` has returned; none where that cannot be looked at any more."""
        if op.arm.startswith((CUT, STOPPED)):
            return []
        try:
            with self._device():
                records = [*self._state_of(self._asked()).records(op.index)]
        except Exception:  # as of a trainer that has taken itself apart
            return []
        if self.ran.told:
            records.append(self.ran.record(op.index, self.context.rank, {}))
        return [record._replace(where=AT_THE_END) for record in records]

    def _alike(self, kind: str, paths: tuple[str, ...]) -> bool:
        """Whether all ranks see the same objects of a kind at the first look; asked of the process group's store, which
        no collective of the trainer's is disturbed by."""
        if kind not in self.same and dist.is_initialized() and dist.get_world_size() > 1:
            store, key = dist.distributed_c10d._get_default_store(), f"shardproof/{self.context.rank}/{kind}"
            store.set(key, "\n".join(paths))
            ranks = range(dist.get_world_size())
            self.same[kind] = len({store.get(f"shardproof/{rank}/{kind}") for rank in ranks}) == 1
        return self.same.get(kind, True)

    def _call(self, method: Callable[[], object]) -> None:
        """Call a method of the trainer's, and ask for its state, on the device that it finds."""
        with self._device():
            with self.ran.watched():
                method()
            self.state = self._asked()

    def _asked(self) -> dict[str, Any]:
        """What the trainer's `state()` says, and which names its own has besides the attributes of every trainer's."""
        self.trainer._attributes = frozenset()
        found = self.trainer.state()
        held, attributes = vars(self.trainer), self.trainer._attributes
        own = written_in_state(type(self.trainer))
        self.named = {
            name
            for name, value in found.items()
            if name not in attributes or held.get(name) is not value or name in own
        }
        self.tied = list(pairs_of(self.trainer.tied))
        return found

    def _watched(self, op: Op) -> AbstractContextManager[object]:
        """Inside, what models are given and optimizers have is kept and, in the sessions that are held against each
        other step by step and in the first step of every run, what modules come to."""
        within = ExitStack()
        within.enter_context(self.inputs.watched())
        within.enter_context(self.loaded_keys.watched())
        within.enter_context(self.gradients.watched())
        if op.arm.startswith((WHOLE, ALIKE, CUT, RESUMED, STOPPED)):  # of which the judge asks what a step does
            within.enter_context(self.measured.watched())
            self.measured.know((*self.state.values(), *self.ran.groups.optimizers()))
        of_ways = self.described.alike and op.arm.startswith((WHOLE, TWICE, ALIKE))
        if of_ways or (op.arm.startswith(WHOLE) and op.kind == "step" and op.iteration == 0):
            within.enter_context(self.calls.watched())
        return within

    def _device(self) -> AbstractContextManager[None]:
        return device_for(self.described, self.context.scenario.device)

    def _enter(self, op: Op) -> Cell:
        """The cell of a session, with the process as a launcher would have left it."""
        self.cell = self._cell(op)
        self.trainer._probe = self._probe
        shared = self.context.scenario.device == "cuda"  # ranks may share a GPU
        local = torch.cuda.current_device() if shared else self.cell.rank
        os.environ.update(
            RANK=str(self.cell.rank), WORLD_SIZE=str(self.cell.world), LOCAL_RANK=str(local),
            LOCAL_WORLD_SIZE=str(self.cell.world), MASTER_ADDR="127.0.0.1",
        )  # fmt: skip
        os.environ.setdefault("MASTER_PORT", "29500")
        for seed in (torch.manual_seed, random.seed, np.random.seed):
            seed(self.cell.seed)
        return self.cell

    def _cell(self, op: Op) -> Cell:
        texts = values_of(self.described, self.context.scenario)
        mesh = texts.get(MESH_AXIS, MESH)
        if op.arm.startswith(OTHER):
            mesh = op.arm.removeprefix(OTHER).strip()
        if op.arm.startswith(ALTERED):
            axis = op.arm.removeprefix(ALTERED).strip()
            others = self.described.axes[axis]
            texts[axis] = next(text for text in others if text != texts[axis])
        if op.arm.startswith(ALIKE):
            axis = op.arm.removeprefix(ALIKE).strip()
            texts[axis] = self.described.axes[axis][0]
            mesh = texts[axis] if axis == MESH_AXIS else mesh
        found = values(self.described, {axis: text for axis, text in texts.items() if axis != MESH_AXIS})
        folder = self.built / f"session{op.session}"
        folder.mkdir(exist_ok=True)
        scenario = self.context.scenario
        seed = seed_of(scenario, op)
        device = self.described.emulates or scenario.device
        return Cell(mesh, self.context.rank, op.mesh.world, seed, device, folder, found)

    def _folder(self, number: int) -> Path:
        folder = self.context.directory / f"checkpoint{number}"
        folder.mkdir(exist_ok=True)
        return folder

    def _records(self, op: int, found: dict[str, Any]) -> Iterator[Record]:
        state = self._state_of(found)
        yield from state.records(op)
        self.parameters = state.parameters
        self.of_modules = {key: partial(getattr, held, "local") for key, held in state.parameters.items()}
        self.buffers, self.ran.lasting.tensors = state.buffers, lasting(state)
        self.ran.groups.know(met.value for met in state.way.met if isinstance(met.value, torch.optim.Optimizer))
        for one, other in self.tied:
            data = state.tie(one, other).encode()
            yield whole(op, self.context.rank, TIED, f"{one} = {other}", "utf8", (len(data),), data)
        if self.calls.forward:
            yield self.calls.record(op, self.context.rank)
        if self.inputs.given:
            yield self.inputs.record(op, self.context.rank)
        if self.gradients.seen:
            yield self.gradients.record(op, self.context.rank, state.parameters, state.frozen)
        if self.measured.steps or self.measured.backwards:
            yield self.measured.record(op, self.context.rank, state.parameters)
        yield from self.collectives.records(op, self.context.rank)
        if self.ran.told:
            names = {key: called(held) for key, held in state.parameters.items()}
            yield self.ran.record(op, self.context.rank, names, self.collectives.reductions)
            # a trainer's own `state()` may leave out what its objects hang on
            way = state.way if self.trainer._attributes else walk(vars(self.trainer))
            yield self.state_calls.record(op, self.context.rank, way, self.trainer, state.parameters)
        if self.described.alike:
            told = {names for held in state.parameters.values() for names in held.names if len(names) > 1}
            data = json.dumps(sorted(told)).encode()
            yield whole(op, self.context.rank, SHARED, "", "utf8", (len(data),), data)
        yield from self._notes(op, state)

    def _state_of(self, found: dict[str, Any]) -> State:
        local = patterns_of(self.trainer.local, self.described.local)
        return State(found, self.context.rank, self.context.mesh.world, local, self._alike,
                     self.named, own_folders(self.built, self.context.directory))  # fmt: skip

    def _notes(self, op: int, state: State | None = None) -> Iterator[Record]:
        """What the result says of the state that was found, from rank 0, as records that are not compared."""
        if self.context.rank:
            return
        told = [wording.PROBED] if self.probes else []
        told += [wording.LEFT_AS_IT_IS] if self.left_as_it_is else []
        told += [f"{KEYS}: {text}" for text in self.loaded_keys.taken()]
        if state is not None:
            told += [f"{COPIES}: {text}" for text in copied_generators(state.way)]
            told += [f"found: {item.name}: {item.kind}, {item.detail}" for item in state.found]
            told += [f"hidden: {item.name}: {item.kind}, {item.detail}" for item in state.hidden]
        for number, text in enumerate(told):
            data = text.encode()
            yield whole(op, 0, NOTE, str(number), "utf8", (len(data),), data)
        if state is not None:
            data = json.dumps(numbers_of(self.trainer, self.state)).encode()
            yield whole(op, 0, PLAIN, "", "utf8", (len(data),), data)
        if self.probes and state is not None:
            models = [(probe.spec.name, str(probe.scenario.dtype)) for probe in self.probes]
            optimizers = [optimizer.told() for optimizer in state.optimizers]
            data = json.dumps({"models": models, "declined": self.declined, "optimizers": optimizers}).encode()
            yield whole(op, 0, TOLD, "", "utf8", (len(data),), data)

    def _probe(self, name: str, twin: bool, dtype: str) -> nn.Module:
        """A tiny model with known gradients, which is called with the index of the step."""
        assert self.cell is not None
        self.declined = self.declined or not twin
        scenario = replace(self.context.scenario, model=name, dtype=DTypePolicy.parse(dtype))
        spec, mesh = model_spec(name), self.context.mesh
        context = RankContext(scenario, spec, mesh, self.context.rank, self.context.directory, self.context.contract)
        probe = Probe(context, lambda fqn: ((0,) * len(spec.param(fqn).spec.shape), spec.param(fqn).spec.shape))
        self.probes.append(probe)
        return Probed(probe, build_model(probe, self.cell.seed))


def written_in_state(kind: type) -> set[str]:
    """The texts in a trainer's own `state()`. An attribute that it gives under the attribute's name, such as
    `found["history"] = self.history`, is told by that alone from what every trainer's gives."""
    methods = (vars(each)["state"] for each in kind.__mro__ if each is not Trainer and "state" in vars(each))
    waiting: list[object] = [getattr(inspect.unwrap(method), "__code__", None) for method in methods]
    found: set[str] = set()
    while waiting:
        match waiting.pop():
            case str(text):
                found.add(text)
            case tuple(parts):
                waiting += parts
            case CodeType(co_consts=parts):
                waiting += parts
    return found


def files_of(folder: Path) -> set[tuple[str, int, int]]:
    """The files below a folder, each with its inode and the time in ns at which it was written last."""
    files = [(path, path.stat()) for path in folder.rglob("*") if path.is_file()]
    return {(str(path), stat.st_ino, stat.st_mtime_ns) for path, stat in files}


def patterns_of(local: object, declared: Sequence[str]) -> Sequence[str]:
    """The patterns of a trainer's `local`, which `build` may have set. An attribute of that name which is no list of
    texts is the trainer's own, such as a module, and what its class declares holds."""
    if isinstance(local, (list, tuple)) and all(isinstance(pattern, str) for pattern in local):
        return local
    return declared


def pairs_of(tied: object) -> Iterator[tuple[str, str]]:
    """The first name of each parameter with each of its other names.

    Raises:
        UsageError: a trainer's `tied` has another form.
    """
    for names in tied if isinstance(tied, (list, tuple)) else [tied]:
        if not isinstance(names, (list, tuple)) or len(names) < 2 or not all(isinstance(name, str) for name in names):
            form = 'tied = [("lm_head.weight", "embed.weight")]'
            raise UsageError.of("tied", names, "a list whose entries have two names of one parameter or more", form)
        first, *others = names
        yield from ((first, other) for other in others)


class Probed(nn.Module):
    """A tiny model, called with the index of a step: its output's derivative by each parameter is this rank's exact
    gradient of that step."""

    def __init__(self, probe: Probe, root: Any) -> None:
        super().__init__()
        self._probe_of_model = probe
        for name, module in root.named_children():
            self.add_module(name, module)
        self.order = list(root.paths)

    def forward(self, index: int) -> torch.Tensor:
        """(): the value whose derivatives are the gradients of step `index`."""
        self._probe_of_model.slot = Slot(index)
        # On GPUs parameters are used there, also where they are offloaded; without one they may lie on an emulated GPU.
        device = self._probe_of_model.scenario.device
        used = device if device == "cuda" else next(self.parameters()).device
        x = torch.zeros(1, device=used, requires_grad=True)
        for path in self.order:
            x = self.get_submodule(path)(x)
        return x.sum()
