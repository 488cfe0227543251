"""DeepSpeed's ZeRO stages 1, 2 and 3, with and without offload of the optimizer, unmodified, on gloo."""

from __future__ import annotations

from shardproof.protocol.system import System

SYSTEM = System(
    name="deepspeed",
    doc="DeepSpeed ZeRO stages 1, 2 and 3, with offload of the optimizer, unmodified, on gloo",
    home=__name__,
    distributions=("deepspeed", "torch"),
    package="deepspeed",
    warm_up="rank:warm_up",
    not_exercised_entry="accepts:not_exercised",
    models_entry="models:MODELS",
    layouts_entry="folder:LAYOUTS",
    export_entry="export:draft_script",
)
