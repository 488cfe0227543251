"""Faults of dtypes and buffers: a value stored, computed or loaded in the wrong dtype, or a buffer taken for a
parameter.

Each replaces seams of the reference by a mistake that a library made (`shardproof.faults.logical` has the tools).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from shardproof.faults.logical import override, to_bf16

if TYPE_CHECKING:
    from shardproof.oracle.inputs import Buffer
    from shardproof.reference.checkpoint import Content, Logical
    from shardproof.reference.kernels import Hyper
    from shardproof.reference.numerics import Array
    from shardproof.reference.state import Shards
    from shardproof.reference.system import Ranks


def _store_narrow(ranks: Ranks) -> None:
    """Keep parameters that are computed in bf16 in bf16."""
    for shards in ranks.session.shards:
        if shards.stages.compute == "bf16":
            shards.stepped = to_bf16(shards.stepped)


def storage_undone_by_a_load(ranks: Ranks) -> None:
    """Cast parameters back to the narrow dtype after a load, although fp32 storage was asked for."""

    def restore_model(logical: Logical, content: Content) -> None:
        original(logical, content)
        _store_narrow(ranks)

    original = override(ranks.loader, "restore_model", restore_model)


def upcast_of_a_loop_variable(ranks: Ranks) -> None:
    """Upcast the loop's variable instead of the parameter: the model stays narrow."""

    def build() -> None:
        original()
        _store_narrow(ranks)

    original = override(ranks.session, "build", build)


def pinned_in_the_bulk_dtype(ranks: Ranks) -> None:
    """Compute with one dtype for a whole model, also where parameters are pinned to fp32."""

    def forward() -> None:
        original()
        if any(shards.stages.compute == "bf16" for shards in ranks.session.shards):
            for shards in ranks.session.shards:
                assert shards.computed is not None
                shards.computed = to_bf16(shards.computed)

    original = override(ranks.trainer, "forward", forward)


def frozen_not_cast(ranks: Ranks) -> None:
    """Leave frozen modules out of the mixed-precision policy: the next module is handed activations of fp32."""

    def forward() -> None:
        original()
        for parameter in ranks.session.of_build.parameters:
            stages = parameter.stages
            if parameter.trainable == "no" and stages.compute != stages.storage:
                raise TypeError(f"{parameter.fqn} gives {stages.storage}, and {stages.compute} is multiplied with it")

    original = override(ranks.trainer, "forward", forward)


def mixed_unit_after_a_load(ranks: Ranks) -> None:
    """Cast each loaded tensor to its own dtype in the file: a unit with two of them is refused."""
    loaded: list[Content] = []

    def load(content: Content) -> None:
        original_load(content)
        loaded.append(content)

    def forward() -> None:
        kinds: dict[str, set[bool]] = {}
        for param in ranks.session.catalogue.params:
            kinds.setdefault(param.module.path, set()).add(param.spec.island)
        mixed = [path for path, islands in kinds.items() if len(islands) > 1]
        if loaded and mixed:
            raise ValueError(f"all parameters of a unit must have one dtype; those of {mixed[0]} have fp32 and bf16")
        original_forward()

    original_load = override(ranks.loader, "load", load)
    original_forward = override(ranks.trainer, "forward", forward)


def sent_before_the_upcast(ranks: Ranks) -> None:
    """Send weights as they were before an upcast to ranks that receive them after it."""

    def restore_model(logical: Logical, content: Content) -> None:
        for values in logical["param"].values():
            received = np.empty_like(values)
            received[...] = np.frombuffer(to_bf16(values).tobytes(), received.dtype)
        original(logical, content)

    original = override(ranks.loader, "restore_model", restore_model)


def late_joiner_unlike_the_others(ranks: Ranks) -> None:
    """Keep accumulated gradients in the dtype of reductions, and a first one that comes late in the parameter's: what
    is reduced together has two."""

    def synchronise() -> None:
        for param in ranks.session.with_gradient if ranks.session.inputs.microbatches > 1 else ():
            stages = ranks.session.parameter(param.fqn).stages
            if param.spec.idle == "first" and stages.compute != stages.reduce:
                raise TypeError(f"gradients of one dtype are reduced; {param.fqn} brings {stages.compute}")
        original()

    original = override(ranks.trainer, "synchronise", synchronise)


def offload_forces_fp32_state(ranks: Ranks) -> None:
    """Keep the moments of an offloading optimizer in fp32, whatever dtype they were asked for in."""

    def update_cohort(shards: Shards, hyper: Hyper, step: int, names: frozenset[str]) -> None:
        original(shards, hyper, step, names)
        if shards.offloaded is not None:
            shards.moments = {role: values.astype(np.float32) for role, values in shards.moments.items()}

    original = override(ranks.trainer, "update_cohort", update_cohort)


def template_in_fp32(ranks: Ranks) -> None:
    """Load moments into a template of fp32, whatever dtype they have."""

    def take(shards: Shards, role: str, tensors: dict[str, Array], dtype: str) -> Array:
        values: Array = original(shards, role, tensors, dtype if role == "master" else "fp32")
        return values

    original = override(ranks.loader, "take", take)


def pinned_buffers_cast(ranks: Ranks) -> None:
    """Cast buffers that must stay fp32 when the model is cast to half precision."""

    def initial_buffer(buffer: Buffer) -> Array:
        values: Array = original(buffer)
        return to_bf16(values) if buffer.persistent and values.dtype == np.float32 else values

    original = override(ranks.session, "initial_buffer", initial_buffer)


def buffers_saved_narrow(ranks: Ranks) -> None:
    """Upcast only the last buffer for a save: the others are written as they were computed with."""

    def persistent_buffers() -> dict[str, Array]:
        *others, last = original().items()
        narrow = {fqn: to_bf16(values) if values.dtype == np.float32 else values for fqn, values in others}
        return {**narrow, last[0]: last[1]}

    original = override(ranks.saver, "persistent_buffers", persistent_buffers)


def counter_in_a_float(ranks: Ranks) -> None:
    """Restore an integer counter into a template of fp32."""

    def restore_buffers(buffers: dict[str, Array]) -> None:
        original({fqn: v.astype(np.float32) if v.dtype == np.int64 else v for fqn, v in buffers.items()})

    original = override(ranks.loader, "restore_buffers", restore_buffers)


def counting_stops_early(ranks: Ranks) -> None:
    """Return from the loop over layers at the first that has nothing to count, instead of going on."""
    session = ranks.session

    def count_forwards() -> None:
        for buffer in session.of_build.buffers:
            if buffer.dtype != "int64":
                return
            session.buffers[buffer.fqn] = session.buffers[buffer.fqn] + 1

    override(ranks.trainer, "count_forwards", count_forwards)


def whole_buffers_cut(ranks: Ranks) -> None:
    """Take every entry of a checkpoint for a sharded tensor, buffers too."""

    def restore_buffers(buffers: dict[str, Array]) -> None:
        parts = ranks.session.mesh.dp_shard
        original({fqn: values[: -(-values.shape[0] // parts)] for fqn, values in buffers.items()})

    original = override(ranks.loader, "restore_buffers", restore_buffers)
