"""Megatron-Core: override_opt_param_scheduler does not let the run's learning rate win over the checkpoint's.

    python megatron-core-1138.py

The first run trains at 1.0, the second asks for 0.1 and sets override_opt_param_scheduler. The optimizer's load puts the
checkpoint's max_lr into the param groups, and the scheduler reads that one. Seen with megatron-core 0.16.1.
"""

import os
import sys

# Whatever else goes wrong ends with 125, which `git bisect run` skips.
sys.excepthook = lambda *error: (sys.__excepthook__(*error), print(end="", flush=True), os._exit(125))

import torch
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler


def build(rate, override):
    parameter = torch.nn.Parameter(torch.ones(2))
    group = {"params": [parameter], "max_lr": rate, "min_lr": rate / 10}  # as get_megatron_optimizer makes it
    optimizer = torch.optim.AdamW([group], lr=rate)
    scheduler = OptimizerParamScheduler(
        optimizer, init_lr=0.0, max_lr=rate, min_lr=rate / 10, lr_warmup_steps=0, lr_decay_steps=100,
        lr_decay_style="constant", start_wd=0.0, end_wd=0.0, wd_incr_steps=1, wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=not override, override_opt_param_scheduler=override,
    )  # fmt: skip
    return optimizer, scheduler


first, schedule = build(1.0, override=False)
schedule.step(increment=4)
second, own = build(0.1, override=True)
second.load_state_dict(first.state_dict())
own.load_state_dict(schedule.state_dict())
loaded = second.param_groups[0]["lr"]
print(f"learning rate after the load: {loaded}, asked for 0.1")
sys.exit({1.0: 1, 0.1: 0}.get(loaded, 125))
