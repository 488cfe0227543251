"""Checkpoints of torch.distributed.checkpoint, as stacks that crashes and damage are tried on."""

from __future__ import annotations

from functools import partial

from shardproof.resilience.stacks import Stack

_TORCH = "shardproof.resilience.rank.torch_stacks"
_ALONE, _RANKS = f"{_TORCH}:Distributed", "shardproof.resilience.rank.ranks:DistributedRanks"
_stack = partial(Stack, system="torch-fsdp2")

STACKS = (
    _stack("dcp", "torch.distributed.checkpoint.save into one folder, as it is by default", _ALONE),
    _stack(
        "dcp-no-sync", "the same with FileSystemWriter(sync_files=False)", _ALONE,
        (("sync_files", False),),
    ),
    _stack(
        "dcp-files", "the same with FileSystemWriter(single_file_per_rank=False): a file for each tensor",
        _ALONE, (("single_file_per_rank", False),),
    ),
    _stack(
        "dcp-threads", "the same with FileSystemWriter(thread_count=2): two files", _ALONE,
        (("thread_count", 2),),
    ),
    _stack(
        "dcp-steps", "a new folder for each step, the newest with .metadata is loaded", _ALONE,
        (("steps", True),),
    ),
    _stack(
        "dcp-2-ranks", "torch.distributed.checkpoint.save by 2 ranks into one folder, a shard of each tensor on each",
        _RANKS, (("world", 2),), ranks=2,
    ),
    _stack(
        "dcp-2-ranks-at-1", "the same, loaded by 1 rank", _RANKS,
        (("world", 2), ("load_world", 1)), ranks=2,
    ),
    _stack(
        "dcp-4-ranks", "torch.distributed.checkpoint.save by 4 ranks into one folder", _RANKS,
        (("world", 4),), ranks=4,
    ),
    _stack(
        "dcp-4-ranks-at-3", "the same, loaded by 3 ranks", _RANKS,
        (("world", 4), ("load_world", 3)), ranks=4,
    ),
    _stack("dcp-async", "torch.distributed.checkpoint.async_save into one folder", f"{_TORCH}:DistributedAsync"),
)  # fmt: skip
