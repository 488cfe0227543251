"""NeMo Automodel's pretrained loader, dtype-aware FSDP2 strategy and checkpointer, unmodified, on gloo."""

from __future__ import annotations

from shardproof.protocol.system import System

SYSTEM = System(
    name="automodel",
    doc="NeMo Automodel's pretrained loader, FSDP2 strategy and checkpointer, unmodified, on gloo",
    home=__name__,
    distributions=("nemo-automodel", "torch"),
    package="nemo-automodel",
    stands_on=("torch-fsdp2",),
    emulated=("the CPU under the name of a CUDA device, while a model is loaded",),
    warm_up="rank:warm_up",
    models_entry="models:MODELS",
    export_entry="export:draft_script",
)
