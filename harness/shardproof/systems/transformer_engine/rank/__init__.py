"""TransformerEngine's layers and FusedAdam on one rank, sharded by FSDP2, saved and loaded by DCP.

Everything but the layers and the optimizer is torch's training loop. Tensor-parallel layers are told the mesh through
their own `set_device_mesh` where the release has that; where it has not, each rank's part looks to FSDP2 like a whole
parameter, which is what pull request 2713 is about (docs/transformer-engine.md).

*Verifies* nothing by itself. *Does not exercise* the layers' kernels, fp8 parameters, CUDA streams, graph-safe states
of random generators.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore

from shardproof.emulation import te_extension
from shardproof.emulation.kernels import join_remainder
from shardproof.emulation.used_symbols import used_symbols
from shardproof.mechanisms.fsdp2.rank.checkpoint import StateDictCheckpoint
from shardproof.mechanisms.fsdp2.rank.shard import fully_shard_units
from shardproof.mechanisms.probe_module import TORCH_DTYPE, local_part
from shardproof.models import NamedParam
from shardproof.observe.record import Record
from shardproof.oracle.extra_state import EXTRA_STATE
from shardproof.program import Op
from shardproof.protocol.system import RankContext
from shardproof.scenario import Optimizer, Scenario
from shardproof.systems.transformer_engine.contract import CONTRACT
from shardproof.systems.transformer_engine.quantised import SCALE
from shardproof.systems.transformer_engine.rank import model as layers
from shardproof.systems.transformer_engine.rank.streams import TrackedStreams
from shardproof.systems.transformer_engine.switches import CALIBRATING, NO_EXTRA_STATE, TAGS, is_layers, is_quantised
from shardproof.torch_loop.loop import TorchRank, context_of, rehearse

MASTER = "master_param"

library = te_extension.library
"""Imports the Python layer over the extension of a device."""


class Rank(TorchRank):
    """The `RankSystem` of `transformer-engine`."""

    def __init__(self, context: RankContext) -> None:
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # the library asks this of tensor-parallel users
        os.environ.setdefault("NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE", "1")  # and this of whoever trusts a checkpoint
        te_extension.library(context.scenario.device)
        super().__init__(context)
        self.checkpoint = replace(
            StateDictCheckpoint.from_text(self.scenario.checkpoint),
            left_out="_extra_state" if NO_EXTRA_STATE in self.scenario.options else "",
            loads=2 if "again" in self.scenario.options else 1,
        )
        self.fused = CONTRACT.fused(self.scenario)

    def build(self, op: Op) -> None:
        super().build(op)
        streams = self.streams()
        if streams.generators:
            streams.seed(op.init_seed)
            self.state.streams, self.probe.dropout = streams, streams.draw

    def streams(self) -> TrackedStreams:
        """The generators that the script keeps."""
        return TrackedStreams(self.context)

    def reload_params(self, op: Op) -> None:
        """Set the masters that exist to the values that the parameters have now. Those that do not exist yet are
        made by the first step."""
        if not self.fused:
            return
        for fqn, parameter in self.params.items():
            if MASTER in self.state.optimizer.state.get(parameter, {}) and self._has_master(self.spec.param(fqn)):
                own = local_part(parameter.detach())
                refreshed = torch.zeros_like(own, dtype=torch.int16) if self._remainders else own.float()
                self.state.optimizer.set_scaled_state(parameter, MASTER, refreshed)  # type: ignore[attr-defined]

    def save(self, op: Op) -> None:
        with self._extra_state():
            self.checkpoint.save(self.state, self.context.checkpoint_path(op), self.in_flight)

    def load(self, op: Op) -> None:
        with self._extra_state():
            self.checkpoint.load(self.state, self.context.checkpoint_path(op))

    def load_model_only(self, op: Op) -> None:
        with self._extra_state():
            self.checkpoint.load_model_only(self.state, self.context.checkpoint_path(op))

    def backward(self, op: Op, *, overflow: bool) -> None:
        with layers.calibrating(self.scenario):
            super().backward(op, overflow=overflow)

    def _extra_state(self) -> AbstractContextManager[None]:
        """Inside, layers can give and take what they have calibrated: they wait for the device first."""
        return layers.device(self.scenario) if CALIBRATING in self.scenario.options else nullcontext()

    # Construction

    def make_model(self, init_seed: int) -> nn.Module:
        if not is_layers(self.scenario.model):
            return super().make_model(init_seed)
        self.init_seed = init_seed
        root = layers.build(self.probe, self.mesh, meta="meta" in self.scenario.options)
        if "meta" not in self.scenario.options:
            layers.fill(root, self.probe, init_seed, self._forward_slices)
        return root

    def shard(self, root: nn.Module) -> None:
        self.tags = _tags(root)
        fully_shard_units(root, self.context, self.mesh)
        if "meta" in self.scenario.options:
            layers.materialise(root, self.scenario)
            self.tags = _tags(root)
            layers.fill(root, self.probe, self.init_seed, self._own_slices)

    def held_parameters(self, root: nn.Module) -> dict[str, nn.Parameter]:
        """All parameters that the model has, those too that the scenario's model does not name: an optimizer would
        step them."""
        return {
            **super().held_parameters(root),
            **{name: p for name, p in root.named_parameters() if name not in self._known},
        }

    def param_groups(self, ask: Optimizer) -> list[dict[str, Any]]:
        groups = super().param_groups(ask)
        if ask.groups == "model":
            groups[0]["params"] += [p for name, p in self.params.items() if name not in self._known]
        return groups

    @cached_property
    def _known(self) -> frozenset[str]:
        return frozenset(named.fqn for named in self.spec.params)

    def make_optimizer(self, init_seed: int) -> torch.optim.Optimizer:
        if not self.fused:
            return super().make_optimizer(init_seed)
        from transformer_engine.pytorch.optimizers import FusedAdam  # type: ignore[import-not-found]

        policy, ask = self.scenario.dtype, self.contract.at_build(self.scenario, init_seed)
        with layers.device(self.scenario):
            optimizer: torch.optim.Optimizer = FusedAdam(
                self.param_groups(ask),
                lr=ask.lr,
                betas=(ask.beta1, ask.beta2),
                eps=ask.eps,
                weight_decay=ask.weight_decay,
                adam_w_mode=ask.kind == "adamw",
                master_weights=policy.master is not None,
                master_weight_dtype=TORCH_DTYPE[policy.master or "fp32"],
                exp_avg_dtype=TORCH_DTYPE[policy.exp_avg or "fp32"],
                exp_avg_sq_dtype=TORCH_DTYPE[policy.exp_avg_sq or "fp32"],
                store_param_remainders=self._remainders,
                capturable="capturable" in self.scenario.options,
            )
        return optimizer

    @property
    def _remainders(self) -> bool:
        return CONTRACT.keeps_remainders(self.scenario)

    def _has_master(self, named: NamedParam) -> bool:
        return self.probe.parameters[named.fqn].stages.master is not None

    # Observation: reads only

    def observe(self, op: Op) -> Iterator[Record]:
        yield from super().observe(op)
        for fqn, parameter in self.params.items():
            if fqn not in self._known:
                yield self.whole(op, "param", fqn, local_part(parameter.detach()))
        if TAGS in self.scenario.options and op.kind == "build":
            for fqn, dim in self.tags.items():
                yield self.integer(op, "tag", fqn, dim)
        with self._extra_state():
            states = [self.whole(op, EXTRA_STATE, name, content) for name, content in _extra_states(self.state.model)]
        yield from states
        if self.state.streams:
            yield from self.state.streams.records(op)
        if symbols := used_symbols():
            yield self.text(op, "emulated", "symbols", "\n".join(symbols))

    def model_records(self, op: Op) -> Iterator[Record]:
        """Parameters and buffers; of a quantised parameter its bytes and the inverse of its scale."""
        quantised = {p.fqn for p in self.spec.params if is_quantised(self.scenario, p.spec)}
        if not quantised:
            yield from super().model_records(op)
            return
        for named in self.spec.params:
            own = layers.held(self.state.model.get_parameter(named.fqn))
            if named.fqn not in quantised:
                yield self.sharded(op, "param", named, own)
                continue
            yield self.sharded(op, "param", named, own._data.view(torch.float8_e4m3fn))  # type: ignore[attr-defined]
            inverse = own._scale_inv.expand(own.numel()).reshape(own.shape)  # type: ignore[attr-defined]
            yield self.sharded(op, "quant_scale", named, inverse)._replace(fqn=f"{named.fqn}.{SCALE}")

    def state_records(self, op: Op, fqn: str, parameter: nn.Parameter, state: dict[str, Any]) -> Iterator[Record]:
        if not self.fused:
            yield from super().state_records(op, fqn, parameter, state)
            return
        if fqn not in self._known:
            return
        named, own = self.spec.param(fqn), layers.held(parameter)
        for role in ("exp_avg", "exp_avg_sq"):
            if role in state:
                yield self.sharded(op, role, named, local_part(state[role]))
        scaled = self.probe.parameters[named.fqn].scaled
        yield from self._scales(op, named, parameter, state, scaled)
        if (
            self._has_master(named)
            and self.contract.has_masters(self.scenario, op)
            and (MASTER in state or "master" not in scaled)
        ):
            yield self.sharded(op, "master", named, self._master(own, state))
        elif not self._has_master(named) and MASTER in state:
            yield self.sharded(op, "master", named, local_part(state[MASTER]))
        if state:
            groups = self.state.optimizer.param_groups
            own_group = next(group for group in groups if any(p is parameter for p in group["params"]))
            yield self.whole(op, "step", fqn, torch.tensor(float(own_group["step"])))

    def _scales(
        self, op: Op, named: NamedParam, parameter: nn.Parameter, state: dict[str, Any], roles: tuple[str, ...]
    ) -> Iterator[Record]:
        """The scale of each element of a scaled state: that of this rank's shard."""
        own = local_part(parameter.detach())
        for role in roles:
            name = MASTER if role == "master" else role
            if name in state and (role != "master" or self.contract.has_masters(self.scenario, op)):
                scale = self.state.optimizer._scales[parameter][name]  # type: ignore[attr-defined]
                record = self.sharded(op, "quant_scale", named, scale.expand(own.numel()).reshape(own.shape))
                yield record._replace(fqn=f"{named.fqn}.{role}")

    def _master(self, own: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
        """The master of a parameter's shard; before the first step, what that step will make it.

        A master of another size than the shard is recorded as it is stored, so that the comparison finds it.
        """
        if MASTER not in state:
            return own.float()
        kept = local_part(state[MASTER])
        return join_remainder(own, kept) if kept.dtype is torch.int16 and kept.shape == own.shape else kept

    def _forward_slices(self, fqn: str) -> tuple[slice, ...]:
        return _slices(*self.forward_box(fqn))

    def _own_slices(self, fqn: str) -> tuple[slice, ...]:
        box = self.own_box(self.spec.param(fqn))
        return _slices(box.start, box.size)


def _slices(start: tuple[int, ...], size: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(at, at + count) for at, count in zip(start, size, strict=True))


def _tags(root: nn.Module) -> dict[str, int]:
    """Along which dim each parameter that is marked as tensor-parallel is sharded."""
    marked = ((name, p) for name, p in root.named_parameters() if getattr(p, "tensor_model_parallel", False))
    return {name: int(getattr(p, "partition_dim", -1)) for name, p in marked}


def _extra_states(root: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The layers' own extra state by its name in a state dict: uint8, shape (bytes,)."""
    for path, module in root.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            yield f"{path}._extra_state", module.get_extra_state()


def warm_up() -> None:
    """Import the library and run a small scenario in this process, so that ranks forked from it inherit all that."""
    library()
    base = Scenario(
        system="transformer-engine", model="te_layers", program="build step save build load step"
    ).with_axes({"optimizer": "adamw/impl=multi_tensor"})
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        for number, scenario in enumerate((base, replace(base, model="frozen_tower"))):
            rehearse(Rank(context_of(scenario, Path(folder, str(number)))), scenario)
        dist.destroy_process_group()
