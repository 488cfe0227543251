"""Accelerate 1.15.0: under FSDP1 with SHARDED_STATE_DICT, load_state leaves a fresh optimizer without its state.

    pip install torch "accelerate==1.15.0"
    python accelerate-fsdp1-sharded.py

Two ranks train one step and call save_state. A fresh model and optimizer then call load_state. The files hold the
moments of AdamW; after the load the optimizer has none. `load_fsdp_optimizer` asks the optimizer that is to be loaded
what to read from the files (`FSDP.optim_state_dict(model, optimizer)`), and an optimizer that has not stepped yet has
nothing. With FSDP2 the same function fills the state first. Ends with status 1 where it shows.

With two GPUs nothing is special. On CPUs Accelerate ignores the plugin of FSDP, so its state is told that the two
processes are several devices. The lines at fault look at no device.
"""

import os
import sys

# Whatever else goes wrong ends with 125, which `git bisect run` skips.
sys.excepthook = lambda *error: (sys.__excepthook__(*error), print(end="", flush=True), os._exit(125))

import tempfile

import torch
import torch.multiprocessing as mp
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, DistributedType, PartialState

GPUS = torch.cuda.device_count() >= 2


def prepared() -> tuple[Accelerator, torch.nn.Module, torch.optim.Optimizer]:
    AcceleratorState._reset_state(reset_partial_state=False)
    if not GPUS:
        PartialState(cpu=True)
        PartialState._shared_state.update(distributed_type=DistributedType.MULTI_GPU, device=torch.device("cpu"))
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=1, state_dict_type="sharded_state_dict", use_orig_params=True, cpu_ram_efficient_loading=False,
        sync_module_states=False,
    )
    accelerator = Accelerator(fsdp_plugin=plugin)
    model = torch.nn.Linear(8, 8)
    return accelerator, *accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))


def run(rank: int, folder: str, counts) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29571"}
    accelerator, model, optimizer = prepared()
    accelerator.backward(model(torch.ones(4, 8, device=accelerator.device)).sum())
    optimizer.step()
    accelerator.save_state(folder)
    saved = len(optimizer.optimizer.state_dict()["state"])

    accelerator, model, optimizer = prepared()
    accelerator.load_state(folder)
    loaded = len(optimizer.optimizer.state_dict()["state"])
    print(f"rank {rank}: parameters with state when saved: {saved}, after load_state: {loaded}", flush=True)
    counts[rank] = saved - loaded
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    counts = mp.get_context("spawn").Array("i", 2)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, (folder, counts), nprocs=2)
    sys.exit(any(counts))
