"""Checkpoint formats of PyTorch's distributed checkpoints, as systems over FSDP2 write them. Values only, no torch.

A format is written as its name and the options of torch's StateDictOptions: `full+cpu_offload`, `dcp+flatten`. Some
options are not of those: with `combined`, model and optimizer are asked and given together, by get_state_dict and
set_state_dict; with `plan_caching`, saves have torch's DefaultSavePlanner(enable_plan_caching=True), which plans the
first of them and takes later ones to be like it; `in_shards` and `two_files` are those of `dcp-hf`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from shardproof.errors import UsageError

HUB = "dcp-hf"
"""The format whose models are files of safetensors."""

CACHING = "plan_caching"
"""The option under which torch keeps the plan of a save for the next one."""

FORMATS: dict[str, tuple[str, ...]] = {
    "dcp": ("cpu_offload", "no_strict", "flatten", "combined", "ignore_frozen", CACHING),
    "dcp-async": ("cpu_offload", "no_strict", "flatten", "combined", "ignore_frozen", CACHING),
    "dcp-stateful": ("cpu_offload", "no_strict", "flatten", "combined", "ignore_frozen"),
    "full": ("cpu_offload", "no_strict", "flatten", "broadcast_from_rank0", "combined", "ignore_frozen"),
    HUB: ("cpu_offload", "no_strict", "flatten", "in_shards", "two_files"),
}
"""Checkpoint format → the options that may follow it, each after a `+`.

dcp: sharded state dicts of get_model_state_dict and get_optimizer_state_dict through dcp.save and dcp.load.
dcp-async: the same through dcp.async_save, waited for. dcp-stateful: one Stateful application object, as the
DCP recipe has it. full: gathered state dicts in one file that rank 0 writes with torch.save. dcp-hf: the model's
state dict through torch's HuggingFaceStorageWriter, which joins the ranks' shards to the safetensors file that
`from_pretrained` reads, and the rest as with dcp; a load reads that file. `in_shards`: nothing is joined, and a load
reads the ranks' shards. `two_files`: the names are spread over two files, as those of large models are.
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
    in_shards: bool = False
    two_files: bool = False
    caching: bool = False


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
        in_shards="in_shards" in options,
        two_files="two_files" in options,
        caching=CACHING in options,
    )


def hub_folder(plan: CheckpointPlan, checkpoint: Path) -> Path:
    """Where a checkpoint of `dcp-hf` has the safetensors files that a load reads."""
    return checkpoint / "model" / "sharded" if plan.in_shards else checkpoint / "model"
