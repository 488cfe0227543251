"""Megatron-Core's own Megatron-FSDP on one rank: the wrapper, what it owns, and checkpoints of format fsdp_dtensor.

Three switches of the `options` axis (`fsdp_optim`, `fsdp_optim_grads`, `fsdp_optim_grads_params`) choose what is
sharded. A checkpoint is written and read as megatron/training/checkpointing.py does it, by calling the same functions
of megatron.core in the same order; that file itself is in no wheel. Two things differ: the fused projections of a gated
delta net are split as well, which no training script does yet; and what was split is put together again after a load as
releases from 0.16 on do it.

*Verifies* nothing by itself. *Does not exercise* NCCL user buffers, fp8 weights and meta-device initialisation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load_state_dict
from torch.distributed.checkpoint.state_dict_saver import save as save_state_dict

from shardproof.mechanisms.megatron.rank.observe import Owned
from shardproof.mechanisms.megatron.rank.state import TrainState, fused_shape, local_box
from shardproof.mechanisms.megatron.switches import BUCKET_SIZE
from shardproof.mechanisms.probe_module import ProbeModule, local_part
from shardproof.mechanisms.row_buffers import core_buckets, cut
from shardproof.oracle.contract import half_dtype
from shardproof.scenario import Mesh, Scenario
from shardproof.systems.megatron_core.switches import fsdp_strategy

FORMAT_METADATA = {
    "distrib_optim_sharding_type": "fsdp_dtensor", "singleton_local_shards": False, "chained_optim_avoid_prefix": True,
}  # fmt: skip


def wrap(scenario: Scenario, mesh: Mesh, model: Any) -> Any:
    """The model under FullyShardedDataParallel; where parameters are sharded, each module is a unit.

    Elsewhere there are none, and the library is told so: left to itself, main makes units of a GPTModel's layers there
    too, which 0.19 does not.
    """
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel

    options, strategy = scenario.options, fsdp_strategy(scenario)
    config = DistributedDataParallelConfig(
        use_megatron_fsdp=True,
        use_distributed_optimizer=True,
        data_parallel_sharding_strategy=strategy,
        grad_reduce_in_fp32=scenario.dtype.reduce == "fp32",
        overlap_grad_reduce="overlap_grad_reduce" in options,
        overlap_param_gather="overlap_param_gather" in options,
        num_distributed_optimizer_instances=mesh.dp_replicate,
        average_in_collective="average_in_collective" in options,
        gradient_reduce_div_fusion=False,  # only NCCL has it
        bucket_size=None if "one_bucket" in options else BUCKET_SIZE,
    )
    units = [ProbeModule] if strategy == "optim_grads_params" else []
    return FullyShardedDataParallel(model.config, config, model, fsdp_unit_modules=units)


# What a rank owns


@dataclass(frozen=True)
class Ownership:
    """What this rank has of each parameter. Further instances of the optimizer have the same parts.

    starts: parameter → flat offset of its shard in its local parameter, by our own arithmetic. How long the shard is,
    the library says, so that a map of it that is wrong shows as a gap or an overlap.
    """

    state: TrainState
    starts: Mapping[str, int]

    @classmethod
    def from_state(cls, state: TrainState) -> Ownership:
        scenario, (_, part, _) = state.scenario, state.mesh.coordinate(state.rank)
        spec, shapes = state.spec, _local_shapes(state)
        if fsdp_strategy(scenario) == "no_shard":
            return cls(state, dict.fromkeys(shapes, 0))
        units = fsdp_strategy(scenario) == "optim_grads_params"
        size = None if "one_bucket" in scenario.options else BUCKET_SIZE
        # From 0.16 on an expert is known by its name, to which a Float16Module adds a word where there is one; before,
        # by a mark that only expert parallelism gives it.
        experts = ".experts." if state.release >= (0, 16, 0) else ""
        prefix = "module." if half_dtype(scenario.dtype) else ""
        starts: dict[str, int] = {}
        found = core_buckets(spec, scenario.dtype, shapes, units=units, size=size, experts=experts, prefix=prefix)
        for bucket in found:
            starts |= {fqn: cuts[part][0] for fqn, cuts in cut(bucket, shapes, state.mesh.dp_shard).items()}
        return cls(state, starts)

    def parts(self) -> Iterator[Owned]:
        """The slices of parameters that this rank's optimizer updates, with the optimizer state for each."""
        optimizer = self.state.optimizer.optimizer
        groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        leaves = getattr(optimizer, "sub_optimizers", [optimizer])
        inner = {id(p): (leaf, group) for leaf in leaves for group in leaf.param_groups for p in group["params"]}
        copies = getattr(optimizer, "param_to_inner_param", {})
        for name, param in _buffer(self.state).optimizer_named_parameters:
            if id(param) not in groups or not local_part(param).numel():
                continue
            fqn, stepped = _fqn(self.state, name), copies.get(param, param)
            leaf, inner_group = inner.get(id(stepped), (None, {}))
            kept = leaf.state.get(stepped, {}) if leaf is not None else {}
            if not isinstance(leaf, torch.optim.Adam):  # FusedAdam counts by group
                kept = {key: value for key, value in kept.items() if key != "step"}
            length = local_part(param).numel()
            yield Owned(fqn, self.starts[fqn], length, param, stepped, True, kept, groups[id(param)], inner_group)

    def model_part(self, fqn: str) -> tuple[torch.Tensor, int]:
        """This rank's own shard in the buffer of the parameters that forwards use: the shards of other ranks there
        may be old until a forward gathers them."""
        for group in _buffer(self.state).parameter_groups:
            for index, raw in enumerate(group.params):
                if _fqn(self.state, _buffer(self.state).param_to_name[raw]) != fqn:
                    continue
                if group.model_weight_buffer is None:  # nothing is sharded
                    return local_part(raw).detach().reshape(-1), 0
                return group.model_weight_buffer.get_item(index, only_shard=True).detach(), self.starts[fqn]
        raise KeyError(fqn)


