"""Transformers 5.24.0: a resume rounds the state of Adafactor to the dtype of the parameters.

    pip install torch "transformers==5.24.0"
    python transformers_trainer-adafactor-bf16.py

Adafactor keeps its second moments in fp32, whatever the parameters have. It loads them by the method of
`torch.optim.Optimizer`, which casts state to the dtype of its parameter. So with parameters in bf16 a resumed run goes
on with moments of 8 significant bits, and is no longer the run that was saved. Ends with status 1 where it shows.
"""

import os
import sys

# Whatever else goes wrong ends with 125, which `git bisect run` skips.
sys.excepthook = lambda *error: (sys.__excepthook__(*error), print(end="", flush=True), os._exit(125))

import copy

import torch
from transformers.optimization import Adafactor


def made() -> tuple[torch.nn.Parameter, Adafactor]:
    parameter = torch.nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16))
    return parameter, Adafactor([parameter], lr=0.01, scale_parameter=False, relative_step=False)


if __name__ == "__main__":
    parameter, optimizer = made()
    for step in range(3):
        parameter.grad = torch.randn(4, 4, generator=torch.Generator().manual_seed(step)).bfloat16()
        optimizer.step()
    kept = copy.deepcopy(optimizer.state_dict())

    parameter, optimizer = made()
    optimizer.load_state_dict(copy.deepcopy(kept))
    wrong = 0
    for name, saved in kept["state"][0].items():
        loaded = optimizer.state[parameter][name]
        if torch.is_tensor(saved) and saved.dtype.is_floating_point:
            wrong += not torch.equal(saved, loaded.to(saved.dtype))
            print(f"{name}: saved in {saved.dtype}, loaded in {loaded.dtype}: {saved.flatten()[:2].tolist()} became"
                  f" {loaded.flatten()[:2].tolist()}")  # fmt: skip
    sys.exit(bool(wrong))
