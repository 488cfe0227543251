"""What every simulated rank holds, as records (table in `observe.record`). Reads state, changes nothing.

A step of the reference leaves arrays with a row for every rank, of which many are equal: whole parameters on all ranks
of a data-parallel group, shards on all replicas. Here they are compared, and a piece that several ranks hold bit for
bit becomes one record that names them all (`Record.others`). Where one rank deviates, every rank has its own record.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from harness.models import is_idle
from harness.observe.record import LIVE, Record
from harness.oracle.inputs import Operation
from harness.reference.kernels import Hyper
from harness.reference.numerics import DTYPE, NAME, Array
from harness.reference.placement import FlatLayout, pieces
from harness.reference.state import Session, Shards, mesh_rank
from harness.reference.trainer import Trainer


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


class View(NamedTuple):
    """How an array of all ranks is read. copies: the parts of equal length along its front that should be equal. first:
    the windows of the first of them, for where all are; each: those of every rank."""

    copies: int
    first: tuple[Window, ...]
    each: tuple[Window, ...]


@lru_cache(maxsize=1024)
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
        for fqn in (layout.catalogue.names[param.fqn] if numel else ())
    )
    first = tuple(window._replace(others=tuple(ranks[1:])) for window in each if window.rank == ranks[0])
    return View(len(ranks), first, each)


@lru_cache(maxsize=1024)
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
                    for rank, begin in zip(ranks, range(at, replicas * length, length), strict=True)
                ]
                each += windows
                first.append(windows[0]._replace(others=tuple(ranks[1:])))
    return View(replicas, tuple(first), tuple(each))


class Observer:
    """Observes one session."""

    def __init__(self, session: Session, trainer: Trainer) -> None:
        self.session, self.trainer = session, trainer
        self._sometimes_idle = any(p.spec.idle for p in session.catalogue.params)

    def observe(self, op: Operation) -> list[Record]:
        """Every record of every rank after `op`."""
        records: list[Record] = []
        for shards in self.session.shards:
            whole, own = whole_view(shards.layout), own_view(shards.layout)
            self._parameters(records, shards, whole, own, op)
            self._optimizer_state(records, shards, whole, own, op)
        others = tuple(range(1, self.session.mesh.world))
        for role, fqn, name, shape, data in shared_values(self.session, self.trainer, op):
            start = (0,) * len(shape)
            records.append(Record(op.index, 0, LIVE, role, fqn, name, shape, start, shape, data, False, 0, others))
        return records

    def _parameters(self, records: list[Record], shards: Shards, whole: View, own: View, op: Operation) -> None:
        """`param` under every name, and after a forward `compute_param` under every name used in it."""
        if shards.model is not None:
            _record(records, op, "param", shards.model, whole)
        else:
            _record(records, op, "param", shards.stepped, own)
        if op.kind in ("step", "overflow") and shards.computed is not None:
            _record(records, op, "compute_param", shards.computed, whole, self._used_in(op))

    def _used_in(self, op: Operation) -> Collection[str]:
        """The names under which some microbatch's forward uses a parameter."""
        if not self._sometimes_idle:
            return self.session.catalogue.used
        microbatches = range(self.session.inputs.microbatches)
        return {
            use
            for param in self.session.catalogue.params
            for use in self.session.catalogue.uses[param.fqn]
            if not all(is_idle(param.spec.idle, op.iteration, microbatch) for microbatch in microbatches)
        }

    def _optimizer_state(self, records: list[Record], shards: Shards, whole: View, own: View, op: Operation) -> None:
        """`master`, moments and `step`, and after a step the `grad` the optimizer saw."""
        session = self.session
        stepped = {fqn for fqn, step in session.steps.items() if step}
        self._scaled_state(records, shards, own, op, stepped)
        scaled = session.scaled_roles(shards)
        if shards.stages.master is not None and "master" not in scaled and session.inputs.has_masters(op):
            _record(records, op, "master", shards.stepped, own, session.held)
        if shards.blueprint.on_host is not None and session.inputs.records_host:
            everywhere = np.repeat(shards.blueprint.on_host[None], len(shards.stepped), axis=0)
            _record(records, op, "host", everywhere, own, session.held)
        if op.kind == "step" and shards.main_grad is not None:
            seen = {p.fqn for p in session.with_gradient}
            _record(records, op, "grad", shards.main_grad, own, seen)
        for role in session.moment_roles if stepped else ():
            if role in shards.moments and role not in scaled:
                _record(records, op, role, shards.moments[role], own, stepped)
        if session.inputs.stepper.kind != "sgd":
            data = {fqn: np.float32(session.steps[fqn]).tobytes() for fqn in stepped}
            for window in whole.first:
                if window.fqn in stepped:
                    counted = data[window.fqn]
                    records.append(
                        Record(
                            op.index, window.rank, LIVE, "step", window.fqn, "fp32", (), (), (), counted,
                            others=window.others,
                        )
                    )  # fmt: skip

    def _scaled_state(
        self, records: list[Record], shards: Shards, own: View, op: Operation, stepped: Collection[str]
    ) -> None:
        """Masters and moments that are scaled, as they are stored, with their scales."""
        for role, (stored, scale) in shards.scaled.items() if stepped else ():
            if role == "master" and not self.session.inputs.has_masters(op):
                continue
            _record(records, op, role, stored, own, stepped)
            _record(records, op, "quant_scale", scale, own, stepped, f".{role}")


