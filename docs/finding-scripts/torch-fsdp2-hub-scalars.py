"""torch's HuggingFaceStorageWriter exports a tensor without a dim as zero.

    pip install torch safetensors
    python torch-fsdp2-hub-scalars.py

Two ranks, FSDP2 and torch.distributed.checkpoint. The writer joins the shards of both ranks to one safetensors file, as
for `from_pretrained`. `scale`, a buffer of one number (CLIP's `logit_scale` is such a parameter), is 0.625 in the model
and in the rank's shard, and 0 in the joined file; a weight, and the same number with the shape (1,), are as they were.
Ends with status 1 where it shows, and with 125 where anything else happens.
"""

import os
import sys

# Whatever else goes wrong ends with 125, which `git bisect run` skips.
sys.excepthook = lambda *error: (sys.__excepthook__(*error), print(end="", flush=True), os._exit(125))

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors.torch import load_file
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import fully_shard


def rank(number: int, folder: str) -> None:
    os.environ.update(RANK=str(number), WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT="29537")
    dist.init_process_group("gloo")
    model = nn.Linear(5, 3)
    model.register_buffer("scale", torch.tensor(0.625))
    model.register_buffer("one_dim", torch.tensor([0.625]))
    fully_shard(model)
    state = get_model_state_dict(model)
    dcp.save(state, storage_writer=HuggingFaceStorageWriter(folder, save_distributed=True, enable_consolidation=True))
    dist.barrier()

    weight = state["weight"].full_tensor()
    joined = load_file(os.path.join(folder, "model-00001-of-00001.safetensors"))
    loaded = {"scale": torch.full((), 7.0)}
    dcp.load(loaded, storage_reader=HuggingFaceStorageReader(folder))
    if dist.get_rank() == 0:
        print(f"torch {torch.__version__}")
        print(f"scale in the model {state['scale'].item()}, in the joined file {joined['scale'].item()}, ", end="")
        print(f"after a load from it {loaded['scale'].item()}")
        print(f"one_dim in the joined file {joined['one_dim'].item()}")
    dist.barrier()
    dist.destroy_process_group()
    sound = torch.equal(joined["weight"], weight) and joined["one_dim"].item() == 0.625
    found = {joined["scale"].item(), loaded["scale"].item()}
    if not sound or found not in ({0.0}, {0.625}):
        sys.exit(125)
    sys.exit(1 if found == {0.0} else 0)


if __name__ == "__main__":
    try:
        mp.spawn(rank, (tempfile.mkdtemp(),), nprocs=2)
    except mp.ProcessExitedException as ended:
        sys.exit(1 if ended.exit_code == 1 else 125)
