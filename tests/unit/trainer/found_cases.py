"""Trainers in many arrangements, whose state must come out as the same logical tensors. Runs in ranks of gloo.

Every case trains one model on the same batch on every rank, so that gradients averaged over ranks are those of one
process, bit for bit. Gradients of tensor-parallel layers, whose products are summed in another order, are set by hand;
so are those of cases that have no forward.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.sharded_tensor import Shard as LocalShard
from torch.distributed._shard.sharded_tensor import ShardedTensor, init_from_local_shards
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

Roots = dict[str, Any]


class Block(nn.Module):
    """Shapes that no even number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(3, 5)
        self.down = nn.Linear(5, 3, bias=False)
        self.register_buffer("seen", torch.arange(3.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(x + self.down(torch.relu(self.up(x))))


class Model(nn.Module):
    """Two blocks and a scale that is a single element."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.first, self.second = Block(), Block()
        self.scale = nn.Parameter(torch.ones(1))
        if tied:
            self.second.up.weight = self.first.up.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.second(self.first(x)) * self.scale)


def model(**options: Any) -> Model:
    torch.manual_seed(1)
    return Model(**options)


def seen(roots: Roots) -> list[Any]:
    """Look at a trainer, one rank after the other: a look that took part in anything common would meet nobody."""
    from shardproof.trainer.rank.found import State

    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    records: list[Any] = []
    for turn in range(world):
        if turn == rank:
            records = list(State(roots, rank, world).records(1))
        if dist.is_initialized():
            dist.barrier()
    return records


def trained(module: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> Roots:
    """The roots of a trainer that has stepped."""
    generator = torch.Generator().manual_seed(3)
    for _ in range(steps):
        seen({"model": module, "optimizer": optimizer})
        optimizer.zero_grad()
        module(torch.randn(4, 3, generator=generator)).pow(2).sum().backward()
        optimizer.step()
    return {"model": module, "optimizer": optimizer}


def set_by_hand(module: nn.Module, optimizer: torch.optim.Optimizer) -> Roots:
    for _ in range(2):
        seen({"model": module, "optimizer": optimizer})
        for parameter in module.parameters():
            parameter.grad = parameter.detach() * 0.5
        optimizer.step()
    return {"model": module, "optimizer": optimizer}


class Homemade:
    """An optimizer that is no class of torch's: it has param groups and a state, and counts by integers."""

    def __init__(self, params: Iterator[nn.Parameter]) -> None:
        self.param_groups: list[dict[str, Any]] = [{"params": list(params), "lr": 0.5, "words": ("a", 1)}]
        self.state: dict[torch.Tensor, dict[str, Any]] = {}

    def zero_grad(self) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is None:
                continue
            own = self.state.setdefault(parameter, {"step": 0, "slow": torch.zeros_like(parameter), "hot": True})
            own["step"] += 1
            own["slow"].add_(parameter.grad)
            parameter.sub_(own["slow"], alpha=self.param_groups[0]["lr"])


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "adamw": partial(torch.optim.AdamW, lr=0.125),
    "sgd": partial(torch.optim.SGD, lr=0.125, momentum=0.5),
    "adagrad": partial(torch.optim.Adagrad, lr=0.125),
    "homemade": Homemade,
}


def plain(make: Callable[[Any], Any], **options: Any) -> Roots:
    own = model(**options)
    return trained(own, make(own.parameters()))


def ddp(make: Callable[[Any], Any], **options: Any) -> Roots:
    inner = model(**options)
    outer = DistributedDataParallel(inner)
    return {"inner": inner, **trained(outer, make(outer.parameters()))}


def fsdp1(
    make: Callable[[Any], Any], strategy: str, *, original: bool, gathered: bool = False, **options: Any
) -> Roots:
    own = FullyShardedDataParallel(
        model(**options),
        sharding_strategy=ShardingStrategy[strategy],
        use_orig_params=original,
        auto_wrap_policy=None if options else ModuleWrapPolicy([Block]),
        device_id=torch.device("cpu"),
        device_mesh=init_device_mesh("cpu", (2, 2)) if strategy == "HYBRID_SHARD" else None,
    )
    roots = trained(own, make(own.parameters()))
    if gathered:
        own(torch.ones(1, 3))  # SHARD_GRAD_OP keeps parameters gathered until a backward
    return roots


def fsdp2(make: Callable[[Any], Any], *, hybrid: bool = False, gathered: bool = False, **options: Any) -> Roots:
    own = model(**options)
    names, sizes = (("replicate", "shard"), (dist.get_world_size() // 2, 2)) if hybrid else (("shard",), (2,))
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    for block in () if options else (own.first, own.second):
        fully_shard(block, mesh=mesh)
    fully_shard(own, mesh=mesh)
    roots = trained(own, make(own.parameters()))
    if gathered:
        own(torch.ones(1, 3))  # a forward without a backward leaves the outermost parameters gathered
    return roots


def cut_twice(
    make: Callable[[Any], Any], dims: tuple[str, str] = ("shard", "tp"), sizes: tuple[int, int] = (2, 2)
) -> Roots:
    """FSDP2 over tensor parallelism: `up.weight` is cut along dim 0 by both."""
    own, mesh = model(), init_device_mesh("cpu", sizes, mesh_dim_names=dims)
    for block in (own.first, own.second):
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(block, mesh=mesh["shard"])
    fully_shard(own, mesh=mesh["shard"])
    return set_by_hand(own, make(own.parameters()))


def wrapped(make: Callable[[Any], Any]) -> Roots:
    own = model()
    own.first = checkpoint_wrapper(own.first)  # type: ignore[assignment]
    compiled = torch.compile(own, backend="eager")
    return trained(compiled, make(compiled.parameters()))  # type: ignore[arg-type]


def full_tensors(make: Callable[[Any], Any]) -> Roots:
    return set_by_hand(own := model(), make(own.parameters()))


def sharded_tensors() -> Roots:
    """The parameters of the plain case as ShardedTensors and as DTensors in other arrangements."""
    rank = dist.get_rank()
    mesh, table = init_device_mesh("cpu", (2, 2)), torch.arange(35.0).reshape(5, 7)
    rows = [(0, 2), (2, 1), (3, 0), (3, 2)][rank]
    shard = LocalShard.from_tensor_and_offsets(table[rows[0] : sum(rows)].clone(), [rows[0], 0], rank)
    placements = {
        "both": [Shard(0), Shard(0)], "each": [Shard(1), Shard(0)], "one": [Replicate(), Shard(-1)],
        "none": [Replicate(), Replicate()],
    }  # fmt: skip
    made = {name: distribute_tensor(table, mesh, placement) for name, placement in placements.items()}
    summed = DTensor.from_local(torch.ones(2), mesh, [Partial(), Replicate()], run_check=False)
    uneven = DTensor.from_local(torch.ones(1 + rank, 2), mesh, [Shard(0), Replicate()], run_check=False,
                                shape=torch.Size((40, 2)), stride=(2, 1))  # fmt: skip
    sharded: ShardedTensor = init_from_local_shards([shard], 5, 7)
    return {"table": {**made, "sharded": sharded, "summed": summed, "uneven": uneven}}


TWO: dict[str, Callable[[], Roots]] = {
    **{f"ddp {name}": partial(ddp, make) for name, make in OPTIMIZERS.items()},
    **{
        f"fsdp1 {strategy.lower()} {'originals' if original else 'flat'} {name}": partial(
            fsdp1, OPTIMIZERS[name], strategy, original=original
        )
        for strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")
        for original in (True, False)
        for name in (("adamw", "sgd", "homemade") if strategy == "FULL_SHARD" else ("adamw",))
    },
    **{f"fsdp2 {name}": partial(fsdp2, make) for name, make in OPTIMIZERS.items()},
    **{
        f"fsdp1 gathered {'originals' if original else 'flat'} adamw": partial(
            fsdp1, OPTIMIZERS["adamw"], "SHARD_GRAD_OP", original=original, gathered=True
        )
        for original in (True, False)
    },
    "fsdp2 gathered adamw": partial(fsdp2, OPTIMIZERS["adamw"], gathered=True),
    "tied plain": partial(plain, OPTIMIZERS["adamw"], tied=True),
    "tied ddp": partial(ddp, OPTIMIZERS["adamw"], tied=True),
    "tied fsdp1 originals": partial(fsdp1, OPTIMIZERS["adamw"], "FULL_SHARD", original=True, tied=True),
    "tied fsdp2": partial(fsdp2, OPTIMIZERS["adamw"], tied=True),
    "compiled adamw": partial(wrapped, OPTIMIZERS["adamw"]),
}  # fmt: skip
"""On two ranks."""

FOUR: dict[str, Callable[[], Roots]] = {
    "fsdp2 hybrid adamw": partial(fsdp2, OPTIMIZERS["adamw"], hybrid=True),
    **{f"cut twice {name}": partial(cut_twice, OPTIMIZERS[name]) for name in OPTIMIZERS},
    **{
        f"fsdp1 hybrid {'originals' if original else 'flat'} adamw": partial(
            fsdp1, OPTIMIZERS["adamw"], "HYBRID_SHARD", original=original
        )
        for original in (True, False)
    },
    "tables": sharded_tensors,
}
"""On two times two ranks."""


def run_rank(rank: int, world: int, folder: str) -> None:
    """Every case of a world: its records, what was found, and whether the look changed anything."""
    from shardproof.observe.record import pack
    from shardproof.trainer.rank.found import State

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world,
                            timeout=timedelta(seconds=60))  # fmt: skip
    for name, make in (TWO if world == 2 else FOUR).items():
        roots = make()
        before = torch.get_rng_state()
        state = State(roots, rank, world)
        records = seen(roots)
        again = list(state.records(1))
        tie = state.tie("first.up.weight", "second.up.weight")
        told = (state.found, state.hidden, torch.equal(before, torch.get_rng_state()) and records == again, tie)
        file_of(folder, name, rank).write_bytes(pack(records))
        file_of(folder, name, rank).with_suffix(".told").write_bytes(pickle.dumps(told))
        torch._dynamo.reset()
    dist.destroy_process_group()


def file_of(folder: str | Path, name: str, rank: int) -> Path:
    return Path(folder, f"{name.replace(' ', '-')}.{rank}.records")
