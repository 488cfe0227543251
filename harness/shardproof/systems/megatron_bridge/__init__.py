"""NeMo Megatron-Bridge's finetuning load over Megatron-Core's optimizers.

Model, DDP, optimizer and step are Megatron-Core's. Bridge's own code writes the pretrained checkpoint
(`save_checkpoint`) and reads it (`load_checkpoint` with `pretrained_checkpoint`, the path that finetuning takes), which
refreshes the optimizer's masters itself. docs/megatron-bridge.md says what else of the package runs here, and where it
stops.
"""

from __future__ import annotations

from shardproof.protocol.system import System

SYSTEM = System(
    name="megatron-bridge",
    doc="NeMo Megatron-Bridge's finetuning load over Megatron-Core, both unmodified, on an emulated CUDA device",
    home=__name__,
    distributions=("megatron-bridge", "torch"),
    package="megatron-bridge",
    stands_on=("megatron-core",),
    emulated=(
        "CUDA device",
        "apex and amp_C (impl=multi_tensor)",
        "TransformerEngine's FusedAdam (precision_aware)",
        "TransformerEngine's layers, by name only",
    ),
    warm_up="rank:warm_up",
    variant_entry="accepts:variant",
    not_exercised_entry="accepts:not_exercised",
    models_entry="models:MODELS",
    export_entry="export:draft_script",
)
