"""What every simulated rank holds, as records (table in `observe.record`). Reads state, changes nothing."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import cached_property
from typing import NamedTuple

import numpy as np

from harness.models import is_idle
from harness.observe.record import LIVE, Record
from harness.oracle.inputs import Operation
from harness.reference.kernels import Hyper
from harness.reference.numerics import DTYPE, NAME, Array
from harness.reference.placement import pieces
from harness.reference.state import Session, Shards, mesh_rank
from harness.reference.trainer import Trainer


class Window(NamedTuple):
    """Where one rank's piece of a name lies in an array of all ranks: elements `begin` to `end`, and as which box.

    copy: the tp index of a tp-replicated parameter in flat buffers: they lie differently on every tp rank.
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


class Observer:
    """Observes one session. Where everything lies is worked out at the first observation."""

    def __init__(self, session: Session, trainer: Trainer) -> None:
        self.session, self.trainer = session, trainer
        self._canonical = {p.fqn for p in session.catalogue.params}
        self._used = {use for uses in session.catalogue.uses.values() for use in uses}
        self._sometimes_idle = any(p.spec.idle for p in session.catalogue.params)

    def observe(self, op: Operation) -> list[Record]:
        """Every record of every rank after `op`."""
        records: list[Record] = []
        for shards, full, owned in zip(self.session.shards, self._full, self._owned, strict=True):
            self._parameters(records, shards, full, owned, op)
            self._optimizer_state(records, shards, full, owned, op)
        for role, fqn, value in shared_values(self.session, self.trainer, op):
            name = "utf8" if value.dtype == np.uint8 else NAME[value.dtype]
            data, start = value.tobytes(), (0,) * value.ndim
            for rank in range(self.session.mesh.world):
                records.append(Record(op.index, rank, LIVE, role, fqn, name, value.shape, start, value.shape, data))
        return records

    def _parameters(
        self, records: list[Record], shards: Shards, full: list[Window], owned: list[Window], op: Operation
    ) -> None:
        """`param` under every name, and after a forward `compute_param` under every name used in it."""
        if shards.model is not None:
            _record(records, op, "param", shards.model, full)
        else:
            _record(records, op, "param", shards.stepped, owned)
        if op.kind in ("step", "overflow") and shards.computed is not None:
            _record(records, op, "compute_param", shards.computed, full, self._used_in(op))

    def _used_in(self, op: Operation) -> Collection[str]:
        """The names under which some microbatch's forward uses a parameter."""
        if not self._sometimes_idle:
            return self._used
        specs, microbatches = self.session.catalogue.uses, range(self.session.inputs.microbatches)
        return {
            use
            for param in self.session.catalogue.params
            for use in specs[param.fqn]
            if not all(is_idle(param.spec.idle, op.iteration, microbatch) for microbatch in microbatches)
        }

    def _optimizer_state(
        self, records: list[Record], shards: Shards, full: list[Window], owned: list[Window], op: Operation
    ) -> None:
        """`master`, moments and `step`, and after a step the `grad` the optimizer saw."""
        stepped = {fqn for fqn, step in self.session.steps.items() if step}
        self._scaled_state(records, shards, owned, op, stepped)
        scaled = self.session.scaled_roles(shards)
        if shards.stages.master is not None and "master" not in scaled and self.session.inputs.has_masters(op):
            _record(records, op, "master", shards.stepped, owned, self._canonical & self.session.held)
        if shards.blueprint.on_host is not None and self.session.inputs.records_host:
            everywhere = np.repeat(shards.blueprint.on_host[None], len(shards.stepped), axis=0)
            _record(records, op, "host", everywhere, owned, self.session.held)
        if op.kind == "step" and shards.main_grad is not None:
            seen = {p.fqn for p in self.session.with_gradient}
            _record(records, op, "grad", shards.main_grad, owned, seen)
        for role in self.session.moment_roles if stepped else ():
            if role in shards.moments and role not in scaled:
                _record(records, op, role, shards.moments[role], owned, stepped)
        if self.session.inputs.stepper.kind != "sgd":
            data = {fqn: np.float32(self.session.steps[fqn]).tobytes() for fqn in stepped}
            for window in full:
                if window.fqn in stepped:
                    values = data[window.fqn]
                    records.append(Record(op.index, window.rank, LIVE, "step", window.fqn, "fp32", (), (), (), values))

    def _scaled_state(
        self, records: list[Record], shards: Shards, owned: list[Window], op: Operation, stepped: Collection[str]
    ) -> None:
        """Masters and moments that are scaled, as they are stored, with their scales."""
        for role, (stored, scale) in shards.scaled.items() if stepped else ():
            if role == "master" and not self.session.inputs.has_masters(op):
                continue
            _record(records, op, role, stored, owned, stepped)
            names = [w._replace(fqn=f"{w.fqn}.{role}") for w in owned if w.fqn in stepped]
            _record(records, op, "quant_scale", scale, names)

    @cached_property
    def _names(self) -> dict[str, list[str]]:
        """All names of each parameter, its own first."""
        names = {p.fqn: [p.fqn] for p in self.session.catalogue.params}
        for param in self.session.model.params:
            if param.spec.tied_to is not None:
                names[param.spec.tied_to].append(param.fqn)
        return names

    @cached_property
    def _full(self) -> list[list[Window]]:
        """For each of the session's shards, the windows of whole tensor-parallel shards in arrays (R, S, n)."""
        return [list(self._full_windows(shards)) for shards in self.session.shards]

    def _full_windows(self, shards: Shards) -> Iterator[Window]:
        mesh, length = self.session.mesh, shards.layout.element.size
        for replica, shard in np.ndindex(mesh.dp_replicate, mesh.dp_shard):
            rank, begin = mesh_rank(mesh, replica, shard, shards.tp_index), (replica * mesh.dp_shard + shard) * length
            for param, start, size, offset, numel in shards.layout.slots:
                for fqn in self._names[param.fqn] if numel else ():
                    at = begin + offset
                    yield Window(rank, fqn, param.spec.shape, start, size, False, at, at + numel)

    @cached_property
    def _owned(self) -> list[list[Window]]:
        """For each of the session's shards, the windows of what each rank owns in arrays (R, S, m)."""
        return [list(self._owned_windows(shards)) for shards in self.session.shards]

    def _owned_windows(self, shards: Shards) -> Iterator[Window]:
        mesh, length = self.session.mesh, shards.layout.order.shape[1]
        for fragment in shards.layout.fragments:
            param = fragment.slot.param
            copy = shards.tp_index if shards.layout.flat_records and param.spec.tp_dim is None else 0
            for flat, start, size, skip, numel in pieces(fragment, shards.layout.flat_records):
                for replica in range(mesh.dp_replicate):
                    rank = mesh_rank(mesh, replica, fragment.shard, shards.tp_index)
                    at = (replica * mesh.dp_shard + fragment.shard) * length + fragment.at + skip
                    for fqn in self._names[param.fqn]:
                        yield Window(rank, fqn, param.spec.shape, start, size, flat, at, at + numel, copy)


