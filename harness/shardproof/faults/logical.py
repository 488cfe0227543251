"""The mutations behind the catalogue of logical faults: each replaces one method of the reference by a mistake that a
library really made.

An installer receives the ranks of one build before they build. Seams are public methods of `Session`, `Trainer`,
`Saver`, `Loader` and `Observer`; replacing one that does not exist is an error, so that a renamed seam cannot turn
a fault into a no-op. Imports no torch, and numpy where a mutation runs: the catalogue is listed where nothing is run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import prod
from typing import TYPE_CHECKING, Any

from shardproof.observe.record import every_rank
from shardproof.oracle.inputs import Buffer, Operation

if TYPE_CHECKING:
    from shardproof.observe.record import Record
    from shardproof.reference.checkpoint import Content, Logical
    from shardproof.reference.kernels import Hyper
    from shardproof.reference.numerics import Array
    from shardproof.reference.placement import Fragment, Index
    from shardproof.reference.state import Shards
    from shardproof.reference.system import Ranks


def override(target: object, seam: str, replacement: Callable[..., Any]) -> Any:
    """Replace a method of one object; returns the original, bound.

    Raises:
        AttributeError: the object has no such method.
    """
    original = getattr(target, seam)
    setattr(target, seam, replacement)
    return original


def nothing(*_: object) -> None:
    """Stands in for a seam that is left out."""


def to_bf16(values: Array) -> Array:
    """Values rounded to bf16."""
    import ml_dtypes

    return values.astype(ml_dtypes.bfloat16)


def through_bf16(values: Array) -> Array:
    """Values rounded to bf16 and widened again."""
    return to_bf16(values).astype(values.dtype)


# -- index maps and order


def stale_index_map(ranks: Ranks) -> None:
    """Build the map from the groups' own order, before fp32 parameters are installed first."""
    session = ranks.session
    override(
        session,
        "build_index_map",
        lambda: {
            name: (index, position)
            for index, group in enumerate(session.groups)
            for position, name in enumerate(group.names)
        },
    )


def text_order(ranks: Ranks) -> None:
    """Join buckets in the order of their names as text: 10 before 9."""
    override(ranks.loader, "in_order", sorted)


def left_to_right(ranks: Ranks) -> None:
    """Assemble dim-0 shards as if data parallelism had split first and tensor parallelism inside."""
    mesh = ranks.session.mesh

    def assemble(shards: Shards, values: Array, logical: Array) -> None:
        original(shards, values, logical)
        for fragment in shards.layout.fragments:
            spec = fragment.slot.param.spec
            if spec.tp_dim == 0 and spec.shape[0] % (mesh.dp_shard * mesh.tp) == 0:
                begin = ranks.session.catalogue.offset[fragment.slot.param.fqn]
                begin += (fragment.shard * mesh.tp + shards.tp_index) * fragment.numel
                own = values[fragment.shard, fragment.at : fragment.at + fragment.numel]
                logical[begin : begin + fragment.numel] = own

    original = override(ranks.saver, "assemble", assemble)


