"""NeMo Automodel before 0.7.0: a load of the schedule leaves the run's own weight decay in place for a step.

    pip install torch "nemo-automodel==0.6.0"
    python automodel-3882.py

One process. A run saves the state of its schedule after one step, and two runs that ask for another weight decay load
it: a fresh one, and one that has taken a step itself. Both must then have the checkpoint's weight decay and be at its
step. On 0.6.0 both have their own weight decay, and the second is a step ahead; on 0.7.0 neither. Status 1 where it
shows.
"""

import os
import sys

# Whatever else goes wrong ends with 125, which `git bisect run` skips.
sys.excepthook = lambda *error: (sys.__excepthook__(*error), print(end="", flush=True), os._exit(125))

import torch
from nemo_automodel.components.optim.scheduler import OptimizerParamScheduler


def run(weight_decay: float) -> tuple[torch.optim.Optimizer, OptimizerParamScheduler]:
    optimizer = torch.optim.AdamW(torch.nn.Linear(4, 4).parameters(), lr=1e-3, weight_decay=weight_decay)
    schedule = OptimizerParamScheduler(
        optimizer, init_lr=0.0, max_lr=1e-3, min_lr=0.0, lr_warmup_steps=0, lr_decay_steps=10,
        lr_decay_style="cosine", start_wd=weight_decay, end_wd=weight_decay, wd_incr_steps=10,
        wd_incr_style="constant",
    )
    return optimizer, schedule


_, first = run(0.1)
first.step(1)
wrong = 0
for steps in (0, 1):
    optimizer, schedule = run(0.2)
    schedule.step(steps)
    schedule.load_state_dict(first.state_dict())
    decay = optimizer.param_groups[0]["weight_decay"]
    print(f"after {steps} steps and a load: weight decay {decay}, expected 0.1; step {schedule.num_steps}, expected 1")
    wrong += decay != 0.1 or schedule.num_steps != 1
sys.exit(bool(wrong))
