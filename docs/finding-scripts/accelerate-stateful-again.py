"""Accelerate 1.15.0: a checkpoint that is saved right after load_state has the stateful data loader at its old place.

    pip install torch "accelerate==1.15.0" torchdata
    python accelerate-stateful-again.py

One process draws three of eight batches and calls save_state. A second loader calls load_state and, before it draws,
save_state: as a run does that is resumed, and saves because it is to be stopped at once. A third loader loads that
checkpoint. It should go on with the fourth batch, and begins with the first. Ends with status 1 where it shows.
"""

import os
import sys

# Whatever else goes wrong ends with 125, which `git bisect run` skips.
sys.excepthook = lambda *error: (sys.__excepthook__(*error), print(end="", flush=True), os._exit(125))

import tempfile

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.state import AcceleratorState, GradientState
from torch.utils.data import DataLoader


def prepared() -> tuple[Accelerator, DataLoader]:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True))
    return accelerator, accelerator.prepare(DataLoader(torch.arange(8), batch_size=1))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        accelerator, loader = prepared()
        batches = iter(loader)
        drawn = [int(next(batches)) for _ in range(3)]
        accelerator.save_state(first)

        accelerator, loader = prepared()
        accelerator.load_state(first)
        accelerator.save_state(second)

        accelerator, loader = prepared()
        accelerator.load_state(second)
        rest = [int(batch) for batch in loader]
    print("drawn before the save:", drawn, "drawn after the second resume:", rest)
    sys.exit(rest != [3, 4, 5, 6, 7])
