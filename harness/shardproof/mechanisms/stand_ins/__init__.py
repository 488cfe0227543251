"""The modules that a script carries beside it for a machine without a GPU: text, from templates, for
`shardproof.export`.

They are smaller than the emulation that judges: one memory, and no record of what was touched. A script must not need
shardproof. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping

from shardproof.export.script import fill

HOME = "shardproof.mechanisms.stand_ins"
MODULE = "gpu_on_cpu"
FILE = f"{MODULE}.py"


def gpu_on_cpu(
    *,
    fused: bool = False,
    local_state: bool = False,
    extension: bool = False,
    precise: bool = False,
    offload: bool = False,
    random: bool = False,
    triton: bool = False,
) -> Mapping[str, str]:
    """File name → text of the module under which the CPU answers to the name of a GPU.

    Args:
        fused: with a plain FusedAdam under TransformerEngine's name. local_state: that one keeps the state of DTensors
            as plain local tensors. precise: it keeps its state in dtypes of its own, as Megatron-Core's precision-aware
            optimizer asks for. offload: what is made of a tensor on the host stays there. random: the GPU's random
            numbers are the CPU's. triton: Megatron-Core is imported with triton there by name, where it is not
            installed. extension: with TransformerEngine's own Python over a stand-in for its extension.
    """
    asked = {"fused": fused, "local_state": local_state, "extension": extension, "precise": precise}
    return {FILE: fill(HOME, f"{FILE}.j2", **asked, offload=offload, random=random, triton=triton)}
