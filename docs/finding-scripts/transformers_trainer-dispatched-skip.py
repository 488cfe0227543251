"""Accelerate 1.15.0, as the Trainer of Transformers 5.24.0 calls it: a resume with dispatched batches skips too few.

    pip install torch "accelerate==1.15.0"
    python transformers_trainer-dispatched-skip.py

Two processes read eight batches of one sample each with `dispatch_batches=True`: process 0 reads two of them for each
step, and sends one to each process. A run that is resumed after two steps has to go on with the fifth batch.
`skip_first_batches(loader, 2)`, which the Trainer calls with the number of steps, leaves out two batches of the inner
loader, which is one step. Without `dispatch_batches` the same call is right. Ends with status 1 where it shows.
"""

import os
import sys

# Whatever else goes wrong ends with 125, which `git bisect run` skips.
sys.excepthook = lambda *error: (sys.__excepthook__(*error), print(end="", flush=True), os._exit(125))

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from accelerate import Accelerator, DataLoaderConfiguration
from torch.utils.data import DataLoader

STEPS = 2


def run(rank: int, wrong, dispatch: bool) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29573"}
    config = DataLoaderConfiguration(dispatch_batches=dispatch)
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    loader = accelerator.prepare(DataLoader(torch.arange(8), batch_size=1))
    whole = [int(batch) for batch in loader]
    resumed = [int(batch) for batch in accelerator.skip_first_batches(loader, STEPS)]
    print(f"dispatch_batches={dispatch} rank {rank}: {whole}, after {STEPS} steps: {resumed}", flush=True)
    if resumed != whole[STEPS:]:
        wrong.value = 1
    dist.destroy_process_group()


if __name__ == "__main__":
    wrong = mp.get_context("spawn").Value("i", 0)
    for dispatch in (False, True):
        mp.spawn(run, (wrong, dispatch), nprocs=2)
    sys.exit(wrong.value)
