"""PyTorch's FSDP2 and DCP on one rank: sharded, saved and loaded through the public API only.

On cuda the mesh is one of GPUs, the model is moved there before it is sharded, and offload pins its memory.

*Verifies* nothing by itself. *Does not exercise*, on the CPU, streams, overlap or pinned memory.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardproof.layout import Box as ShardBox
from shardproof.mechanisms.fsdp2.rank.checkpoint import StateDictCheckpoint
from shardproof.mechanisms.fsdp2.rank.shard import fully_shard_units
from shardproof.mechanisms.probe_module import local_part
from shardproof.models import ONE_MORE, NamedParam
from shardproof.observe.record import Record
from shardproof.program import Op
from shardproof.protocol.system import RankContext
from shardproof.scenario import Mesh, Scenario
from shardproof.systems.torch_fsdp2.accepts import AS_RETURNED, is_ignored
from shardproof.torch_loop.loop import TorchRank, context_of, rehearse
from shardproof.torch_loop.streams import Streams


class Rank(TorchRank):
    """The `RankSystem` of `torch-fsdp2`."""

    def __init__(self, context: RankContext) -> None:
        super().__init__(context)
        grows = self.scenario.load_model is not None and self.scenario.model.endswith(ONE_MORE)
        self.checkpoint = replace(StateDictCheckpoint.from_text(self.scenario.checkpoint), partial=grows)
        self.kept: dict[str, Any] = {}
        self.under_way: list[Callable[[], None]] = []  # waits for the asynchronous save that was begun

    def build(self, op: Op) -> None:
        super().build(op)
        streams = Streams(self.context)
        if streams.generators:
            streams.seed(op.init_seed)
            self.state.streams, self.probe.dropout = streams, streams.draw

    def observe(self, op: Op) -> Iterable[Record]:
        yield from super().observe(op)
        if self.state.streams:
            yield from self.state.streams.records(op)

    def shard(self, root: nn.Module) -> None:
        fully_shard_units(root, self.context, self.mesh, {root.get_parameter(fqn) for fqn in self.ignored})

    @property
    def ignored(self) -> list[str]:
        """The parameters that FSDP is told to leave alone."""
        return [p.fqn for p in self.spec.unique_params if is_ignored(self.scenario, p.spec.shape)]

    def own_box(self, named: NamedParam) -> ShardBox:
        if not is_ignored(self.scenario, named.spec.shape):
            return super().own_box(named)
        return ShardBox(*self.forward_box(named.fqn))

    def backward(self, op: Op, *, overflow: bool) -> None:
        super().backward(op, overflow=overflow)
        for fqn in self.ignored:
            parameter = self.state.model.get_parameter(fqn)
            if isinstance(parameter.grad, DTensor):  # DTensor leaves a sum over tensor-parallel ranks open
                parameter.grad = parameter.grad.redistribute(placements=cast("DTensor", parameter).placements)
            if parameter.grad is not None:
                average(local_part(parameter.grad), self.mesh)

    def save(self, op: Op) -> None:
        self.checkpoint.save(self.state, self.context.checkpoint_path(op), self.in_flight)

    def load(self, op: Op) -> None:
        self.checkpoint.load(self.state, self.context.checkpoint_path(op))

    def load_model_only(self, op: Op) -> None:
        self.checkpoint.load_model_only(self.state, self.context.checkpoint_path(op))

    def load_optimizer_only(self, op: Op) -> None:
        self.checkpoint.load_optimizer_only(self.state, self.context.checkpoint_path(op))

    def load_schedule_only(self, op: Op) -> None:
        self.checkpoint.load_schedule_only(self.state, self.context.checkpoint_path(op))

    def begin_save(self, op: Op) -> None:
        self.checkpoint.save(self.state, self.context.checkpoint_path(op), self.under_way.append)

    def finish_save(self, op: Op) -> None:
        self.under_way.pop()()

    def replace_params(self, op: Op) -> None:
        """Copy other weights into the parameters, as pretrained ones are: every rank has them whole, and torch gives
        each rank its share."""
        options = StateDictOptions(full_state_dict=True, strict=False)
        set_model_state_dict(self.state.model, {**self.pretrained(op)}, options=options)

    def keep(self, op: Op) -> None:
        content = self.checkpoint.content(self.state)
        self.kept = content if AS_RETURNED in self.scenario.options else copy.deepcopy(content)

    def save_kept(self, op: Op) -> None:
        self.checkpoint.write(self.kept, self.context.checkpoint_path(op), self.in_flight)

    def recall(self, op: Op) -> None:
        self.checkpoint.of_kept().restore(self.state, self.kept)


def average(gradient: torch.Tensor, mesh: DeviceMesh) -> None:
    """Average a gradient over the data-parallel ranks in place, as a training loop does for what FSDP leaves to it."""
    for name in ("dp_replicate", "dp_shard"):
        if name in (mesh.mesh_dim_names or ()):
            dist.all_reduce(gradient, group=mesh.get_group(name))
            gradient /= mesh[name].size()


REHEARSAL_MESH = Mesh(1, 16, 1)  # larger than any world of ranks, so that no entry that it leaves in a cache fits one


def warm_up() -> None:
    """Run small scenarios in this process, so that ranks forked from it inherit every lazy import and cache.

    One rank alone saves and loads; a rank of a larger world, whose collectives go nowhere, shards and steps.
    """
    base = Scenario(system="torch-fsdp2", model="frozen_tower", program="build step save build load step")
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        for form in ("dcp", "full"):
            saving = replace(base, checkpoint=form)
            rehearse(Rank(context_of(saving, Path(folder, form))), saving)
        dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=REHEARSAL_MESH.world)
        for optimizer in ("adamw", "adamw/impl=fused", "sgd", "adam/impl=forloop"):
            asked = {"optimizer": optimizer, "model": "dense", "program": "build step"}
            stepping = replace(base, mesh=REHEARSAL_MESH).with_axes(asked)
            rehearse(Rank(context_of(stepping, Path(folder))), stepping)
        dist.destroy_process_group()
