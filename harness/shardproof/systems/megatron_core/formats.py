"""Megatron-Core's checkpoint formats: which there are, which release has which, and what each cannot do.

Data only, for the parent and the ranks alike; imports neither torch nor the library. The facts are those of
megatron/core/optimizer/distrib_optimizer.py, megatron/core/dist_checkpointing and megatron/training/checkpointing.py.
"""

from __future__ import annotations

from dataclasses import dataclass

LEGACY = ("dp_zero", "plain")
"""Formats of one file a model-parallel rank, written by torch.save; all others go through dist_checkpointing."""

CONSTANT = "constant_structure"


@dataclass(frozen=True)
class Format:
    """One checkpoint format.

    * doc: one line.
    * sharding: the value of the axis `sharding` that it serves.
    * switches: words that may follow its name, each after a `+`.
    * since: the first release that has it; empty where all do.
    * any_tp: whether a run of another tensor-parallel size may load it.
    """

    doc: str
    sharding: str
    switches: tuple[str, ...] = ()
    since: str = ""
    any_tp: bool = False


FORMATS: dict[str, Format] = {
    "dp_zero": Format(
        "torch.save of the model and of whole buffers gathered on data-parallel rank 0", "zero1", ("trusted",)
    ),
    "dp_zero_gather_scatter": Format(
        "the same buffers as one object of a distributed checkpoint", "zero1", ("async", "trusted", CONSTANT)
    ),
    "dp_reshardable": Format(
        "each bucket a flat tensor; other data-parallel sizes",
        "zero1",
        ("async", "fully_parallel", "trusted", CONSTANT),
        "0.15",
    ),
    "fully_reshardable": Format(
        "each state as a tensor of its parameter's shape; other sizes of anything",
        "zero1",
        ("async", "fully_parallel", "mem_efficient", "trusted", CONSTANT),
        since="0.15",
        any_tp=True,
    ),
    "fully_sharded_model_space": Format(
        "each state as flat ranges of its parameter; other sizes of anything",
        "zero1",
        ("async", "fully_parallel", "trusted", CONSTANT),
        any_tp=True,
    ),
    "fsdp_dtensor": Format("DTensors of Megatron FSDP", "zero1", any_tp=True),
    "sharded": Format(
        "each state as a tensor of its parameter's shape, by the optimizer without a distributed one",
        "replicate",
        ("async", "fully_parallel", "trusted", CONSTANT),
        any_tp=True,
    ),
    "plain": Format("torch.save of the model and of the optimizer's state dict", "replicate", ("trusted",)),
}
"""Format → what it is. The switches: async (write in a forked process, waited for), fully_parallel (data-parallel ranks
share the writing and reading; not for dp_zero_gather_scatter, whose object only rank 0 has), mem_efficient (gather on
one rank, over gloo), trusted (load with TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1, as users do where torch refuses what the
library saved), constant_structure (the script's --ckpt-assume-constant-structure: a session's later saves keep the
strategy and with it the plan of the first, and are not validated)."""


@dataclass(frozen=True)
class CheckpointPlan:
    """A checkpoint format and the switches that its text asks for."""

    form: str
    fully_parallel: bool = False
    asynchronous: bool = False
    mem_efficient: bool = False
    trusted: bool = False
    constant: bool = False

    @property
    def legacy(self) -> bool:
        """Whether it is files of torch.save, not a distributed checkpoint."""
        return self.form in LEGACY

    @property
    def sharding_type(self) -> str | None:
        """The form's name in `metadata['distrib_optim_sharding_type']`; None without a distributed optimizer."""
        return self.form if FORMATS[self.form].sharding == "zero1" else None


def checkpoint_plan(text: str) -> CheckpointPlan:
    """The plan that a scenario's `checkpoint` text names, which is one of `FORMATS`."""
    form, *switches = text.split("+")
    words = ("fully_parallel", "async", "mem_efficient", "trusted", CONSTANT)
    return CheckpointPlan(form, *(word in switches for word in words))
