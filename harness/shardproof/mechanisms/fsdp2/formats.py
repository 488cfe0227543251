"""Checkpoint formats of PyTorch's distributed checkpoints, as systems over FSDP2 write them. Values only, no torch.

A format is written as its name and the options of torch's StateDictOptions: `full+cpu_offload`, `dcp+flatten`. One
option is not of those: with `combined`, model and optimizer are asked and given together, by get_state_dict and
set_state_dict.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardproof.errors import UsageError

FORMATS: dict[str, tuple[str, ...]] = {
    "dcp": ("cpu_offload", "no_strict", "flatten", "combined", "ignore_frozen"),
    "dcp-async": ("cpu_offload", "no_strict", "flatten", "combined", "ignore_frozen"),
    "dcp-stateful": ("cpu_offload", "no_strict", "flatten", "combined", "ignore_frozen"),
    "full": ("cpu_offload", "no_strict", "flatten", "broadcast_from_rank0", "combined", "ignore_frozen"),
}
"""Checkpoint format → the options that may follow it, each after a `+`.

dcp: sharded state dicts of get_model_state_dict and get_optimizer_state_dict through dcp.save and dcp.load.
dcp-async: the same through dcp.async_save, waited for. dcp-stateful: one Stateful application object, as the
DCP recipe has it. full: gathered state dicts in one file that rank 0 writes with torch.save.
"""


@dataclass(frozen=True)
class CheckpointPlan:
    """A checkpoint format and the StateDictOptions that its text asks for."""

    form: str
    cpu_offload: bool = False
    strict: bool = True
    flatten: bool = False
    broadcast_from_rank0: bool = False
    combined: bool = False
    ignore_frozen: bool = False


def checkpoint_plan(text: str) -> CheckpointPlan:
    """The plan that a scenario's `checkpoint` text names.

    Raises:
        UsageError: it is none of `FORMATS`.
    """
    form, *options = text.split("+")
    if form not in FORMATS or not set(options) <= set(FORMATS[form]):
        raise UsageError.of("checkpoint", text, FORMATS, "dcp+cpu_offload")
    return CheckpointPlan(
        form,
        cpu_offload="cpu_offload" in options,
        strict="no_strict" not in options,
        flatten="flatten" in options,
        broadcast_from_rank0="broadcast_from_rank0" in options,
        combined="combined" in options,
        ignore_frozen="ignore_frozen" in options,
    )
