"""What a Megatron-Core training script holds between two steps: shared by training and checkpointing.

Rank side. The library is untyped, so its objects are `Any` here; what they are is said beside each.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any

from torch import nn

from shardproof.layout import Box, chunk
from shardproof.mechanisms.megatron.rank.streams import Streams
from shardproof.models import ModelSpec, ParamSpec
from shardproof.scenario import Mesh, Scenario


@dataclass
class TrainState:
    """One rank's training state after a build.

    * chunks: the model chunks (one, without pipeline parallelism), each a DistributedDataParallel around the root, with
      a Float16Module in between where something is stored in half.
    * optimizer: what get_megatron_optimizer returned: a ChainedOptimizer, or the only optimizer of one chain link.
    * scheduler: an OptimizerParamScheduler, always present: it is what gives the param groups their learning rate and
      weight decay.
    * streams: the rank's random generators, where the script keeps them.
    * iteration: optimizer steps taken.
    * release: megatron.core's `(major, minor, patch)`.
    * strategies: the strategies of the latest load and of the first save, by `load` and `save`, which a script keeps
      that assumes that its checkpoints' structure is constant.
    """

    scenario: Scenario
    spec: ModelSpec
    mesh: Mesh
    rank: int
    release: tuple[int, int, int]
    chunks: list[Any]
    optimizer: Any
    scheduler: Any
    streams: Streams | None = None
    iteration: int = 0
    strategies: dict[str, Any] = field(default_factory=dict)

    @property
    def root(self) -> nn.Module:
        """The innermost model: its parameter names are the fully qualified ones, and it has `sharded_state_dict`."""
        module: Any = self.chunks[0]
        while isinstance(inner := getattr(module, "module", None), nn.Module):
            module = inner
        assert isinstance(module, nn.Module)
        return module

    @property
    def links(self) -> list[Any]:
        """The optimizers inside a ChainedOptimizer, one of dense and one of expert parameters; or the only one."""
        chained = getattr(self.optimizer, "chained_optimizers", None)
        return [self.optimizer] if chained is None else list(chained)

    @property
    def tp_index(self) -> int:
        return self.mesh.coordinate(self.rank)[2]

    @property
    def dp_index(self) -> int:
        return self.mesh.dp_index(self.rank)


def local_box(spec: ParamSpec, mesh: Mesh, rank: int, expert_parallel: int) -> Box:
    """The piece of a parameter that a rank's model holds: its tensor-parallel shard, or its share of the experts."""
    start, size = [0] * len(spec.shape), list(spec.shape)
    if spec.tp_dim is not None and mesh.tp > 1:
        dim = spec.tp_dim
        start[dim], size[dim] = chunk(spec.shape[dim], mesh.tp, mesh.coordinate(rank)[2])
    if spec.ep_dim is not None and expert_parallel > 1:
        dim = spec.ep_dim
        start[dim], size[dim] = chunk(spec.shape[dim], expert_parallel, mesh.dp_index(rank) % expert_parallel)
    return Box(tuple(start), tuple(size))


def fused_shape(spec: ParamSpec, size: tuple[int, ...]) -> tuple[int, ...]:
    """The shape that the library gives a piece of this size: sections that we stack along a dim of their own lie one
    after the other there."""
    return (size[0] * size[1], *size[2:]) if spec.stacked else size


@cache
def release() -> tuple[int, int, int]:
    """Megatron-Core's release."""
    from megatron.core import package_info

    return package_info.MAJOR, package_info.MINOR, int(package_info.PATCH)
