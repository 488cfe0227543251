"""DeepSpeed's offload_states gives parameters each other's values where param groups are in another order than the module.

    pip install torch deepspeed==0.19.8
    python deepspeed-offload-states-order.py

One process on a CPU, stage 3 in bf16, nothing frozen. The bias is in a param group before the weight's, as groups
without and with decay may be. Both are gathered before offload_states, while lp_params are offloaded, and after
reload_states. Ends with status 1 where they differ while offloaded alone, with 0 where they never do, with 125 for
anything else.
"""

import os
import sys

sys.excepthook = lambda *error: (sys.__excepthook__(*error), os._exit(125))
os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": "0"}

try:
    import deepspeed
    import torch
    import torch.distributed as dist
    from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
except ImportError as missing:
    print(missing)
    sys.exit(125)

CONFIG = {
    "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_allow_untested_optimizer": True,
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}  # fmt: skip


def gathered(engine) -> tuple[list, list]:
    linear = engine.module
    with deepspeed.zero.GatheredParameters([linear.weight, linear.bias]):
        return linear.weight.tolist(), linear.bias.tolist()


def main() -> int:
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # gloo does without this kernel
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    linear = torch.nn.Linear(2, 2)
    torch.nn.init.constant_(linear.weight, 1.0)
    torch.nn.init.constant_(linear.bias, 2.0)
    optimizer = torch.optim.AdamW([{"params": [linear.bias], "weight_decay": 0.0}, {"params": [linear.weight]}])
    engine, *_ = deepspeed.initialize(model=linear, optimizer=optimizer, config=CONFIG, dist_init_required=False)
    before = gathered(engine)
    engine.offload_states(include=[OffloadStateTypeEnum.lp_params], pin_memory=False)
    offloaded = gathered(engine)
    engine.reload_states()
    after = gathered(engine)
    print(f"deepspeed {deepspeed.__version__}: weight and bias")
    print(f"  {before} before offload_states")
    print(f"  {offloaded} while lp_params are offloaded")
    print(f"  {after} after reload_states")
    if after != before:
        return 125
    return int(offloaded != before)


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)
