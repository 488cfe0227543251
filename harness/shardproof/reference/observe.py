"""Records the state of every simulated rank, with the roles of `observe.record`, and changes nothing.

A step of the reference leaves arrays with a row for every rank. A `Sheet` is a copy of one such array, with a `View`
that says which parameter lies where in it. There are two ways to read sheets:

* as records, one for each piece of a parameter on each rank, which `observe.assemble` joins like those of a real
  system. Rows of the array that are equal become one record that names all their ranks (`Record.others`).
* as whole values at once (`values_of`). That every piece lies in its place, that no two boxes overlap and that together
  they are the tensor depends on the views alone and is worked out once for each (`_Plan`); what is left for a sheet is
  to see that whoever holds the same elements holds the same bits. Where anything is not as it should be, there are no
  values, and the records say what is wrong.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import numpy as np

from shardproof.models import is_idle
from shardproof.observe.logical import Key, Logical, Value
from shardproof.observe.record import ITEMSIZE, LIVE, Record, whole
from shardproof.oracle.extra_state import EXTRA_STATE
from shardproof.oracle.inputs import Operation
from shardproof.program import FORWARDS, UPDATES
from shardproof.reference.kernels import COUNT_NO_STEPS, Hyper
from shardproof.reference.numerics import DTYPE, NAME, Array
from shardproof.reference.placement import LAYOUTS, FlatLayout, Index, pieces
from shardproof.reference.schedule import lines
from shardproof.reference.state import Session, Shards, mesh_rank
from shardproof.reference.trainer import Trainer
from shardproof.schedules import SCHEDULE


class Window(NamedTuple):
    """Where one rank's piece of a name lies in an array of all ranks: elements `begin` to `end`, and as which box.

    copy: the tp index of a tp-replicated parameter in flat buffers: they lie differently on every tp rank. others:
    further ranks, in whose rows the same piece lies.
    """

    rank: int
    fqn: str
    shape: tuple[int, ...]
    start: tuple[int, ...]
    size: tuple[int, ...]
    flat: bool
    begin: int
    end: int
    copy: int = 0
    others: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class View:
    """How an array of all ranks is read. copies: the parts along its front that should be equal. length: the elements
    of each. first: the windows of the first of them, for where all are; each: those of every rank."""

    copies: int
    length: int
    first: tuple[Window, ...]
    each: tuple[Window, ...]


class Sheet(NamedTuple):
    """A copy of one array of all ranks: everything of one role in one flat buffer.

    blob: the array's bytes. names: the names that count, all without any. suffix: what is added to a name.
    """

    role: str
    dtype: str
    blob: bytes
    view: View
    names: Collection[str] | None = None
    suffix: str = ""

    @property
    def alike(self) -> bool:
        """Whether all copies are equal, bit for bit."""
        copies = self.view.copies
        return copies == 1 or self.blob == self.blob[: len(self.blob) // copies] * copies

    def records(self, op: Operation) -> Iterator[Record]:
        """One record a piece: of the first copy, naming all ranks, or of every rank where copies differ."""
        index, role, dtype, blob, view, names, suffix = op.index, *self
        item = ITEMSIZE[dtype]
        for rank, fqn, shape, start, size, flat, begin, end, copy, others in view.first if self.alike else view.each:
            if names is None or fqn in names:
                data = blob[begin * item : end * item]
                yield Record(index, rank, LIVE, role, fqn + suffix, dtype, shape, start, size, data, flat, copy, others)


@dataclass(frozen=True, eq=False)
class _Plan:
    """How the first copies of some views, one after the other, become whole tensors.

    order: of each element of each tensor, its position there. slices: `(name, shape, begin, end)` of the tensors in
    what `order` gives. twice: pairs of positions that hold the same element, (2, k).
    """

    order: Index
    slices: tuple[tuple[str, tuple[int, ...], int, int], ...]
    twice: Index


@lru_cache(maxsize=LAYOUTS)
def _plan(views: tuple[View, ...]) -> _Plan | None:
    """The plan of views that hold parts of the same parameters: one for each tensor-parallel coordinate. None where
    some tensor is not whole, or boxes overlap that are not copies of each other."""
    found: dict[str, list[tuple[Window, Index]]] = {}
    offset = 0
    for view in views:
        for window in view.first:
            found.setdefault(window.fqn, []).append((window, np.arange(window.begin, window.end) + offset))
        offset += view.length
    order, twice = [np.empty(0, np.int64)], [np.empty((2, 0), np.int64)]
    slices, at = [], 0
    for fqn, pieces_of_it in found.items():
        shape = pieces_of_it[0][0].shape
        copies: dict[int, list[tuple[Window, Index]]] = {}
        for window, positions in pieces_of_it:
            copies.setdefault(window.copy, []).append((window, positions))
        first: Index | None = None
        for own in copies.values():
            tiled = _tiled(shape, own)
            if tiled is None:
                return None
            first = tiled[0] if first is None else first
            twice += [np.stack([first, tiled[0]]), tiled[1]]
        assert first is not None
        order.append(first)
        slices.append((fqn, shape, at, at := at + first.size))
    pairs = np.concatenate(twice, axis=1)
    return _Plan(np.concatenate(order), tuple(slices), pairs[:, pairs[0] != pairs[1]])


def _tiled(shape: tuple[int, ...], found: list[tuple[Window, Index]]) -> tuple[Index, Index] | None:
    """Of each element of a tensor its position, (elements,), and pairs of positions that hold the same element, (2, k),
    where several ranks hold the same box. None where boxes overlap otherwise, or are not the whole tensor."""
    numbers = np.arange(prod(shape))
    position = np.full(numbers.size, -1)
    boxes: dict[tuple[object, ...], Index] = {}
    twice = [np.empty((2, 0), np.int64)]
    for window, own in found:
        region = numbers if window.flat else numbers.reshape(shape)
        elements = region[tuple(slice(a, a + n) for a, n in zip(window.start, window.size, strict=True))].ravel()
        place = (window.start, window.size, window.flat)
        if elements.size != own.size or (place not in boxes and (position[elements] >= 0).any()):
            return None
        if place in boxes:
            twice.append(np.stack([boxes[place], own]))
        else:
            position[elements] = boxes[place] = own
    if (position < 0).any():
        return None
    return position, np.concatenate(twice, axis=1)


@lru_cache(maxsize=LAYOUTS)
def whole_view(layout: FlatLayout) -> View:
    """Of arrays (R, S, n): the tensor-parallel shards of all parameters, which every data-parallel rank has."""
    mesh, length = layout.mesh, layout.element.size
    ranks = [
        mesh_rank(mesh, replica, shard, layout.tp_index)
        for replica, shard in np.ndindex(mesh.dp_replicate, mesh.dp_shard)
    ]
    each = tuple(
        Window(rank, fqn, param.spec.shape, start, size, False, row * length + at, row * length + at + numel)
        for row, rank in enumerate(ranks)
        for param, start, size, at, numel in layout.slots
        for fqn in (layout.catalogue.names[param.fqn] if numel or not param.spec.numel else ())
    )
    first = tuple(window._replace(others=tuple(ranks[1:])) for window in each if window.rank == ranks[0])
    return View(len(ranks), length, first, each)


@lru_cache(maxsize=LAYOUTS)
def own_view(layout: FlatLayout) -> View:
    """Of arrays (R, S, m): what each rank owns, which every replica has."""
    each: list[Window] = []
    first: list[Window] = []
    replicas, length = layout.mesh.dp_replicate, layout.order.size
    for fragment in layout.fragments:
        param = fragment.slot.param
        copy = layout.tp_index if layout.flat_records and param.spec.tp_dim is None else 0
        ranks = [mesh_rank(layout.mesh, replica, fragment.shard, layout.tp_index) for replica in range(replicas)]
        for flat, start, size, skip, numel in pieces(fragment, layout.flat_records):
            at = fragment.shard * layout.order.shape[1] + fragment.at + skip
            for fqn in layout.catalogue.names[param.fqn]:
                windows = [
                    Window(rank, fqn, param.spec.shape, start, size, flat, begin, begin + numel, copy)
                    for rank, begin in zip(ranks, itertools.count(at, length), strict=False)
                ]
                each += windows
                first.append(windows[0]._replace(others=tuple(ranks[1:])))
    return View(replicas, length, tuple(first), tuple(each))


Shared = tuple[str, str, str, tuple[int, ...], bytes]
"""Role, name, dtype, shape and bytes of a value that every rank holds alike, or that one rank has."""


@dataclass(frozen=True)
class Observation:
    """What all ranks hold after one operation. sheets: each with the number of the parameters it is of, which is the
    same on every tensor-parallel coordinate. shared: what every rank holds alike. alone: what each rank has of its own,
    with its rank. world: ranks."""

    op: Operation
    sheets: list[tuple[int, Sheet]]
    shared: list[Shared]
    alone: list[tuple[int, Shared]]
    world: int

    def records(self) -> Iterator[Record]:
        """The same, piece by piece."""
        for _, sheet in self.sheets:
            yield from sheet.records(self.op)
        others = tuple(range(1, self.world))
        for role, fqn, name, shape, data in self.shared:
            start = (0,) * len(shape)
            yield Record(self.op.index, 0, LIVE, role, fqn, name, shape, start, shape, data, False, 0, others)
        for rank, (role, fqn, name, shape, data) in self.alone:
            yield whole(self.op.index, rank, role, fqn, name, shape, data)


class Observer:
    """Records the state of every simulated rank in a session of the reference, without changing the state."""

    def __init__(self, session: Session, trainer: Trainer) -> None:
        self.session, self.trainer = session, trainer
        self._sometimes_idle = any(p.spec.idle for p in session.catalogue.params)

    def observe(self, op: Operation) -> Iterable[Record]:
        """Every record of every rank after `op`."""
        return self.look(op).records()

    def look(self, op: Operation) -> Observation:
        """The state of all ranks after operation `op`: parameters, masters, moments, counters and settings."""
        session = self.session
        stepped = set(session.steps)
        parts = len(session.shards) // session.mesh.tp
        sheets = [
            (number % parts, sheet)
            for number, shards in enumerate(session.shards)
            for sheet in (*self._parameters(shards, op), *self._optimizer_state(shards, op, stepped))
        ]
        shared = list(shared_values(session, self.trainer, op))
        if session.inputs.stepper.kind not in COUNT_NO_STEPS:
            for fqn in stepped:
                shared.append(("step", fqn, "fp32", (), np.float32(session.steps[fqn]).tobytes()))
        alone = [
            (rank, ("rng", stream, "int64", state.shape, state.tobytes()))
            for stream, states in session.streams.items()
            for rank, state in enumerate(states)
        ]
        return Observation(op, sheets, shared, alone, session.mesh.world)

    def _parameters(self, shards: Shards, op: Operation) -> Iterator[Sheet]:
        """`param` under every name, and after a forward `compute_param` under every name used in it."""
        whole = whole_view(shards.layout)
        if shards.model is not None:
            yield _sheet("param", shards.model, whole)
        else:
            yield _sheet("param", shards.stepped, own_view(shards.layout))
        if op.kind in FORWARDS and shards.computed is not None:
            yield _sheet("compute_param", shards.computed, whole, self._used_in(op))

    def _used_in(self, op: Operation) -> Collection[str]:
        """The names under which some microbatch's forward uses a parameter."""
        if not self._sometimes_idle:
            return self.session.catalogue.used
        microbatches = self.trainer.forwards
        return {
            use
            for param in self.session.catalogue.params
            for use in self.session.catalogue.uses[param.fqn]
            if not all(is_idle(param.spec.idle, op.iteration, microbatch) for microbatch in microbatches)
        }

    def _optimizer_state(self, shards: Shards, op: Operation, stepped: Collection[str]) -> Iterator[Sheet]:
        """`master` and moments, and after a step the `grad` the optimizer saw."""
        session, own = self.session, own_view(shards.layout)
        masters = session.inputs.has_masters(op)
        for role, (stored, scale) in shards.scaled.items() if stepped else ():
            if role != "master" or masters:  # as it is stored, and with its scale
                yield _sheet(role, stored, own, stepped)
                yield _sheet("quant_scale", scale, own, stepped, f".{role}")
        scaled = session.scaled_roles(shards)
        if shards.stages.master is not None and "master" not in scaled and masters:
            yield _sheet("master", shards.stepped, own, session.held)
        if shards.blueprint.on_host is not None and session.inputs.records_host:
            everywhere = np.repeat(shards.blueprint.on_host[None], len(shards.stepped), axis=0)
            yield _sheet("host", everywhere, own, session.held)
        if shards.weights is not None:
            yield _sheet("quantised", shards.weights.data, own, session.recipes)
            yield _sheet("quant_scale", shards.weights.inverse, own, session.recipes, ".quantised")
        if op.kind in UPDATES and shards.main_grad is not None:
            yield _sheet("grad", shards.main_grad, own, {p.fqn for p in session.with_gradient} - self.trainer.idle)
        for role in session.moment_roles if stepped else ():
            if role in shards.moments and role not in scaled:
                yield _sheet(role, shards.moments[role], own, stepped)


