"""Megatron-FSDP (ZeRO-1, 2, 3 and hybrid), unmodified, on gloo and an emulated CUDA device.

It is the package `megatron-fsdp` of the package index. The copy of it inside Megatron-Core is run by `megatron-core`
with `options=fsdp_*`.
"""

from __future__ import annotations

from shardproof.protocol.system import System

SYSTEM = System(
    name="megatron-fsdp",
    doc="Megatron-FSDP (ZeRO-1, 2, 3 and hybrid), unmodified, on gloo and an emulated CUDA device",
    home=__name__,
    distributions=("megatron-fsdp", "torch"),
    package="megatron-fsdp",
    emulated=(
        "CUDA device, with tensors on the CPU",
        "NCCL's PREMUL_SUM, AVG and coalescing",
        "transformer_engine_torch, the compiled extension",
    ),
    predicates_entry="accepts:PREDICATES",
    warm_up="rank:warm_up",
    not_exercised_entry="accepts:not_exercised",
    export_entry="export:draft_script",
)