def _record(
    records: list[Record],
    op: Operation,
    role: str,
    values: Array,
    windows: list[Window],
    names: Collection[str] | None = None,
) -> None:
    """Append the records of one role, of those `names` only if they are given."""
    index, dtype, item, blob = op.index, NAME[values.dtype], values.dtype.itemsize, values.tobytes()
    for rank, fqn, shape, start, size, flat, begin, end, copy in windows:
        if names is None or fqn in names:
            data = blob[begin * item : end * item]
            records.append(Record(index, rank, LIVE, role, fqn, dtype, shape, start, size, data, flat, copy))


def shared_values(session: Session, trainer: Trainer, op: Operation) -> Iterator[tuple[str, str, Array]]:
    """`(role, fqn, value)` of what every rank holds alike; text as bytes."""
    for index, group in enumerate(session.groups):
        for owner in group.names if session.inputs.owner_groups else (f"group{index}",):
            for key, number in hyperparameters(group.hyper).items():
                yield "hyperparameter", f"{owner}.{key}", np.array(number, np.float64)
        if not session.inputs.owner_groups:
            text = "\n".join(group.names).encode()
            yield "hyperparameter", f"group{index}.params", np.frombuffer(text, np.uint8)
    for fqn, value in session.buffers.items():
        yield "buffer", fqn, value
    if session.schedule_epoch is not None:
        yield "scheduler", "last_epoch", np.array(session.schedule_epoch, np.int64)
        for index, group in enumerate(session.groups if session.inputs.last_lr else ()):
            yield "scheduler", f"last_lr.{index}", np.array(group.hyper.lr, np.float64)
    if session.scaler is not None:
        yield "scaler", "scale", np.array(session.scaler.scale, np.float32)
        yield "scaler", "growth_tracker", np.array(session.scaler.growth_tracker, np.int64)
        if session.scaler.hysteresis_tracker is not None:
            yield "scaler", "hysteresis_tracker", np.array(session.scaler.hysteresis_tracker, np.int64)
    if op.kind == "step" and trainer.total_norm is not None and session.inputs.clip:
        yield "norm", "total_norm", np.array(trainer.total_norm, DTYPE[session.inputs.clip.norm_dtype])


def hyperparameters(hyper: Hyper) -> dict[str, float]:
    """The numbers of a group that its kind of optimizer has."""
    values = {"lr": hyper.lr, "weight_decay": hyper.weight_decay}
    if hyper.kind == "sgd":
        return values | {"momentum": hyper.momentum, "nesterov": float(hyper.nesterov)}
    return values | {"beta1": hyper.beta1, "beta2": hyper.beta2, "eps": hyper.eps}