def _sheet(role: str, values: Array, view: View, names: Collection[str] | None = None, suffix: str = "") -> Sheet:
    return Sheet(role, NAME[values.dtype], values.tobytes(), view, names, suffix)


_new = tuple.__new__
"""Makes a named tuple without a Python call: there are a thousand keys and values in a scenario."""


def values_of(observations: Iterable[Observation]) -> Logical | None:
    """Everything that was observed, as whole values; None where it takes a closer look, by way of the records."""
    logical: Logical = {}
    for observation in observations:
        index = observation.op.index
        tensors: dict[tuple[str, str, int], list[Sheet]] = {}
        for part, sheet in observation.sheets:
            tensors.setdefault((sheet.role, sheet.suffix, part), []).append(sheet)
        alike: dict[tuple[str, tuple[View, ...]], list[list[Sheet]]] = {}
        for sheets in tensors.values():
            views = tuple([sheet.view for sheet in sheets])
            alike.setdefault((sheets[0].dtype, views), []).append(sheets)
        if not all(_join(logical, index, dtype, views, roles) for (dtype, views), roles in alike.items()):
            return None
        for role, fqn, dtype, shape, data in observation.shared:
            logical[_new(Key, (index, LIVE, role, fqn))] = _new(Value, (dtype, shape, data))
        for rank, (role, fqn, dtype, shape, data) in observation.alone:
            logical[_new(Key, (index, LIVE, role, f"rank{rank}.{fqn}"))] = _new(Value, (dtype, shape, data))
    return logical


