"""NVIDIA Megatron-Core's optimizers and DistributedDataParallel, unmodified, on gloo and an emulated CUDA device.

Most of what it promises, refuses and stores is shared with other systems that drive Megatron and lies in
`shardproof.mechanisms.megatron`. Here is what only it has: its checkpoint formats, and its own Megatron-FSDP
(`options=fsdp_*`).
"""

from __future__ import annotations

from shardproof.protocol.system import System

SYSTEM = System(
    name="megatron-core",
    doc="Megatron-Core's DDP and optimizers, unmodified, on gloo and an emulated CUDA device",
    home=__name__,
    distributions=("megatron-core", "torch"),
    package="megatron-core",
    emulated=(
        "CUDA device",
        "apex and amp_C (impl=multi_tensor)",
        "TransformerEngine's FusedAdam (precision_aware)",
    ),
    warm_up="rank:warm_up",
    library="rank:library",
    variant_entry="accepts:variant",
    not_exercised_entry="accepts:not_exercised",
    models_entry="models:MODELS",
    layouts_entry="stored:LAYOUTS",
    export_entry="export:draft_script",
)
