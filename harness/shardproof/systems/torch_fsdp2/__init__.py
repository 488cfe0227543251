"""PyTorch's FSDP2 (`fully_shard`) with distributed checkpoints (DCP), unmodified, on gloo or on GPUs.

Of the installed torch, or of another release (`torch-fsdp2@2.15.0`). It shares `shardproof.mechanisms.fsdp2` with the
systems that train under FSDP2.
"""

from __future__ import annotations

from shardproof.protocol.system import System

SYSTEM = System(
    name="torch-fsdp2",
    doc="PyTorch FSDP2 (fully_shard) with distributed checkpoint, unmodified, on gloo or on GPUs",
    home=__name__,
    distributions=("torch",),
    is_torch=True,
    predicates_entry="accepts:PREDICATES",
    warm_up="rank:warm_up",
    export_entry="export:draft_script",
)