def _join(logical: Logical, index: int, dtype: str, views: tuple[View, ...], roles: list[list[Sheet]]) -> bool:
    """Add the values of some roles, each of which has a sheet for every view; whether that can be done.

    Roles that lie alike, such as a master and its moments, are put in order together.
    """
    plan = _plan(views)
    if plan is None or not all(sheet.dtype == dtype and sheet.alike for sheets in roles for sheet in sheets):
        return False
    item = ITEMSIZE[dtype]
    blob = b"".join([sheet.blob[: sheet.view.length * item] for sheets in roles for sheet in sheets])
    bits = np.frombuffer(blob, _BITS[item]).reshape(len(roles), -1)
    if plan.twice.size and not np.array_equal(bits[:, plan.twice[0]], bits[:, plan.twice[1]]):
        return False
    data, width = bits[:, plan.order].tobytes(), plan.order.size * item
    for number, (first, *_) in enumerate(roles):
        begin, names, suffix = number * width, first.names, first.suffix
        for fqn, shape, start, end in plan.slices:
            if names is None or fqn in names:
                own = data[begin + start * item : begin + end * item]
                logical[_new(Key, (index, LIVE, first.role, fqn + suffix))] = _new(Value, (dtype, shape, own))
    return True


_BITS: dict[int, np.dtype[Any]] = {
    1: np.dtype(np.uint8),
    2: np.dtype(np.uint16),
    4: np.dtype(np.uint32),
    8: np.dtype(np.uint64),
}
"""Bytes of an element → a dtype of that size, in which bits are compared as bits."""