def _local_shapes(state: TrainState) -> dict[str, tuple[int, ...]]:
    """The shape that the library has for each parameter's tensor-parallel shard."""
    boxes = {p.fqn: local_box(p.spec, state.mesh, state.rank, 1) for p in state.spec.unique_params}
    return {fqn: fused_shape(state.spec.param(fqn).spec, box.size) for fqn, box in boxes.items()}


def _buffer(state: TrainState) -> Any:
    """The ParamAndGradBuffer of the only chunk."""
    return state.chunks[0].param_and_grad_buffer


def _fqn(state: TrainState, name: str) -> str:
    """A name below MegatronFSDP without the Float16Module that may be in between."""
    known = {named.fqn for named in state.spec.params}
    return name if name in known else name.removeprefix("module.")


# Checkpoints


def save(state: TrainState, path: Path) -> None:
    """Write a checkpoint into the folder `path`. Runs on all ranks."""
    content = _preprocessed(state, _content(state, loading=False, whole=True))
    if state.rank == 0:
        path.mkdir(parents=True, exist_ok=True)
    save_state_dict(content, storage_writer=FileSystemWriter(str(path)))
    dist.barrier()


def load(state: TrainState, path: Path, *, whole: bool) -> None:
    """Read a checkpoint of `save`; without `whole` the model only, as for finetuning. Runs on all ranks."""
    raw = _content(state, loading=True, whole=whole)
    model, optimizer = raw["model"].copy(), dict(raw.get("optimizer", {}))
    loaded = _preprocessed(state, raw)
    reader = FileSystemReader(str(path))
    load_state_dict(loaded, storage_reader=reader, planner=DefaultLoadPlanner(allow_partial_load=False))
    state.chunks[0].load_state_dict(model, strict=True)
    if whole:
        state.optimizer.load_state_dict(optimizer)
        state.scheduler.load_state_dict(loaded["opt_param_scheduler"])
        state.iteration = loaded["iteration"]
    dist.barrier()


def _unwrapped(state: TrainState) -> Any:
    """The model as the library's `unwrap_model` gives it, which takes FullyShardedDataParallel off, but not the
    MegatronFSDP inside."""
    return state.chunks[0].module


def _content(state: TrainState, *, loading: bool, whole: bool) -> dict[str, Any]:
    """The state dict that a training script saves, or builds as the target of a load: version, iteration, model,
    optimizer and scheduler."""
    content: dict[str, Any] = {"checkpoint_version": 3.0, "iteration": 1 if loading else state.iteration}
    content["model"] = _unwrapped(state).state_dict_for_save_checkpoint()
    if whole:
        content["optimizer"] = state.optimizer.sharded_state_dict(
            content, is_loading=loading, metadata=dict(FORMAT_METADATA)
        )
        content["opt_param_scheduler"] = state.scheduler.state_dict()
    return content


def _preprocessed(state: TrainState, content: dict[str, Any]) -> dict[str, Any]:
    """The state dict as the library prepares it for DCP: fused weights split, and the chunks of uneven DTensors
    described."""
    from megatron.core.distributed.fsdp.src.megatron_fsdp.uneven_dtensor import preprocess_state_dict_for_uneven_dtensor
    from megatron.core.transformer import fsdp_dtensor_checkpoint as library

    content = {**content, "model": content["model"].copy()}
    if "optimizer" in content:
        content["optimizer"] = {**content["optimizer"], "state": content["optimizer"]["state"].copy()}
    library.handle_fp8_extra_state_case(content["model"])
    sections = {name for named in state.spec.params for name, _ in named.spec.sections}
    handlers = {"handle_swiglu_in_state_dict": "_w" in sections, "handle_gdn_in_state_dict": ".query" in sections}
    for name, needed in handlers.items():
        if needed and hasattr(library, name):
            split = getattr(library, name)(_unwrapped(state), content["model"], content.get("optimizer"))
            if split is not None:  # before 0.16 the dicts are changed in place
                content["model"] = split[0]
                content |= {"optimizer": split[1]} if "optimizer" in content else {}
    preprocess_state_dict_for_uneven_dtensor(content)
    return content
