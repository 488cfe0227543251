"""Which scenarios FSDP2 with distributed checkpoints runs. Its limits are those of
`harness.mechanisms.fsdp2.limits`."""

from __future__ import annotations

from harness.mechanisms.fsdp2 import limits as fsdp2
from harness.mechanisms.fsdp2.formats import FORMATS
from harness.scenario import DTypePolicy, Offload, Optimizer
from harness.systems.accepts import (
    EVERY_STEP,
    NUMBERS,
    Accepts,
    Anything,
    Faults,
    Formats,
    Loads,
    Only,
    Operations,
    Parts,
)

ACCEPTS = Accepts(
    "torch-fsdp2",
    device=Only("cpu", "cuda"),
    model=Anything(),
    mesh=Anything(),
    load=Loads("same", "grow", "shrink", "indivisible", "tp_change"),
    dtype=Parts(
        DTypePolicy,
        storage=Only("fp32", "bf16", "fp16", "mixed", "mixed_fp16"),
        param=Only(None, "fp32", "bf16", "fp16"),
        reduce=Only(None, "fp32", "bf16", "fp16"),
        output=Only(None, "fp32", "bf16", "fp16"),
        master=Only(None, because="FSDP2 keeps no separate masters: the storage dtype is the master"),
    ),
    sharding=Only("fully_shard", because="FSDP2 shards per parameter"),
    reshard_after_forward=Anything(),
    offload=Parts(Offload, fraction=Only(0.0, 1.0, because="CPUOffloadPolicy offloads everything or nothing")),
    optimizer=Parts(
        Optimizer,
        kind=Only("sgd", "adam", "adamw"),
        impl=Only("forloop", "foreach", "fused", because="the optimizer is torch.optim's"),
        schedule=Only("none", "halve"),
        groups=Only("model", "one"),
        clip=Anything(),
        loss_scale=Anything(),
        nesterov=Only(False, True),
        capturable=Only(False, True),
        **NUMBERS,
    ),
    microbatches=Anything(),
    grad_sync=Only("last", "every"),
    checkpoint=Formats(FORMATS),
    program=Operations(EVERY_STEP),
    faults=Faults(),
    seed=Anything(),
    limits=(
        fsdp2.MIXED_GROUP, fsdp2.RESHARD_DIVISOR, fsdp2.RESHARD_DIVISOR_TP, fsdp2.FUSED_SGD, fsdp2.SCALER_FP16,
        fsdp2.FP16_RANGE,
    ),
)  # fmt: skip
