"""The catalogue of logical faults: deliberate defects of the reference, each the mechanism of a real bug.

A fault names a scenario that exposes it. The canaries run every one of them in CI: a fault that goes
undetected fails the run. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from harness.faults import logical
from harness.scenario import Scenario

if TYPE_CHECKING:
    from harness.reference.system import Ranks

STAGES = ("compute", "accumulate", "reduce", "main_grad", "state")

_BASE = {"mesh": "1x2x1", "checkpoint": "sharded"}
_ZERO1 = {**_BASE, "sharding": "zero1", "checkpoint": "gathered"}
_MASTERS = {**_ZERO1, "dtype": "bf16/reduce=fp32/master=fp32"}
_MIXED = {**_ZERO1, "dtype": "mixed/reduce=fp32/master=fp32"}

_HALF = {**_BASE, "mesh": "1x4x1", "dtype": "bf16/reduce=fp32", "microbatches": "3"}


@dataclass(frozen=True)
class Fault:
    """One deliberate defect.

    * bug_ids: the public bugs whose mechanism it is, ids of the bug corpus; empty for the demotion canaries and for
      mistakes that only self-written training loops make.
    * doc: what goes wrong.
    * scenario_axes: axes of scenarios each of which exposes it, in text form.
    * install: plants it in the ranks of one build.
    """

    id: str
    bug_ids: tuple[str, ...]
    doc: str
    scenario_axes: tuple[Mapping[str, str], ...] = field(hash=False)
    install: Callable[[Ranks], None] = field(repr=False)


def _faults() -> tuple[Fault, ...]:
    return (*_order(), *_stale(), *_gradients(), *_counters(), *_checkpoints(), *_demotions())


def _order() -> tuple[Fault, ...]:
    return (
        Fault(
            "stale-index-map", ("MLM-2777", "MLM-5835a"),
            "the name → state map is built before fp32 parameters are moved first: equal shapes swap silently",
            ({**_MIXED, "model": "twins"}, {**_MIXED, "model": "twins", "checkpoint": "model_space"}),
            logical.stale_index_map,
        ),
        Fault(
            "ten-before-nine", ("DS-5342", "DS-5395"), "buckets are joined in text order on load: 10 before 9",
            ({**_ZERO1, "model": "many", "checkpoint": "bucket_space"},), logical.text_order,
        ),
        Fault(
            "left-to-right", ("PT-130760",),
            "FSDP shards of tensor-parallel shards are reassembled as if FSDP had split first",
            ({**_BASE, "mesh": "1x2x2", "model": "many", "checkpoint": "gathered"},), logical.left_to_right,
        ),
        Fault(
            "floor-chunks", ("PT-136228",), "uneven shards are cut with floor division on load",
            ({**_BASE, "mesh": "1x3x1"},), logical.floor_chunks,
        ),
        Fault(
            "padding-kept", ("MLM-5898", "MLM-2576"), "bucket padding counts in the data but not in the offsets",
            ({**_ZERO1, "mesh": "1x4x1", "load": "shrink", "checkpoint": "bucket_space"},), logical.padding_kept,
        ),
        Fault(
            "halves-of-local", ("MLM-4423",), "a fused gate/up weight is split at half of the local shard",
            ({**_ZERO1, "model": "swiglu", "checkpoint": "model_space"},), logical.halves_of_local,
        ),
    )  # fmt: skip


def _stale() -> tuple[Fault, ...]:
    return (
        Fault(
            "stale-host-copies", ("MBR-3949", "MLM-5071"),
            "after a model-only load the host copies keep the initial weights and overwrite the loaded ones",
            (
                {**_MASTERS, "offload": "cpu=0.5", "program": "model_only"},
                {**_MIXED, "offload": "cpu", "program": "model_only"},
            ),
            logical.stale_host_copies,
        ),
        Fault(
            "stale-host-copies-after-load", ("MLM-7449a",), "a full load does not reach the host copies",
            ({**_MASTERS, "offload": "cpu"},), logical.stale_host_copies_after_load,
        ),
        Fault(
            "stale-masters", ("DS-762",), "masters keep the initial weights after a model-only load",
            ({**_MASTERS, "program": "model_only"},), logical.stale_masters,
        ),
        Fault(
            "stale-buffer-binding", ("TT-1226",), "a buffer that steps rebind is saved as it was at the start",
            ({**_BASE, "model": "frozen_tower"},), logical.stale_buffer_binding,
        ),
        Fault(
            "tied-split", ("PT-188346",), "after a load tied names are separate tensors and drift apart",
            ({**_BASE, "model": "tied"}, {**_ZERO1, "model": "tied"}), logical.tied_split,
        ),
    )  # fmt: skip


def _gradients() -> tuple[Fault, ...]:
    return (
        Fault(
            "shard-group-only", ("AM-3135", "PT-102901"), "HSDP gradients are never reduced over the replicas",
            ({**_BASE, "mesh": "2x2x1"},), logical.shard_group_only,
        ),
        Fault(
            "overwritten-microbatch", ("DS-7981",), "the last microbatch overwrites the accumulated gradient",
            ({**_ZERO1, "microbatches": "2"},), logical.overwritten_microbatch,
        ),
        Fault(
            "late-microbatch", ("DS-7985",), "the last microbatch is added after the average over ranks",
            ({**_ZERO1, "microbatches": "2"},), logical.late_microbatch,
        ),
        Fault(
            "gradients-kept", ("MLM-6871",), "a step's gradient outlives it and enters the next step",
            (_BASE,), logical.gradients_kept,
        ),
        Fault(
            "overflow-per-rank", (), "each rank decides alone whether an overflowing step is skipped",
            ({**_BASE, "optimizer": "adamw/loss_scale=1024.0", "program": "overflow"},), logical.overflow_per_rank,
        ),
        Fault(
            "empty-last-tensor", ("TE-3207",), "a rank whose last tensor is empty drops its whole update",
            ({**_BASE, "mesh": "1x8x1"},), logical.empty_last_tensor,
        ),
    )  # fmt: skip


def _counters() -> tuple[Fault, ...]:
    return (
        Fault(
            "initialising-save", ("TT-4382", "PT-164929", "MLM-5976"), "saving before the first step leaves step = 1",
            ({**_BASE, "program": "save_first"},), logical.initialising_save,
        ),
        Fault(
            "shared-step", ("PT-96251",), "one step counter is incremented once for every parameter",
            (_BASE,), logical.shared_step,
        ),
        Fault(
            "step-of-empty-rank", ("TE-3318",), "the step saved is that of a rank whose part of the group is empty",
            ({**_BASE, "mesh": "1x4x1", "model": "short"},), logical.step_of_empty_rank,
        ),
        Fault(
            "groups-lost", ("MLM-mr3394", "FS-58"), "every group loads the hyperparameters of the first",
            ({**_BASE, "model": "groups"},), logical.groups_lost,
        ),
        Fault(
            "scaler-advanced", ("ACC-4289",), "the dummy step of a load advances the restored loss scaler",
            ({**_BASE, "optimizer": "adamw/loss_scale=1024.0"},), logical.scaler_advanced,
        ),
    )  # fmt: skip


def _checkpoints() -> tuple[Fault, ...]:
    return (
        Fault(
            "no-op-load", ("PT-140898",), "a load that loads nothing",
            (_BASE, {**_MASTERS, "checkpoint": "bucket_space"}), logical.no_op_load,
        ),
        Fault(
            "state-cast-on-load", ("FS-56", "TT-4615"), "loaded moments are cast to the parameter's dtype",
            (_MASTERS, {**_MASTERS, "checkpoint": "model_space"}), logical.state_cast_on_load,
        ),
        Fault(
            "frozen-state-dropped", ("PT-192202",), "a load drops the state of parameters frozen at that moment",
            ({**_BASE, "model": "later", "program": "build unfreeze step step save reshard build load unfreeze step"},),
            logical.frozen_state_dropped,
        ),
        Fault(
            "weights-demoted-on-save", ("TT-4166",), "weights are written in a narrower dtype than asked for",
            (_BASE,), logical.weights_demoted_on_save,
        ),
        Fault(
            "buffers-cast", ("FS-427",), "integer and boolean buffers are cast with the parameters",
            ({**_BASE, "model": "frozen_tower", "dtype": "bf16"},), logical.buffers_cast,
        ),
        Fault(
            "computed-buffers-rounded", ("AM-2549",), "non-persistent fp32 buffers are rounded with the parameters",
            ({**_BASE, "model": "frozen_tower", "dtype": "bf16"},), logical.computed_buffers_rounded,
        ),
    )  # fmt: skip


def _demotions() -> tuple[Fault, ...]:
    return tuple(
        Fault(
            f"demote-{stage}", (), f"values are rounded to bf16 at the {stage} stage, which declares fp32",
            ({**_ZERO1, "microbatches": "2"}, {**_BASE, "mesh": "2x2x1", "microbatches": "2"},
             *((_HALF,) if stage in ("accumulate", "reduce") else ())), logical.demote(stage),
        )
        for stage in STAGES
    )  # fmt: skip


CATALOGUE: dict[str, Fault] = {fault.id: fault for fault in _faults()}


def scenarios_of(fault: Fault) -> tuple[Scenario, ...]:
    """The scenarios that expose a fault, with the fault in them."""
    return tuple(Scenario.from_axes({**axes, "faults": fault.id}) for axes in fault.scenario_axes)
