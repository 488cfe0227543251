"""Megatron-Core's checkpoint formats: which there are, which release has which, and what each cannot do.

Data only, for the parent and the ranks alike; imports neither torch nor the library. The facts are those of
megatron/core/optimizer/distrib_optimizer.py, megatron/core/dist_checkpointing and megatron/training/checkpointing.py.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from harness.models import NamedParam, model_spec
from harness.program import operations
from harness.scenario import Scenario, load_mesh
from harness.systems.protocol import LibraryError, Limit

Release = tuple[int, int, int]

NEWEST: Release = (1 << 30, 0, 0)
"""Stands for a version that is no release number: a working tree, a commit, or the newest one declared."""

LEGACY = ("dp_zero", "plain")
"""Formats of one file a model-parallel rank, written by torch.save; all others go through dist_checkpointing."""


@dataclass(frozen=True)
class Format:
    """One checkpoint format.

    doc: one line. sharding: the scenario's `sharding` that it serves. switches: words that may follow its name, each
    after a `+`. since: the first release that has it. any_tp: whether another tensor-parallel size may load it.
    """

    doc: str
    sharding: str
    switches: tuple[str, ...] = ()
    since: Release = (0, 0, 0)
    any_tp: bool = False


FORMATS: dict[str, Format] = {
    "dp_zero": Format(
        "torch.save of the model and of whole buffers gathered on data-parallel rank 0", "zero1", ("trusted",)
    ),
    "dp_zero_gather_scatter": Format(
        "the same buffers as one object of a distributed checkpoint", "zero1", ("async", "trusted")
    ),
    "dp_reshardable": Format(
        "each bucket a flat tensor; other data-parallel sizes",
        "zero1",
        ("async", "fully_parallel", "trusted"),
        (0, 15, 0),
    ),
    "fully_reshardable": Format(
        "each state as a tensor of its parameter's shape; other sizes of anything",
        "zero1",
        ("async", "fully_parallel", "mem_efficient", "trusted"),
        since=(0, 15, 0),
        any_tp=True,
    ),
    "fully_sharded_model_space": Format(
        "each state as flat ranges of its parameter; other sizes of anything",
        "zero1",
        ("async", "fully_parallel", "trusted"),
        any_tp=True,
    ),
    "fsdp_dtensor": Format("DTensors of Megatron FSDP", "zero1", any_tp=True),
    "sharded": Format(
        "each state as a tensor of its parameter's shape, by the optimizer without a distributed one",
        "replicate",
        ("async", "fully_parallel", "trusted"),
        any_tp=True,
    ),
    "plain": Format("torch.save of the model and of the optimizer's state dict", "replicate", ("trusted",)),
}
"""Format → what it is. The switches: async (write in a forked process, waited for), fully_parallel (data-parallel ranks
share the writing and reading; not for dp_zero_gather_scatter, whose object only rank 0 has), mem_efficient (gather on
one rank, over gloo), trusted (load with TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1, as users do where torch refuses what the
library saved)."""


@dataclass(frozen=True)
class CheckpointPlan:
    """A checkpoint format and the switches that its text asks for."""

    form: str
    fully_parallel: bool = False
    asynchronous: bool = False
    mem_efficient: bool = False
    trusted: bool = False

    @property
    def legacy(self) -> bool:
        """Whether it is files of torch.save, not a distributed checkpoint."""
        return self.form in LEGACY

    @property
    def sharding_type(self) -> str | None:
        """The form's name in `metadata['distrib_optim_sharding_type']`; None without a distributed optimizer."""
        return self.form if FORMATS[self.form].sharding == "zero1" else None


def checkpoint_plan(text: str) -> CheckpointPlan | None:
    """The plan that a scenario's `checkpoint` text names; None where this system does not know it."""
    form, *switches = text.split("+")
    if form not in FORMATS or not set(switches) <= set(FORMATS[form].switches) or sorted(set(switches)) != switches:
        return None
    words = ("fully_parallel", "async", "mem_efficient", "trusted")
    return CheckpointPlan(form, *(word in switches for word in words))


def release_of(version: str) -> Release:
    """The release that a scenario's `version` names; `NEWEST` for anything that is no release number."""
    match = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", version)
    return (int(match[1]), int(match[2]), int(match[3] or 0)) if match else NEWEST


def _format(scenario: Scenario) -> Format | None:
    plan = checkpoint_plan(scenario.checkpoint)
    return FORMATS[plan.form] if plan else None