def floor_chunks(ranks: Ranks) -> None:
    """On load, let a rank's rows begin at its index times rows // ranks, not at the rounded-up quotient."""

    def owned(shards: Shards) -> Index:
        elements: Index = original(shards).copy()
        for fragment in shards.layout.fragments:
            rows, ranks_ = fragment.slot.size[0], shards.layout.order.shape[0]
            shift = (-(-rows // ranks_) - rows // ranks_) * fragment.shard * prod(fragment.slot.size[1:])
            elements[fragment.shard, fragment.at : fragment.at + fragment.numel] -= shift
        return elements

    original = override(ranks.loader, "owned", owned)


def padding_kept(ranks: Ranks) -> None:
    """Load buckets with their padding, although the table of offsets counts without it."""
    override(ranks.loader, "unpad", lambda bucket, table, number: bucket)


def halves_of_local(ranks: Ranks) -> None:
    """Split a fused weight at half of the local shard's elements, in global coordinates."""

    def fused_numel(fragment: Fragment) -> int:
        return fragment.numel

    override(ranks.saver, "fused_numel", fused_numel)


# -- stale copies


def stale_host_copies(ranks: Ranks) -> None:
    """Refresh masters after a model-only load, but not the host copies the optimizer steps on."""
    session = ranks.session

    def reload_params() -> None:
        for shards in session.shards:
            session.refresh_masters(shards)

    override(session, "reload_params", reload_params)


def stale_host_copies_after_load(ranks: Ranks) -> None:
    """Restore everything but the host copies."""

    def load(content: Content) -> None:
        held = [shards.host for shards in ranks.session.shards]
        original(content)
        for shards, host in zip(ranks.session.shards, held, strict=True):
            shards.host = host

    original = override(ranks.loader, "load", load)


def stale_masters(ranks: Ranks) -> None:
    """Leave the masters as they were before the weights were loaded."""
    override(ranks.session, "reload_params", nothing)


def stale_buffer_binding(ranks: Ranks) -> None:
    """Save the buffer objects that existed at the start, although steps bind new ones."""
    held: dict[str, Array] = {}

    def build() -> None:
        original()
        held.update({fqn: ranks.session.buffers[fqn] for fqn, b in ranks.session.model.buffers() if b.persistent})

    original = override(ranks.session, "build", build)
    override(ranks.saver, "persistent_buffers", lambda: {fqn: value.copy() for fqn, value in held.items()})


def tied_split(ranks: Ranks) -> None:
    """After a load every name has a tensor of its own; the optimizer updates the first one only."""
    detached: dict[tuple[int, str], Record] = {}

    def load(content: Content) -> None:
        original_load(content)
        detached.clear()
        for record in every_rank(original_observe(now)):
            if record.role == "param" and ranks.session.model.param(record.fqn).spec.tied_to:
                detached[record.rank, record.fqn] = record

    def observe(op: Operation) -> Iterable[Record]:
        for record in every_rank(original_observe(op)):
            own = detached.get((record.rank, record.fqn)) if record.role == "param" else None
            yield own._replace(op=op.index) if own else record

    now = Operation(0, "load", 0, 0, 0)
    original_load = override(ranks.loader, "load", load)
    original_observe = override(ranks.observer, "observe", observe)


# -- gradients


def shard_group_only(ranks: Ranks) -> None:
    """Average over the shard group, never over the replicas."""

    def all_reduce(scattered: Array) -> Array:
        own: Array = scattered * scattered.dtype.type(len(scattered))
        return own

    override(ranks.trainer, "all_reduce", all_reduce)


def overwritten_microbatch(ranks: Ranks) -> None:
    """Copy a microbatch's gradient into the buffer instead of adding it."""

    def accumulate(shards: Shards, gradient: Array) -> None:
        shards.accumulated = None
        original(shards, gradient)

    original = override(ranks.trainer, "accumulate", accumulate)


def late_microbatch(ranks: Ranks) -> None:
    """Add the last microbatch after the average over ranks: each rank keeps its own."""
    trainer, last = ranks.trainer, ranks.session.inputs.microbatches - 1

    def backward(op: Operation, microbatch: int, scale: float) -> None:
        if microbatch < last:
            original(op, microbatch, scale)
            return
        early = [shards.accumulated for shards in ranks.session.shards]
        for shards in ranks.session.shards:
            shards.accumulated = None
        original(op, microbatch, scale)
        late.clear()
        for shards, kept in zip(ranks.session.shards, early, strict=True):
            late.append(shards.accumulated)
            shards.accumulated = kept

    def synchronise() -> None:
        original_synchronise()
        import numpy as np

        index = np.arange(ranks.session.mesh.dp_shard)[:, None]
        for shards, own in zip(ranks.session.shards, late, strict=True):
            assert own is not None
            assert shards.reduced is not None
            shards.reduced = shards.reduced + own[:, index, shards.layout.order].astype(shards.reduced.dtype)

    late: list[Array | None] = []
    original = override(trainer, "backward", backward)
    original_synchronise = override(trainer, "synchronise", synchronise)


def gradients_kept(ranks: Ranks) -> None:
    """Never forget the gradients of earlier steps."""
    override(ranks.trainer, "zero_grads", nothing)


def overflow_per_rank(ranks: Ranks) -> None:
    """Skip an overflowing step only on the ranks that saw the overflow."""
    flags: list[Array] = []

    def should_skip(overflowed: list[Array]) -> bool:
        flags[:] = overflowed
        return False

    def update() -> None:
        before = [(s.stepped.copy(), {k: v.copy() for k, v in s.moments.items()}) for s in ranks.session.shards]
        original()
        for shards, (stepped, moments), skipped in zip(ranks.session.shards, before, flags, strict=False):
            shards.stepped[skipped] = stepped[skipped]
            for role, values in moments.items():
                shards.moments[role][skipped] = values[skipped]

    override(ranks.trainer, "should_skip", should_skip)
    original = override(ranks.trainer, "update", update)


def empty_last_tensor(ranks: Ranks) -> None:
    """Drop a rank's update where the last tensor of its list has no elements there."""

    def update_cohort(shards: Shards, hyper: Hyper, step: int, names: frozenset[str]) -> None:
        before = shards.stepped.copy()
        original(shards, hyper, step, names)
        members = [slot.param.fqn for slot in shards.layout.slots if slot.param.fqn in names]
        owners = {f.shard for f in shards.layout.fragments if members and f.slot.param.fqn == members[-1]}
        for shard in set(range(before.shape[1])) - owners:
            shards.stepped[:, shard] = before[:, shard]

    original = override(ranks.trainer, "update_cohort", update_cohort)


# -- counters and groups


def initialising_save(ranks: Ranks) -> None:
    """Create missing optimizer state for a save by a dummy step that leaves its count behind."""

    def save(form: str) -> Content:
        import numpy as np

        session = ranks.session
        for param in session.with_gradient:
            session.steps.setdefault(param.fqn, 1)
        for shards in session.shards:
            for role in ("exp_avg", "exp_avg_sq"):
                shards.moments.setdefault(role, np.zeros_like(shards.stepped))
        content: Content = original(form)
        return content

    original = override(ranks.saver, "save", save)


def shared_step(ranks: Ranks) -> None:
    """One step counter for a whole group: every parameter's increment counts for all."""

    def update() -> None:
        original()
        for group in ranks.session.groups:
            members = [name for name in group.names if name in ranks.session.steps]
            total = sum(ranks.session.steps[name] for name in members)
            ranks.session.steps.update(dict.fromkeys(members, total))

    original = override(ranks.trainer, "update", update)


def step_of_empty_rank(ranks: Ranks) -> None:
    """Save the counter of the last rank, which stands still where a rank's part of the group is empty."""

    def common() -> Content:
        content: Content = original()
        session = ranks.session
        owned = {
            fragment.slot.param.fqn
            for shards in session.shards
            for fragment in shards.layout.fragments
            if fragment.shard == session.mesh.dp_shard - 1
        }
        for group in session.groups:
            if not owned & set(group.names):
                content["steps"].update({name: 1 for name in group.names if name in content["steps"]})
        return content

    original = override(ranks.saver, "common", common)


def groups_lost(ranks: Ranks) -> None:
    """Give every group the hyperparameters saved for the first."""
    original = override(ranks.loader, "restore_groups", lambda groups: original([groups[0]] * len(groups)))


def scaler_advanced(ranks: Ranks) -> None:
    """Let the dummy step of a load run the loss scaler that was just restored."""

    def restore_schedule(common: Content) -> None:
        original(common)
        ranks.trainer.update_scale(False)

    original = override(ranks.loader, "restore_schedule", restore_schedule)


# -- load and save


def no_op_load(ranks: Ranks) -> None:
    """Load into an empty template: nothing arrives, nothing complains."""
    override(ranks.loader, "load", nothing)


def state_cast_on_load(ranks: Ranks) -> None:
    """Cast loaded optimizer state to the dtype of its parameter."""

    def take(shards: Shards, role: str, tensors: dict[str, Array], dtype: str) -> Array:
        values: Array = original(shards, role, tensors, dtype)
        return values if role == "master" else values.astype(shards.storage_shard.dtype).astype(values.dtype)

    original = override(ranks.loader, "take", take)


def frozen_state_dropped(ranks: Ranks) -> None:
    """Drop the saved state of parameters that do not require a gradient at the moment of the load."""

    def restore_optimizer(logical: Logical, common: Content) -> None:
        kept = {name: step for name, step in common["steps"].items() if name in ranks.session.trainable}
        original(logical, {**common, "steps": kept})

    original = override(ranks.loader, "restore_optimizer", restore_optimizer)


def weights_demoted_on_save(ranks: Ranks) -> None:
    """Write weights in bf16 while the checkpoint says otherwise."""

    def export(role: str, values: Array) -> Array:
        return through_bf16(values) if role == "param" else values.copy()

    override(ranks.saver, "export", export)


def buffers_cast(ranks: Ranks) -> None:
    """Cast every buffer, counters too, to bf16 with the parameters."""
    original = override(ranks.session, "initial_buffer", lambda buffer: to_bf16(original(buffer)))


def computed_buffers_rounded(ranks: Ranks) -> None:
    """Round non-persistent floating buffers when the model is cast, and cast them back too late."""

    def initial_buffer(buffer: Buffer) -> Array:
        values: Array = original(buffer)
        return values if buffer.persistent or values.dtype.name != "float32" else through_bf16(values)

    original = override(ranks.session, "initial_buffer", initial_buffer)


def demote(stage: str) -> Callable[[Ranks], None]:
    """An installer that rounds values at one stage to bf16, in a reduction every partial sum, whatever that stage's
    contract declares."""

    def install(ranks: Ranks) -> None:
        def cast_to_stage(at: str, values: Array, dtype: str) -> Array:
            kept: Array = original(at, values, dtype)
            return through_bf16(kept) if at == stage else kept

        def reduce_scatter(gradients: Array) -> Array:
            summed: Array = through_bf16(gradients[:, 0])
            for shard in range(1, gradients.shape[1]):
                summed = through_bf16(summed + gradients[:, shard])
            return summed

        original = override(ranks.trainer, "cast_to_stage", cast_to_stage)
        if stage == "reduce":
            override(ranks.trainer, "reduce_scatter", reduce_scatter)

    return install
