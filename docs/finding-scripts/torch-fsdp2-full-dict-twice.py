"""set_model_state_dict puts the model's own shards into the full state dict that it was given.

Two CPU ranks load a full state dict that rank 0 keeps, with broadcast_from_rank0. Then the weights become 7, as
training would change them: so do those in the dict. A second load of it raises. With a copy of the dict in
`_load_model_state_dict` neither happens, and the dict keeps its `_metadata`.

Run with `python torch-fsdp2-full-dict-twice.py`; needs torch alone. Status 1: the dict was changed; 0: it was not.
"""

import os
import sys

# Whatever else goes wrong ends with 125, which `git bisect run` skips.
sys.excepthook = lambda *error: (sys.__excepthook__(*error), print(end="", flush=True), os._exit(125))

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor


def run(rank: int, folder: str, status) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    model = torch.nn.Linear(4, 4, bias=False)
    fully_shard(model)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    kept = {"weight": torch.ones(4, 4)} if rank == 0 else {}
    set_model_state_dict(model, kept, options=options)
    with torch.no_grad():
        model.weight.to_local().fill_(7.0)
    if rank == 0:
        weight = kept["weight"]
        values = (weight.to_local() if isinstance(weight, DTensor) else weight).unique().tolist()
        print(f"the kept dict: expected a Tensor of [1.0]; observed a {type(weight).__name__} of {values}", flush=True)
        status.value = int(values != [1.0])
    try:
        set_model_state_dict(model, kept, options=options)
    except (NotImplementedError, RuntimeError) as error:  # the other rank waits, until this one is gone
        print(f"rank {rank}, the second load: {type(error).__name__}: {str(error).splitlines()[0]}", flush=True)
    os._exit(0)


if __name__ == "__main__":
    status = mp.get_context("spawn").Value("i", 125)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, (folder, status), nprocs=2)
    sys.exit(status.value)
