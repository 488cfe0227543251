"""The content of the reference's checkpoints, in four formats, as plain data.

A checkpoint is a plain dict of numpy arrays, kept in memory:

* `gathered`: one full tensor for each parameter and moment, assembled on rank 0 (Megatron's dp_zero).
* `sharded`: for each rank, the boxes of logical tensors that it owns (DCP).
* `model_space`: for each rank, runs of the flattened logical tensors (Megatron's fully_sharded_model_space). A
  fused weight is filed as its sections.
* `bucket_space`: for each rank, its share of every bucket, padding included, with a table of what lies where
  (Megatron's dp_reshardable); `zero1` only. Parameters are filed as boxes.

`common` holds what is the same on every rank: the parameters' names, steps, groups, buffers, schedule and scaler; and
the states of random generators, which are not. Of replicas only the
first writes, of parameters that tensor parallelism replicates only its first coordinate. `restore` loads it,
`readback` reads it independently of both.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from shardproof.reference.extra_state import Opaque
from shardproof.reference.numerics import Array
from shardproof.reference.placement import Fragment, Piece, pieces, runs_of
from shardproof.reference.quantised import Kept
from shardproof.reference.sections import Section, sections
from shardproof.reference.state import Session, Shards, mesh_rank
from shardproof.reference.streams import Streams, collected, coordinates

Content = dict[str, Any]
Logical = dict[str, dict[str, Array]]
"""Role → name → the flattened logical tensor."""


class Saver:
    """Saves one session. Each public method is a seam for `faults.catalogue`."""

    def __init__(self, session: Session) -> None:
        self.session = session

    def save(self, form: str) -> Content:
        """The checkpoint of the session's state in one of the formats below."""
        content: Content = {"format": form, "common": self.common()}
        match form:
            case "gathered":
                content["full"] = self._full()
            case "sharded" | "model_space":
                content["ranks"] = self._ranks(self._entries(optimizer=True), form)
            case "bucket_space":
                content["ranks"] = self._ranks(self._entries(optimizer=False), "sharded")
                content["buckets"], content["table"] = self._buckets(), self._table()
            case other:
                raise ValueError(f"the reference has no checkpoint format {other!r}")
        return content

    def begin(self, form: str) -> Content:
        """The first half of an asynchronous save: a copy of everything, from which the second half writes."""
        return self.save(form)

    def finish(self, staged: Content) -> Content:
        """The second half of an asynchronous save: what it writes, whatever training has done in the meantime."""
        return staged

    def save_kept(self, kept: Content) -> Content:
        """What is written of a checkpoint that was kept in memory."""
        return kept

    def common(self) -> Content:
        """What is the same on every rank: names, steps, groups, persistent buffers, schedule and scaler; and the states
        of random generators."""
        session = self.session
        scaler = session.scaler
        return {
            "params": session.stored_names(),
            "steps": {name: session.steps[session.state_owner(name)] for name in self.with_state()},
            "groups": [
                {
                    "hyper": g.hyper,
                    "params": g.names,
                    "peak_lr": g.peak_lr,
                    "cycle": g.cycle,
                    "full_decay": g.full_decay,
                }
                for g in session.groups
            ],
            "buffers": self.persistent_buffers(),
            "opaque": self.opaque_bytes(),
            "streams": self.stream_states(),
            "weights": self.quantised_weights(),
            "schedule": session.schedule,
            "scaler": None if scaler is None else (scaler.scale, scaler.growth_tracker, scaler.hysteresis_tracker),
        }

    def persistent_buffers(self) -> dict[str, Array]:
        """The buffers that are written, each in its own dtype and shape."""
        return {fqn: self.session.buffers[fqn].copy() for fqn, b in self.session.model.buffers() if b.persistent}

    def with_state(self) -> list[str]:
        """The parameters that have optimizer state to save. A parameter that was never stepped has no state."""
        owner = self.session.state_owner
        return [p.fqn for p in self.session.catalogue.params if self.session.steps.get(owner(p.fqn))]

    def export(self, role: str, values: Array) -> Array:
        """The values of one role as a checkpoint stores them: their own dtype, untouched."""
        return values.copy()

    def optimizer_state(self, shards: Shards) -> dict[str, Array]:
        """Optimizer state by role as the first replica holds it, (S, m)."""
        arrays = {"master": shards.stepped[0]} if shards.stages.master else {}
        return arrays | {role: shards.moments[role][0] for role in shards.moments}

    def opaque_bytes(self) -> Opaque:
        """The bytes that modules keep of their own."""
        return dict(self.session.opaque)

    def quantised_weights(self) -> dict[str, Kept]:
        """The weights that are kept in fp8: bytes, inverse scales and histories."""
        session = self.session
        found: dict[str, Kept] = {}
        for name, history in session.histories.items():
            parts = [shards for shards in session.shards if shards.weights is not None]
            data, inverse = (
                self._logical(parts, [getattr(shards.weights, part)[0] for shards in parts])
                for part in ("data", "inverse")
            )
            span = session.catalogue.span(session.model.param(name))
            found[name] = Kept(self.staged(data[span]), self.staged(inverse[span]), history.copy())
        return found

    def staged(self, values: Array) -> Array:
        """A copy for the writer, so that training can go on while it writes."""
        return values.copy()

    def _logical(self, parts: list[Shards], values: list[Array]) -> Array:
        """What the ranks of a replica have of the parameters kept in fp8, over the catalogue."""
        logical = np.zeros(self.session.catalogue.padding + 1, values[0].dtype)
        for shards, own in zip(parts, values, strict=True):
            assert shards.weights is not None
            mask = shards.weights.mask
            logical[shards.layout.shard_element[mask]] = own[mask]
        return logical

    def stream_states(self) -> Streams:
        """The random generators' states, one for each coordinate of a stream."""
        own = self.session
        return {
            stream: collected(states, coordinates(stream, own.mesh, own.placement.expert_parallel))
            for stream, states in own.streams.items()
        }

    def parameters(self, shards: Shards) -> Array:
        """The parameters as the first replica holds them, (S, m) in storage dtype."""
        own: Array = shards.storage_shard[0]
        return own

    def assemble(self, shards: Shards, values: Array, logical: Array) -> None:
        """Put what the ranks of a replica own, (S, m), where it belongs in an array over the catalogue."""
        logical[shards.layout.shard_element] = values

    def _full(self) -> Logical:
        session, catalogue = self.session, self.session.catalogue
        by_storage: dict[tuple[str, str], Array] = {}
        for shards in session.shards:
            for role, values in {"param": self.parameters(shards), **self.optimizer_state(shards)}.items():
                key = (role, shards.stages.storage)
                if key not in by_storage:
                    by_storage[key] = np.zeros(catalogue.padding + 1, values.dtype)
                self.assemble(shards, self.export(role, values), by_storage[key])
        storage = {p.fqn: session.storage(p) for p in catalogue.params}
        with_state = set(self.with_state())
        full: Logical = {"param": {}}
        for param in session.model.params:
            owner = session.model.param(param.spec.tied_to or param.fqn)
            full["param"][param.fqn] = by_storage["param", storage[owner.fqn]][catalogue.span(owner)]
        for param in catalogue.params:
            owner = session.model.param(session.state_owner(param.fqn))
            for role in ("master", *(session.moment_roles if param.fqn in with_state else ())):
                if param.fqn in session.held and (role, storage[owner.fqn]) in by_storage:
                    values = by_storage[role, storage[owner.fqn]][catalogue.span(owner)]
                    full.setdefault(role, {})[param.fqn] = _same_size(values, param.spec.numel, param.fqn)
        return full

    def _entries(self, optimizer: bool) -> Iterator[tuple[int, str, str, Fragment, Array]]:
        """`(rank, role, name, fragment, values)` of everything the writing ranks own, parameters first."""
        session = self.session
        for shards in session.shards:
            flat = self.export("param", self.parameters(shards))
            for fragment in self.written_fragments(shards):
                rank = mesh_rank(session.mesh, 0, fragment.shard, shards.tp_index)
                values = flat[fragment.shard, fragment.at : fragment.at + fragment.numel]
                for name in session.catalogue.names[fragment.slot.param.fqn]:
                    yield rank, "param", name, fragment, values
        if optimizer:
            yield from self._state_entries()

    def _state_entries(self) -> Iterator[tuple[int, str, str, Fragment, Array]]:
        session = self.session
        home: dict[tuple[str, int, int], tuple[Shards, Fragment]] = {}
        for shards in session.shards:
            for fragment in shards.layout.fragments:
                home[fragment.slot.param.fqn, shards.tp_index, fragment.shard] = shards, fragment
        for shards in session.shards:
            for fragment in self.written_fragments(shards):
                name = fragment.slot.param.fqn
                rank = mesh_rank(session.mesh, 0, fragment.shard, shards.tp_index)
                source, own = home[session.state_owner(name), shards.tp_index, fragment.shard]
                stepped = session.steps.get(own.slot.param.fqn)
                for role, array in self.optimizer_state(source).items():
                    if stepped or (role == "master" and name in session.held):
                        values = self.export(role, array[own.shard, own.at : own.at + own.numel])
                        yield rank, role, name, fragment, _same_size(values, fragment.numel, name)

    def written_fragments(self, shards: Shards) -> Iterator[Fragment]:
        """The fragments of owned shards that go into the checkpoint. Of parameters replicated by tensor parallelism,
        only the first rank's copy is written."""
        for fragment in shards.layout.fragments:
            if shards.tp_index == 0 or fragment.slot.param.spec.tp_dim is not None:
                yield fragment

    def _ranks(self, entries: Iterator[tuple[int, str, str, Fragment, Array]], form: str) -> Content:
        """`{"rank_0": {role: {key: [{"start": …, "size": …, "data": …}]}}}`; keys are names or `name:section`."""
        ranks: Content = {}
        for rank, role, name, fragment, values in entries:
            filed = ranks.setdefault(self.file_of(rank), {}).setdefault(role, {})
            if form == "sharded":
                for piece in self.boxes(role, fragment):
                    data = values[piece.skip : piece.skip + piece.numel].reshape(piece.size)
                    filed.setdefault(name, []).append({"start": piece.start, "size": piece.size, "data": data})
                continue
            for first, begin, end in runs_of(self.session.catalogue, fragment):
                for key, start, low, high in self.sections(fragment, first, end - begin):
                    data = values[begin + low : begin + high]
                    filed.setdefault(key.replace(fragment.slot.param.fqn, name), []).append(
                        {"start": (start,), "size": (high - low,), "data": data}
                    )
        return ranks

    def file_of(self, rank: int) -> str:
        """The key under which a rank's shards are stored in the checkpoint, such as `rank_0`."""
        return f"rank_{rank}"

    def boxes(self, role: str, fragment: Fragment) -> list[Piece]:
        """A fragment as boxes of the logical tensor, in order: what a `sharded` checkpoint says of it."""
        return pieces(fragment, as_runs=False)

    def sections(self, fragment: Fragment, start: int, numel: int) -> Iterator[tuple[str, int, int, int]]:
        """Split a run of a fused weight: `(key, start within the section, from, to within the run)`."""
        fqn, found = fragment.slot.param.fqn, self.sections_of(fragment)
        if not found:
            yield fqn, start, 0, numel
        for section in found:
            begin, end = section.within(self.fused_numel(fragment))
            low, high = max(start, begin), min(start + numel, end)
            if low < high:
                yield f"{fqn}:{section.name}", low - begin, low - start, high - start

    def sections_of(self, fragment: Fragment) -> tuple[Section, ...]:
        """What a fused weight is taken apart into; empty where it is not fused."""
        return sections(fragment.slot.param)

    def fused_numel(self, fragment: Fragment) -> int:
        """Number of elements of a fused weight that its sections are shares of: the whole logical tensor's."""
        return fragment.slot.param.spec.numel

    def _buckets(self) -> Content:
        """`{"tp_0": {storage: {"bucket_0": {"rank_0": {role: share}}}}}`, shares with their padding."""
        written: Content = {}
        for shards in self.session.shards:
            buckets = written.setdefault(f"tp_{shards.tp_index}", {}).setdefault(shards.stages.storage, {})
            for number, bucket in enumerate(shards.layout.buckets):
                buckets[f"bucket_{number}"] = {
                    f"rank_{shard}": {
                        role: self.export(role, array[shard, bucket.at : bucket.at + bucket.share])
                        for role, array in self.optimizer_state(shards).items()
                    }
                    for shard in range(self.session.mesh.dp_shard)
                }
        return written

    def _table(self) -> Content:
        """What lies where: `[(name, bucket, offset in it, start, size)]` by tp coordinate and storage dtype."""
        table: Content = {}
        for shards in self.session.shards:
            table.setdefault(f"tp_{shards.tp_index}", {})[shards.stages.storage] = [
                (slot.param.fqn, number, slot.offset - bucket.start, slot.start, slot.size)
                for number, bucket in enumerate(shards.layout.buckets)
                for slot in bucket.slots
            ]
        return table


def _same_size(values: Array, numel: int, name: str) -> Array:
    if values.size != numel:
        raise ValueError(f"state of {name!r} has {values.size} elements where its parameter's shard has {numel}")
    return values
