"""A save of two ranks over an earlier checkpoint, of which one cannot open its file, leaves one that loads: half new.

torch.distributed.checkpoint as it is by default, saved twice into one folder. In the second save the disk of rank 0 is
full (ENOSPC when it opens its file), and both ranks raise. The load after it raises nothing.
"""

import errno
import multiprocessing
import sys
import tempfile

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import load, save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor


def full_disk(event: str, arguments: tuple) -> None:
    if event == "open" and str(arguments[0]).endswith("__0_0.distcp"):
        raise OSError(errno.ENOSPC, "No space left on device")


def job(rank: int, folder: str, step: int, fails: bool) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}.{step}", rank=rank, world_size=2)
    weight = distribute_tensor(torch.full((4, 2), float(step)), init_device_mesh("cpu", (2,)), [Shard(0)])
    if step:
        if fails and rank == 0:
            sys.addaudithook(full_disk)
        save({"weight": weight}, checkpoint_id=folder)
        return
    state = {"weight": weight}
    load(state, checkpoint_id=folder)
    whole = state["weight"].full_tensor()
    if rank == 0:
        print(whole)
        sys.exit(whole.unique().numel() > 1 and "the load raised nothing, and what it gave is of two steps")


def run(folder: str, step: int, fails: bool = False) -> list[int | None]:
    ranks = [multiprocessing.Process(target=job, args=(rank, folder, step, fails)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    return [rank.exitcode for rank in ranks]


if __name__ == "__main__":
    place = tempfile.mkdtemp()
    assert run(place, 100) == [0, 0]
    assert run(place, 200, fails=True) == [1, 1]  # both ranks raise CheckpointException
    sys.exit(max(run(place, 0)))