def shared_values(session: Session, trainer: Trainer, op: Operation) -> Iterator[Shared]:
    """What every rank holds alike."""
    for index, group in enumerate(session.groups):
        yield from _of_group(None if session.inputs.owner_groups else index, tuple(group.names), group.hyper)
    for fqn, value in session.buffers.items():
        yield "buffer", fqn, NAME[value.dtype], value.shape, value.tobytes()
    for fqn, data in session.opaque.items():
        yield EXTRA_STATE, fqn, "uint8", (len(data),), data
    for fqn, history in session.histories.items():
        yield "quant_scale", f"{fqn}.amax_history", "fp32", history.shape, history.tobytes()
    numbers: list[tuple[str, str, Any]] = []
    if session.schedule is not None:
        numbers.append(("scheduler", "last_epoch", np.int64(session.schedule.epoch)))
        for index, rate in enumerate(session.schedule.last_lr if not session.inputs.share else ()):
            numbers.append(("scheduler", f"last_lr.{index}", np.float64(rate)))
        for name, line in lines(session.schedule) if not session.inputs.share else ():
            yield SCHEDULE, name, "utf8", (len(line),), line.encode()
    if session.scaler is not None:
        numbers.append(("scaler", "scale", np.float32(session.scaler.scale)))
        numbers.append(("scaler", "growth_tracker", np.int64(session.scaler.growth_tracker)))
        if session.scaler.hysteresis_tracker is not None:
            numbers.append(("scaler", "hysteresis_tracker", np.int64(session.scaler.hysteresis_tracker)))
    if op.kind in UPDATES and trainer.total_norm is not None and session.inputs.clip:
        numbers.append(("norm", "total_norm", DTYPE[session.inputs.clip.norm_dtype].type(trainer.total_norm)))
    for fqn, direction in trainer.directions.items() if op.kind in UPDATES else ():
        yield "direction", fqn, NAME[direction.dtype], direction.shape, direction.tobytes()
    for role, fqn, number in numbers:
        yield role, fqn, NAME[number.dtype], (), number.tobytes()


@lru_cache(maxsize=1024)
def _of_group(index: int | None, names: tuple[str, ...], hyper: Hyper) -> tuple[Shared, ...]:
    """What ranks hold of a group: its numbers and names under its index, or its numbers under each of its parameters
    where there is no index."""
    found: list[Shared] = []
    for owner in names if index is None else (f"group{index}",):
        for key, number in hyperparameters(hyper).items():
            found.append(("hyperparameter", f"{owner}.{key}", "fp64", (), np.float64(number).tobytes()))
    if index is not None:
        text = "\n".join(names).encode()
        found.append(("hyperparameter", f"group{index}.params", "utf8", (len(text),), text))
    return tuple(found)


def hyperparameters(hyper: Hyper) -> dict[str, float]:
    """The numbers of a group that its kind of optimizer has."""
    values = {"lr": hyper.lr, "weight_decay": hyper.weight_decay}
    if hyper.kind in COUNT_NO_STEPS:
        values |= {"momentum": hyper.momentum, "nesterov": float(hyper.nesterov)}
        return values | ({"eps": hyper.eps} if hyper.kind == "muon" else {})
    return values | {"beta1": hyper.beta1, "beta2": hyper.beta2, "eps": hyper.eps}
