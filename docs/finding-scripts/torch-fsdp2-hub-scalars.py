"""torch's HuggingFaceStorageWriter exports a tensor without a dim as zero.

    pip install torch safetensors
    torchrun --nproc-per-node 2 torch-fsdp2-hub-scalars.py

Two ranks, FSDP2 and torch.distributed.checkpoint. The writer joins the shards of both ranks to one safetensors file, as
for `from_pretrained`. `scale`, a buffer of one number (CLIP's `logit_scale` is such a parameter), is 0.625 in the model
and in the rank's shard, and 0 in the joined file; a weight, and the same number with the shape (1,), are as they were.
Ends with status 1 where it shows, and with 125 where anything else happens.
"""

import os
import sys
import tempfile

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import fully_shard


def main() -> int:
    dist.init_process_group("gloo")
    box = [tempfile.mkdtemp()]
    dist.broadcast_object_list(box)
    (folder,) = box

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
    if not torch.equal(joined["weight"], weight) or joined["one_dim"].item() != 0.625:
        return 125
    if joined["scale"].item() == 0.0 == loaded["scale"].item():
        return 1
    return 0 if joined["scale"].item() == 0.625 == loaded["scale"].item() else 125


if __name__ == "__main__":
    status = main()
    dist.destroy_process_group()
    sys.exit(status)
