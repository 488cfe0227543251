"""Stacks that several processes save together: `torch.distributed.checkpoint` on DTensors, one shard on each rank.

The ranks are forked by the child that saves or loads, and meet in a gloo group of their own. What they hold is the
state of `torch_stacks`, each tensor split over the ranks along its first dimension, as FSDP2 has it, and a number that
all of them have.

The writer says between which collectives a rank is (`torch_stacks.Writer`). That is all that the record needs to tell
which changes of different ranks may change places.
"""

from __future__ import annotations

import importlib
import os
import pickle
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from shardproof.resilience.rank import tracer
from shardproof.resilience.rank.torch_stacks import State, Tensors, Writer, digests_of
from shardproof.world.process import die_with_parent

LONGEST_WAIT = timedelta(minutes=30)
"""For what another rank does not do; as long as gloo waits by default. The deadline of a trial is shorter."""

Body = Callable[[DeviceMesh], Any]
"""What a rank does; what it gives can be pickled."""

Plain = tuple[str, tuple[int, ...], bytes]
"""A tensor's dtype, shape and bytes."""


class RankFailedError(RuntimeError):
    """A rank raised, or was killed: what a launcher such as torchrun then ends the others for."""


class DistributedRanks(Tensors):
    """`torch.distributed.checkpoint.save` and `load` by several ranks.

    Args:
        world: how many ranks save. load_world: how many load; as many without it.
    """

    def __init__(self, world: int, load_world: int = 0, **options: Any) -> None:
        self.world, self.load_world, self.options = world, load_world or world, options

    def warm(self) -> None:
        importlib.import_module("torch._dynamo")  # what DTensor imports when it is first used
        with tempfile.TemporaryDirectory() as folder:
            state_dict_saver.save(self.state(0, 0), storage_writer=Writer(folder), no_dist=True)
            state_dict_loader.load(self.blank(), storage_reader=FileSystemReader(folder), no_dist=True)

    def save(self, folder: Path, state: State, generation: int, run: int) -> None:
        def body(mesh: DeviceMesh) -> None:
            state_dict_saver.save(_sharded(state, mesh), storage_writer=Writer(folder, **self.options))

        in_ranks(self.world, folder.parent, body)

    def load(self, folder: Path) -> State:
        def body(mesh: DeviceMesh) -> Mapping[str, Plain]:
            state = _sharded(self.blank(), mesh)
            state_dict_loader.load(state, storage_reader=FileSystemReader(folder))
            return {name: _plain(_local(value)) for name, value in state.items()}

        held = in_ranks(self.load_world, folder.parent, body)
        return _joined([{name: _tensor(*value) for name, value in one.items()} for one in held])

    def digests(self, state: Mapping[str, Any]) -> Mapping[str, str]:
        return digests_of(state)


def in_ranks(world: int, scratch: Path, body: Body) -> list[Any]:
    """What a body gives in each of so many ranks, which are forked for it.

    Args:
        scratch: a folder in which the ranks may meet.

    Raises:
        RankFailedError: a rank raised or was killed; said when all have ended.
    """
    meeting = Path(tempfile.mkdtemp(prefix="ranks-", dir=scratch))
    try:
        ranks, pipes, parent = [], [], os.getpid()
        for rank in range(world):
            told, tells = os.pipe()
            if (child := os.fork()) == 0:
                os.close(told)
                die_with_parent(parent)
                tracer.begins(rank)
                _be_rank(rank, world, meeting, body, tells)
            os.close(tells)
            ranks.append(child)
            pipes.append(told)
        tracer.have_begun(ranks)
        said = [_read(told) for told in pipes]
        for child in ranks:
            os.waitpid(child, 0)
    finally:
        shutil.rmtree(meeting, ignore_errors=True)
    if failed := [f"rank {rank}: {text}" for rank, (text, _) in enumerate(said) if text]:
        raise RankFailedError("; ".join(failed))
    return [held for _, held in said]


def _be_rank(rank: int, world: int, meeting: Path, body: Body, tells: int) -> None:
    told: tuple[str, Any] = ("", None)
    try:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        meet = f"file://{meeting / 'store'}"
        dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=world, timeout=LONGEST_WAIT)
        told = ("", body(init_device_mesh("cpu", (world,))))
    except BaseException as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        told = (f"{type(error).__name__}: {lines[-1] if lines else ''}", None)
    with os.fdopen(tells, "wb") as file:
        pickle.dump(told, file)
    os._exit(0)


def _read(told: int) -> tuple[str, Any]:
    with os.fdopen(told, "rb") as file:
        data = file.read()
    if not data:
        return "it was killed", None
    text, held = pickle.loads(data)
    return text, held


def _plain(value: torch.Tensor) -> Plain:
    data = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return str(value.dtype).removeprefix("torch."), tuple(value.shape), data


def _tensor(dtype: str, shape: tuple[int, ...], data: bytes) -> torch.Tensor:
    if not data:
        return torch.empty(shape, dtype=getattr(torch, dtype))
    return torch.frombuffer(bytearray(data), dtype=getattr(torch, dtype)).reshape(shape)


def _sharded(state: State, mesh: DeviceMesh) -> State:
    """A state in which tensors are DTensors sharded along dim 0; scalars are copied unchanged."""
    return {
        name: distribute_tensor(value, mesh, [Shard(0)], src_data_rank=None) if value.dim() else value.clone()
        for name, value in state.items()
    }


def _local(value: torch.Tensor) -> torch.Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


def _joined(held: Sequence[Mapping[str, torch.Tensor]]) -> State:
    """The whole state; a number under its name, and under a name of its own where a rank has another."""
    found: State = {}
    for name, value in held[0].items():
        if value.dim():
            found[name] = torch.cat([one[name] for one in held])
            continue
        found[name] = value
        others = {f"{name} on rank {rank}": one[name] for rank, one in enumerate(held) if not one[name].equal(value)}
        found.update(others)
    return found
