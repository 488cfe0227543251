"""FSDP2's `fully_shard` over the units of a probe model, with the policies that a scenario asks for. Rank side."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from shardproof.mechanisms.probe_module import TORCH_DTYPE
from shardproof.protocol.system import RankContext
from shardproof.scenario import Scenario


def fully_shard_units(
    root: nn.Module, context: RankContext, mesh: DeviceMesh, ignored: AbstractSet[nn.Parameter] = frozenset()
) -> None:
    """Shard every module that its spec calls a unit, the innermost first, and the root with what is left; ignored
    parameters stay as they are.

    Where some ranks leave a parameter out, FSDP2 is told that such a one is reduced with zeros. Releases that cannot be
    told wait for ever there (pytorch/pytorch#158719), and do so here.
    """
    names = ("dp_replicate", "dp_shard") if context.mesh.dp_replicate > 1 else ("dp_shard",)
    options = {"mesh": mesh[names], **_policies(context.scenario)}
    if ignored:
        options["ignored_params"] = set(ignored)
    units = sorted((m for m in context.model.modules if m.unit), key=lambda m: -m.path.count("."))
    for module in units:
        fully_shard(root.get_submodule(module.path), **options)
    whole = fully_shard(root, **options)
    fill_in = getattr(whole, "set_reduce_scatter_unused_params", None)
    if fill_in and any(p.spec.idle == "others" for p in context.model.params):
        fill_in(True)


def _policies(scenario: Scenario) -> dict[str, Any]:
    """fully_shard's arguments besides the mesh."""
    dtype, after = scenario.dtype, scenario.reshard_after_forward
    param, reduce, output = (TORCH_DTYPE[d] if d else None for d in (dtype.param, dtype.reduce, dtype.output))
    words: dict[str, bool | None] = {"true": True, "false": False, "none": None}
    pinned = scenario.device == "cuda"  # pinning needs an accelerator
    offload: OffloadPolicy = CPUOffloadPolicy(pin_memory=pinned) if scenario.offload.fraction else OffloadPolicy()
    return {
        "mp_policy": MixedPrecisionPolicy(param_dtype=param, reduce_dtype=reduce, output_dtype=output),
        "reshard_after_forward": words[after] if after in words else int(after),
        "offload_policy": offload,
    }