def _record(
    records: list[Record],
    op: Operation,
    role: str,
    values: Array,
    view: View,
    names: Collection[str] | None = None,
    suffix: str = "",
) -> None:
    """Append the records of one role, of those `names` only if they are given, under the names with the suffix."""
    index, dtype, item, blob = op.index, NAME[values.dtype], values.dtype.itemsize, values.tobytes()
    alike = view.copies == 1 or blob == blob[: len(blob) // view.copies] * view.copies
    for rank, fqn, shape, start, size, flat, begin, end, copy, others in view.first if alike else view.each:
        if names is None or fqn in names:
            data = blob[begin * item : end * item]
            records.append(
                Record(index, rank, LIVE, role, fqn + suffix, dtype, shape, start, size, data, flat, copy, others)
            )


Shared = tuple[str, str, str, tuple[int, ...], bytes]
"""Role, name, dtype, shape and bytes of a value that every rank holds alike."""


def shared_values(session: Session, trainer: Trainer, op: Operation) -> Iterator[Shared]:
    """What every rank holds alike."""
    for index, group in enumerate(session.groups):
        for owner in group.names if session.inputs.owner_groups else (f"group{index}",):
            for key, number in hyperparameters(group.hyper).items():
                yield "hyperparameter", f"{owner}.{key}", "fp64", (), np.float64(number).tobytes()
        if not session.inputs.owner_groups:
            text = "\n".join(group.names).encode()
            yield "hyperparameter", f"group{index}.params", "utf8", (len(text),), text
    for fqn, value in session.buffers.items():
        yield "buffer", fqn, NAME[value.dtype], value.shape, value.tobytes()
    numbers: list[tuple[str, str, Any]] = []
    if session.schedule_epoch is not None:
        numbers.append(("scheduler", "last_epoch", np.int64(session.schedule_epoch)))
        for index, group in enumerate(session.groups if session.inputs.last_lr else ()):
            numbers.append(("scheduler", f"last_lr.{index}", np.float64(group.hyper.lr)))
    if session.scaler is not None:
        numbers.append(("scaler", "scale", np.float32(session.scaler.scale)))
        numbers.append(("scaler", "growth_tracker", np.int64(session.scaler.growth_tracker)))
        if session.scaler.hysteresis_tracker is not None:
            numbers.append(("scaler", "hysteresis_tracker", np.int64(session.scaler.hysteresis_tracker)))
    if op.kind == "step" and trainer.total_norm is not None and session.inputs.clip:
        numbers.append(("norm", "total_norm", DTYPE[session.inputs.clip.norm_dtype].type(trainer.total_norm)))
    for role, fqn, number in numbers:
        yield role, fqn, NAME[number.dtype], (), number.tobytes()


def hyperparameters(hyper: Hyper) -> dict[str, float]:
    """The numbers of a group that its kind of optimizer has."""
    values = {"lr": hyper.lr, "weight_decay": hyper.weight_decay}
    if hyper.kind == "sgd":
        return values | {"momentum": hyper.momentum, "nesterov": float(hyper.nesterov)}
    return values | {"beta1": hyper.beta1, "beta2": hyper.beta2, "eps": hyper.eps}