def _saves(scenario: Scenario) -> bool:
    return "save" in operations(scenario.program)


def _of_other_sharding(scenario: Scenario) -> bool:
    found = _format(scenario)
    return found is not None and found.sharding != scenario.sharding


def _before_it_existed(scenario: Scenario) -> bool:
    found = _format(scenario)
    return found is not None and release_of(scenario.version) < found.since and _saves(scenario)


def _fsdp(scenario: Scenario) -> bool:
    return scenario.checkpoint == "fsdp_dtensor" and _saves(scenario)


def under_fsdp(scenario: Scenario) -> bool:
    """Whether the model is sharded by Megatron-FSDP, not by DDP."""
    return any(word.startswith("fsdp_") for word in scenario.options)


def _params(scenario: Scenario) -> tuple[NamedParam, ...]:
    return model_spec(scenario.model).params


def _tp_changes(scenario: Scenario) -> bool:
    target = load_mesh(scenario)
    return target is not None and target.tp != scenario.mesh.tp


def _loads_what_other_tp_wrote(scenario: Scenario) -> bool:
    """Whether a load needs what lies by tensor-parallel rank: optimizer state, or anything of a file of torch.save."""
    found, target, words = _format(scenario), load_mesh(scenario), set(operations(scenario.program))
    if found is None or found.any_tp or target is None or target.tp == scenario.mesh.tp:
        return False
    by_rank = {"load", "load_model_only"} if scenario.checkpoint.partition("+")[0] in LEGACY else {"load"}
    return bool({"reshard", "restart"} & words) and bool(by_rank & words)


LIMITS: tuple[Limit, ...] = (
    Limit(
        "checkpoint",
        lambda s: checkpoint_plan(s.checkpoint) is None,
        "megatron-core has these checkpoint formats: "
        + ", ".join("".join([name, *(f"[+{o}]" for o in form.switches)]) for name, form in FORMATS.items()),
    ),
    Limit(
        "checkpoint-sharding",
        _of_other_sharding,
        "a checkpoint format serves either the distributed optimizer (sharding=zero1) or the one without "
        "(sharding=replicate: " + ", ".join(n for n, f in FORMATS.items() if f.sharding == "replicate") + ")",
    ),
    Limit(
        "fsdp-checkpoint",
        lambda s: under_fsdp(s) and s.checkpoint != "fsdp_dtensor" and _saves(s),
        "under Megatron-FSDP the only checkpoint format is fsdp_dtensor",
        "megatron/training/arguments.py, validate_args",
    ),
    Limit(
        "checkpoint-sections",
        lambda s: _fsdp(s) and _tp_changes(s) and any(p.spec.sections and p.spec.tp_dim == 0 for p in _params(s)),
        "where tensor parallelism gives each rank a share of every section, the zoo's parameter lies in the order of "
        "one such size",
    ),
    Limit(
        "checkpoint-fsdp",
        lambda s: _fsdp(s) and release_of(s.version) >= (0, 14, 0) and not under_fsdp(s),
        "fsdp_dtensor is for Megatron FSDP, not for DistributedDataParallel",
        "megatron/core/optimizer/distrib_optimizer.py, sharded_param_state_fsdp_dtensor",
        LibraryError("AssertionError", "fsdp_dtensor sharding type is only supported with Megatron FSDP", "save"),
    ),
    Limit(
        "checkpoint-fsdp-013",
        lambda s: _fsdp(s) and release_of(s.version) < (0, 14, 0),
        "fsdp_dtensor came with 0.14",
        "megatron/core/optimizer/distrib_optimizer.py, sharded_state_dict",
        LibraryError("NotImplementedError", "Unknown sharding_type", "save"),
    ),
    Limit(
        "checkpoint-since",
        _before_it_existed,
        "dp_reshardable and fully_reshardable came with 0.15",
        "megatron/core/optimizer/distrib_optimizer.py, sharded_state_dict",
        LibraryError("NotImplementedError", "Unknown sharding_type", "save"),
    ),
    Limit(
        "checkpoint-tp-legacy",
        _loads_what_other_tp_wrote,
        "a format that follows the buffers, or has a file a tensor-parallel rank, loads at the same such size only",
        "megatron/training/checkpointing.py, load_checkpoint: (TP, PP) mismatch after resume",
    ),
)  # fmt: skip
"""What the formats cannot do, in the form of a system's `limits`."""
