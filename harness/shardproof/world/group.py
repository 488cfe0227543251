"""How a rank joins its process group: over loopback, with a store that rank 0 serves on a socket bound beforehand.

Ranks and the rehearsal (`shardproof.world.rehearsal`) join in the same way, so that a machine on which ranks cannot
talk is found out before a library can be blamed for it.
"""

from __future__ import annotations

import datetime
import os

from shardproof.world import devices


def join(rank: int, world: int, where: devices.Seat, store_port: int, store_fd: int | None, timeout_s: float) -> None:
    """Make this process rank `rank` of a default process group of `world` ranks, and put that into its environment.

    Args:
        where: the rank's device and backend.
        store_port: of the store, on 127.0.0.1. store_fd: the listening socket bound to that port, in rank 0; None in
            the others.
        timeout_s: of every collective.

    Raises:
        RuntimeError: as torch.distributed raises it, where ranks cannot reach each other.
    """
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import TCPStore

    local = rank if where.index is None else where.index
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(local), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(store_port),
    )  # fmt: skip
    timeout = datetime.timedelta(seconds=timeout_s)
    store = TCPStore(
        "127.0.0.1", store_port, world, is_master=rank == 0, timeout=timeout, wait_for_workers=False,
        master_listen_fd=store_fd,
    )  # fmt: skip
    bound = torch.device("cuda", local) if where.backend == devices.NCCL else None
    dist.init_process_group(where.backend, store=store, rank=rank, world_size=world, timeout=timeout, device_id=bound)
