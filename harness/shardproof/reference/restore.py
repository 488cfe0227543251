"""Loading a checkpoint of `checkpoint` into a session on any mesh.

A load first makes logical tensors of what was written, then every rank takes the elements it owns. What a load
changes: `load` everything a checkpoint holds; `load_model_only` parameters and persistent buffers, while masters
and host copies stay stale until `reload_params`; `load_optimizer_only` what the optimizer keeps, masters among it;
`load_schedule_only` what the learning-rate schedule keeps.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np

from shardproof.reference.checkpoint import Content, Logical
from shardproof.reference.extra_state import Opaque
from shardproof.reference.kernels import Hyper
from shardproof.reference.numerics import DTYPE, Array
from shardproof.reference.placement import Index
from shardproof.reference.quantised import Kept
from shardproof.reference.schedule import Group, set_shares
from shardproof.reference.sections import start_of
from shardproof.reference.state import Scaler, Session, Shards
from shardproof.reference.streams import Streams, coordinates, handed_out
from shardproof.scenario import FLOAT_DTYPES


def _as_own(saved: Hyper, own: Hyper) -> Hyper:
    """The numbers that were saved. AdamW stays AdamW; Adam decouples the weight decay from then on if what it loads did
    (torch/optim/adamw.py, `__setstate__`)."""
    return replace(saved, kind=own.kind) if own.kind == "adamw" else saved


class Loader:
    """Loads into one session. Each method is a seam for `faults.catalogue`. `left`: the parameters of which the
    checkpoint that is read knows nothing; what there is of them stays."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.left: set[str] = set()

    def load(self, content: Content) -> None:
        """Restore model, optimizer, schedule, scaler and random generators."""
        logical = self.read(content)
        self.restore_model(logical, content)
        self.restore_optimizer(logical, content["common"])
        self.restore_groups(content["common"]["groups"])
        self.restore_schedule(content["common"])
        self.restore_streams(content["common"]["streams"])
        self.place_state()
        self.session.refresh_host_copies()

    def load_model_only(self, content: Content) -> None:
        """Restore parameters and persistent buffers."""
        logical = self.read(content)
        self.restore_model(logical, content)
        if self.session.inputs.masters_in_model:
            self.restore_masters(logical)
        self.session.refresh_host_copies()

    def load_optimizer_only(self, content: Content) -> None:
        """Restore masters, moments, steps and groups; parameters, schedule and scaler stay."""
        self.restore_optimizer(self.read(content), content["common"])
        self.restore_groups(content["common"]["groups"])
        self.place_state()
        self.session.refresh_host_copies()

    def load_schedule_only(self, content: Content) -> None:
        """Restore what the schedule keeps of its own; the rates of the groups are the optimizer's, and stay."""
        self.session.schedule = content["common"]["schedule"]

    # -- from what was written to logical tensors

    def read(self, content: Content) -> Logical:
        """The logical tensors of a checkpoint."""
        self.left = {param.fqn for param in self.session.catalogue.params} - (
            set(content["common"]["params"]) & set(self.session.stored_names())
        )
        if content["format"] == "gathered":
            full: Logical = content["full"]
            return full
        logical = self._from_ranks(content["ranks"])
        if content["format"] == "bucket_space":
            for role, tensors in self._from_buckets(content).items():
                logical.setdefault(role, {}).update(tensors)
        return logical

    def _from_ranks(self, ranks: Content) -> Logical:
        logical: Logical = {}
        for rank in self.in_order(ranks):
            for role, filed in ranks[rank].items():
                for key, parts in filed.items():
                    name, _, section = key.partition(":")
                    if name not in self.session.catalogue.known:
                        continue
                    param = self.session.model.param(name)
                    shape, at = param.spec.shape, start_of(param, section) if section else None
                    tensors = logical.setdefault(role, {})
                    if name not in tensors:
                        tensors[name] = np.zeros(prod(shape), parts[0]["data"].dtype)
                    for part in parts:
                        self._insert(tensors[name], shape, at, part)
        return logical

    def _insert(self, tensor: Array, shape: tuple[int, ...], at: int | None, part: dict[str, Any]) -> None:
        """Put a piece where it belongs. at: where a section begins that it is a run of; None for a piece of all."""
        if len(part["start"]) == len(shape) and at is None:
            window = tuple(slice(a, a + n) for a, n in zip(part["start"], part["size"], strict=True))
            tensor.reshape(shape)[window] = part["data"]
            return
        start = part["start"][0] + (at or 0)
        tensor[start : start + part["size"][0]] = part["data"]

    def _from_buckets(self, content: Content) -> Logical:
        """Unpad every bucket, join the buckets, and cut the result at the parameters' offsets."""
        logical: Logical = {}
        for tp, by_storage in content["buckets"].items():
            for storage, buckets in by_storage.items():
                table = content["table"][tp][storage]
                roles = buckets["bucket_0"]["rank_0"]
                for role in roles:
                    joined = np.concatenate([
                        self.unpad(self.joined(buckets[name], role), table, int(name.partition("_")[2]))
                        for name in self.in_order(buckets)
                    ])  # fmt: skip
                    self._cut(joined, table, logical.setdefault(role, {}))
        return logical

    def joined(self, ranks: Content, role: str) -> Array:
        """The shards of one bucket from every rank, concatenated in rank order."""
        return np.concatenate([ranks[rank][role] for rank in self.in_order(ranks)])

    def unpad(self, bucket: Array, table: list[Any], number: int) -> Array:
        """A bucket without the padding at its end."""
        return bucket[: sum(prod(size) for _, home, _, _, size in table if home == number)]

    def _cut(self, joined: Array, table: list[Any], tensors: dict[str, Array]) -> None:
        position = 0
        for name, _, _, start, size in table:
            if name not in self.session.catalogue.known:
                position += prod(size)
                continue
            shape = self.session.model.param(name).spec.shape
            tensor = tensors.setdefault(name, np.zeros(prod(shape), joined.dtype))
            values = joined[position : position + prod(size)]
            self._insert(tensor, shape, None, {"start": start, "size": size, "data": values.reshape(size)})
            position += prod(size)

    def in_order(self, names: Iterable[str]) -> list[str]:
        """`rank_…` or `bucket_…` names by their number."""
        return sorted(names, key=lambda name: int(name.rpartition("_")[2]))

    # -- from logical tensors to every rank

    def restore_model(self, logical: Logical, content: Content) -> None:
        """Parameters, persistent buffers, and what else a module keeps."""
        for shards in self.session.shards:
            storage = DTYPE[shards.stages.storage]
            values = self._over_catalogue(shards, logical["param"], storage)
            model, stepped = shards.model, shards.stepped
            self.session.place_params(shards, values, self.owned(shards))
            if self.left:
                shards.stepped = np.where(self._has(shards, self.left), stepped, shards.stepped)
                if model is not None and shards.model is not None:
                    own = self.session.catalogue.belongs_to(self.left, shards.layout.element)
                    shards.model = np.where(own, model, shards.model)
        self.restore_buffers(content["common"]["buffers"])
        self.restore_opaque(content["common"]["opaque"])
        self.restore_weights(content["common"]["weights"])

    def restore_buffers(self, buffers: dict[str, Array]) -> None:
        """Persistent buffers, which every rank has whole; numbers in floating point in the dtypes of this build."""
        own = {buffer.fqn: buffer.dtype for buffer in self.session.of_build.buffers}
        for fqn, value in buffers.items():
            self.session.buffers[fqn] = value.astype(DTYPE[own[fqn]]) if own[fqn] in FLOAT_DTYPES else value.copy()

    def restore_optimizer(self, logical: Logical, common: Content) -> None:
        """Masters, moments and steps; whatever state existed before is gone."""
        session = self.session
        kept = {name: step for name, step in session.steps.items() if name in self.left}
        session.steps = kept | {
            session.state_owner(name): step for name, step in common["steps"].items() if name in session.catalogue.known
        }
        self.restore_masters(logical)
        for shards in session.shards:
            before = shards.moments
            shards.moments = {
                role: self._beside(shards, before.get(role), self._take_role(shards, role, logical))
                for role in session.moment_roles
                if role in logical or (kept and role in before)
            }
        if session.steps:
            session.settle(masters=True)
            session.settle(masters=False)

    def restore_masters(self, logical: Logical) -> None:
        """What the optimizer steps on, where it is not the model's parameters."""
        for shards in self.session.shards:
            if shards.stages.master is not None and "master" in logical:
                taken = self._take_role(shards, "master", logical)
                shards.stepped = self._beside(shards, shards.stepped, taken)

    def _beside(self, shards: Shards, before: Array | None, loaded: Array) -> Array:
        """The loaded values, with the earlier values kept for parameters that are missing in the checkpoint."""
        return loaded if before is None or not self.left else np.where(self._has(shards, self.left), before, loaded)

    def _has(self, shards: Shards, names: set[str]) -> Array:
        """A mask over the ranks' shards (S, m): True for elements of the named parameters."""
        own: Array = self.session.catalogue.belongs_to(names, shards.layout.shard_element)
        return own

    def _by_owner(self, tensors: dict[str, Array]) -> dict[str, Array]:
        """State by the parameter that the index map says a name's state belongs to."""
        return {self.session.state_owner(name): values for name, values in tensors.items()}

    def _take_role(self, shards: Shards, role: str, logical: Logical) -> Array:
        return self.take(shards, role, self._by_owner(logical.get(role, {})), self.session.working_dtype(shards, role))

    def take(self, shards: Shards, role: str, tensors: dict[str, Array], dtype: str) -> Array:
        """Each rank's elements of logical tensors of one role, (R, S, m) in `dtype`."""
        logical = self._over_catalogue(shards, tensors, DTYPE[dtype])
        return self.session.spread(logical[self.owned(shards)], per_shard=True)

    def owned(self, shards: Shards) -> Index:
        """The catalogue numbers of what each rank owns, (S, m)."""
        return shards.layout.shard_element

    def _over_catalogue(self, shards: Shards, tensors: dict[str, Array], dtype: np.dtype[Any]) -> Array:
        """Logical tensors of one storage dtype laid over the catalogue; zero where nothing was saved."""
        catalogue = self.session.catalogue
        logical = np.zeros(catalogue.padding + 1, dtype)
        for slot in shards.layout.slots:
            if slot.param.fqn in tensors:
                logical[catalogue.span(slot.param)] = tensors[slot.param.fqn]
        return logical

    def restore_opaque(self, opaque: Opaque) -> None:
        """The bytes that modules keep of their own, however many there are."""
        self.session.opaque = dict(opaque)

    def restore_weights(self, saved: dict[str, Kept]) -> None:
        """The weights that are kept in fp8, as they were written."""
        session = self.session
        for name, kept in saved.items():
            session.histories[name] = kept.history.copy()
            span = session.catalogue.span(session.model.param(name))
            for shards in session.shards:
                own = session.owns(name, shards)
                if shards.weights is None or not own.any():
                    continue
                for target, values in ((shards.weights.data, kept.data), (shards.weights.inverse, kept.inverse)):
                    logical = np.zeros(session.catalogue.padding + 1, values.dtype)
                    logical[span] = values
                    target[:, own] = logical[shards.layout.shard_element[own]]

    def restore_streams(self, saved: Streams) -> None:
        """The random generators' states: every rank takes that of its coordinate."""
        own = self.session
        for stream, states in own.streams.items():
            at = coordinates(stream, own.mesh, own.placement.expert_parallel)
            own.streams[stream] = handed_out(states, saved[stream], at)

    def place_state(self) -> None:
        """Move what was read from a file, which lies on the host, to the device that its parameter is stepped on."""
        self.session.places = dict.fromkeys(self.session.places, "device")

    # -- what is the same on every rank

    def restore_groups(self, groups: list[Content]) -> None:
        """Hyperparameters of every group."""
        keeps = self.session.inputs.run_keeps
        found = []
        for saved, own in zip(groups, self.session.groups, strict=True):
            kept = {name: getattr(own.hyper, name) for name in keeps if name not in ("schedule", "initial_lr")}
            hyper = replace(_as_own(saved["hyper"], own.hyper), **kept)
            peak = own.peak_lr if {"lr", "initial_lr"} & set(keeps) else saved["peak_lr"]
            whole = own.full_decay if "weight_decay" in keeps else saved["full_decay"]
            found.append(Group(hyper, own.names, peak, saved["cycle"], whole))
        self.session.groups = found

    def restore_schedule(self, common: Content) -> None:
        """Schedule and loss scaler."""
        if "schedule" not in self.session.inputs.run_keeps:
            self.session.schedule = common["schedule"]
        schedule = self.session.schedule
        if schedule is not None and "lr" in self.session.inputs.run_keeps:
            set_shares(schedule.name, schedule.epoch, self.session.groups, self.session.inputs.share)
        if common["scaler"] is not None:
            self.session.scaler = Scaler(*common["scaler"])
