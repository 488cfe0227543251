"""What every script of DeepSpeed has: how the ranks join, the engine's configuration, and the call that makes the
engine. No torch.
"""

from __future__ import annotations

from math import log2
from typing import Any

from shardproof.export.case import FailureCase
from shardproof.export.model import start
from shardproof.scenario import Scenario
from shardproof.systems.deepspeed.accepts import (
    EAGER,
    NO_REDUCE_SCATTER,
    OVERLAP,
    PERSISTENT,
    SMALL_BUCKETS,
    STAGES,
    WRITER,
)
from shardproof.systems.deepspeed.contract import NO_HYSTERESIS, WINDOW
from shardproof.systems.deepspeed.flat import ALIGNED, ROUND_ROBIN, SUB_GROUP_SIZE, SUB_GROUPS

BUCKET, SMALL_BUCKET, PERSISTENT_SIZE = 4096, 16, 20
"""Elements of buckets, and of what stage 3 keeps whole: the library's own are made for models of billions."""

INITIALIZE = (
    "model, optimizer, _, _ = deepspeed.initialize(",
    "    model=model, optimizer=optimizer, config=CONFIG, dist_init_required=False",
    ")",
)
"""The lines that make an engine of `model` and `optimizer`."""


def start_lines(case: FailureCase) -> list[str]:
    """The lines that join the ranks, on a machine without a GPU."""
    alone = case.ops[-1].mesh.world == 1
    lines = [
        'os.environ["LOCAL_RANK"] = "0"' if alone else 'os.environ.setdefault("LOCAL_RANK", os.environ["RANK"])',
        'deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # gloo does without this kernel',
        start(case, "gloo"),
    ]
    if WRITER in case.scenario.options:
        lines.insert(0, 'os.environ.update(CROSS_RANK="0", CROSS_SIZE="1")  # as the library\'s launcher says it')
    if case.scenario.dtype.storage == "fp16":
        fp16 = "get_accelerator().is_fp16_supported = lambda: True  # torch computes fp16 on any CPU"
        lines.insert(0, f"deepspeed.accelerator.{fp16}")
    return lines


def engine_config(scenario: Scenario) -> dict[str, Any]:
    """The engine's configuration: what the scenario asks for, and buckets of a size for tiny models."""
    ask, options, stage = scenario.optimizer, scenario.options, STAGES[scenario.sharding]
    zero: dict[str, Any] = {
        "stage": stage, "reduce_bucket_size": SMALL_BUCKET if SMALL_BUCKETS in options else BUCKET,
    }  # fmt: skip
    if SMALL_BUCKETS in options:
        zero["allgather_bucket_size"] = SMALL_BUCKET
    zero |= {"reduce_scatter": False} if NO_REDUCE_SCATTER in options else {}
    for word, name in (
        (OVERLAP, "overlap_comm"),
        (ROUND_ROBIN, "round_robin_gradients"),
        (ALIGNED, "parameter_alignment"),
    ):
        zero |= {name: True} if word in options else {}
    if scenario.offload.fraction:
        zero["offload_optimizer"] = {"device": "cpu"}
    if stage == 3:
        zero["stage3_param_persistence_threshold"] = PERSISTENT_SIZE if PERSISTENT in options else 0
        zero |= {"stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0} if EAGER in options else {}
        zero |= {"sub_group_size": SUB_GROUP_SIZE} if SUB_GROUPS in options else {}
    asked: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1}
    if scenario.microbatches > 1:
        asked["gradient_accumulation_steps"] = scenario.microbatches
    asked |= {"gradient_clipping": ask.clip}  # its default is to clip
    asked |= {"zero_optimization": zero, "zero_allow_untested_optimizer": True}
    if scenario.offload.fraction:
        asked["zero_force_ds_cpu_optimizer"] = False
    if scenario.dtype.storage == "bf16":
        asked["bf16"] = {"enabled": True}
    if scenario.dtype.storage == "fp16":
        asked["fp16"] = {"enabled": True, **_loss_scale(scenario)}
    if scenario.dtype.reduce:
        asked["data_types"] = {"grad_accum_dtype": scenario.dtype.reduce}
        asked["communication_data_type"] = scenario.dtype.reduce
    if scenario.checkpoint == "universal":
        asked["checkpoint"] = {"load_universal": True}
    if WRITER in scenario.options:
        asked["checkpoint"] = asked.get("checkpoint", {}) | {"writer": {"type": "python"}}
    return asked


def _loss_scale(scenario: Scenario) -> dict[str, Any]:
    scale = scenario.optimizer.loss_scale
    if not scale:
        return {"loss_scale": 1}
    own: dict[str, Any] = {"initial_scale_power": int(log2(scale)), "loss_scale_window": WINDOW}
    return own | ({"hysteresis": 1} if NO_HYSTERESIS in scenario.options else {})
