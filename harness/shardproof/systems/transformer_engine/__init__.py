"""NVIDIA TransformerEngine's layers and FusedAdam, its Python unmodified, under FSDP2 and DCP.

The rank half runs the Python layer over its compiled extension on a GPU, and over an emulated one on a CPU (see
`shardproof.emulation.te_choice`).
"""

from __future__ import annotations

from shardproof.protocol.system import System

SYSTEM = System(
    name="transformer-engine",
    doc="TransformerEngine's layers and FusedAdam, its Python unmodified, under FSDP2 and DCP on gloo",
    home=__name__,
    distributions=("transformer-engine", "torch"),
    package="transformer-engine",
    stands_on=("torch-fsdp2",),
    gpu_distributions=("transformer-engine-torch",),
    emulated=(
        "transformer_engine_torch, the compiled extension",
        "CUDA device, while layers and FusedAdam are constructed",
    ),
    warm_up="rank:warm_up",
    library="rank:library",
    device_choices_entry="accepts:chosen_extension",
    models_entry="models:MODELS",
    export_entry="export:draft_script",
)
