"""What TransformerEngine promises under FSDP2: its FusedAdam's state, quantised parameters, tensor-parallel layers.

Whatever is stored in another form than the optimizer steps it, such as an fp8 matrix with its scale, is worked out
after the twin (`completed`): twin and reference step masters, and know nothing of how a layer keeps its weight.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from collections.abc import Set as AbstractSet

from shardproof.mechanisms.fused_adam import HALF_AWAY, REMAINDERS, FusedAdamContract
from shardproof.models import ParamSpec, draws, model_spec
from shardproof.observe.logical import Key, Logical, Value
from shardproof.observe.record import LIVE
from shardproof.oracle.contract import Clause
from shardproof.oracle.inputs import PreciseState
from shardproof.program import expand
from shardproof.scenario import Mesh, Scenario
from shardproof.systems.transformer_engine.switches import FP8_BOUND, NO_EXTRA_STATE, TAGS, is_quantised


class TransformerEngineContract(FusedAdamContract):
    """What differs from FSDP2 with torch's optimizers: masters are a part of FusedAdam's state, and gradients come
    in the parameter's own dtype."""

    clauses = (
        Clause(
            "with master_weights a half-precision parameter has a master in the optimizer's state, made of it by the "
            "first step; an fp32 parameter is its own",
            "TransformerEngine FusedAdam, master_weights",
        ),
        Clause(
            "moments are fp32 unless asked otherwise; a state dict holds them, and masters, in fp32, remainders as "
            "int16",
            "TransformerEngine FusedAdam.state_dict",
        ),
        HALF_AWAY,
        Clause(
            "an fp16 master or moment is divided by a scale, the largest magnitude of the rank's shard over 32752; a "
            "load takes new scales, and leaves the state dict that it is given as it was",
            "TransformerEngine FusedAdam, _apply_scale, load_state_dict",
        ),
        Clause(
            "a quantised matrix is its fp32 master times a scale, in fp8e4m3, saturating: 448 over the master's "
            "largest magnitude on all shards (current scaling), or the scale that the recipe's state has (delayed: 1 "
            "without an autocast); a checkpoint stores its bytes and the scale's inverse, and a load gives back both",
            "TransformerEngine Float8CurrentScaling, DelayedScaling, Float8Tensor.__reduce_ex__ (2.16.0 on)",
        ),
        Clause(
            "a stream starts from the seed with which it is added, is left by a fork where the fork's draws end, and "
            "comes back as it was from the states that the script saved",
            "TransformerEngine CudaRNGStatesTracker.add, fork, get_states, set_states",
        ),
        Clause(
            "a tensor-parallel layer's parameters are sharded over the mesh that it was given: what a checkpoint "
            "stores under a name is the whole tensor, and loads on any other mesh",
            "NVIDIA/TransformerEngine pull request 2713",
        ),
    )
    sharded_masters = True

    def masters_in_state(self, scenario: Scenario) -> bool:
        return True

    def beside(self, scenario: Scenario) -> bool:
        return True

    def calculates_in(self, scenario: Scenario, spec: ParamSpec) -> str:
        return "fp32" if self.fused(scenario) else super().calculates_in(scenario, spec)

    def fused(self, scenario: Scenario) -> bool:
        """Whether FusedAdam steps, not torch's optimizer."""
        return scenario.optimizer.impl == "multi_tensor"

    def main_grad(self, scenario: Scenario, storage: str, reduce: str, stepped: str) -> str:
        return storage

    def moment(self, scenario: Scenario, stepped: str) -> str:
        return "fp32" if self.fused(scenario) else stepped

    def precise_state(self, scenario: Scenario) -> PreciseState | None:
        policy = scenario.dtype
        declared = policy.exp_avg or policy.exp_avg_sq or self.scaled_master(scenario)
        # a half-precision parameter without a master, whose moments are fp32
        halves_alone = policy.storage != "fp32" and policy.master is None
        return self.own_dtypes(scenario) if self.fused(scenario) and (declared or halves_alone) else None

    def scale_domains(self, scenario: Scenario, mesh: Mesh) -> Mapping[str, tuple[int, ...]]:
        from shardproof.systems.transformer_engine.domains import row_domains

        return row_domains(model_spec(scenario.model), mesh) if self.has_scales(scenario) else {}

    def initial_dtypes(self, scenario: Scenario, spec: ParamSpec, mesh: Mesh) -> tuple[str, ...]:
        stored = super().initial_dtypes(scenario, spec, mesh)
        return ("fp8e4m3", *stored) if is_quantised(scenario, spec) else stored

    def initial_bound(self, scenario: Scenario, spec: ParamSpec) -> float:
        return FP8_BOUND if is_quantised(scenario, spec) else math.inf

    def completed(self, truth: Logical, observed: Logical, scenario: Scenario, done: AbstractSet[int]) -> Logical:
        from shardproof.systems.transformer_engine.quantised import quantised

        marks = {
            Key(op.index, LIVE, "tag", fqn): Value("int64", (), struct.pack("<q", dim))
            for op in expand(scenario)
            if op.kind == "build" and op.index in done
            for fqn, dim in parallel_tags(scenario, op.mesh).items()
        }
        if draws(scenario.model):
            from shardproof.oracle.generators import torch_streams

            marks |= torch_streams(scenario, device=True)
        return quantised(truth, scenario, self) | marks

    def stores_extra_state(self, scenario: Scenario) -> bool:
        return NO_EXTRA_STATE not in scenario.options

    def keeps_remainders(self, scenario: Scenario) -> bool:
        """Whether FusedAdam keeps only the low 16 bits of a bf16 parameter's master, and not all of it."""
        return REMAINDERS in scenario.options


def parallel_tags(scenario: Scenario, mesh: Mesh) -> dict[str, int]:
    """Name of each parameter that a tensor-parallel layer must mark as a part of a whole (`tensor_model_parallel`) →
    the dim that is cut (`partition_dim`). Empty where a scenario does not record marks.

    Megatron reads the marks wherever it takes a norm over all gradients, or reduces them. A shard without a mark counts
    as a replica, and is left out on all ranks but the first; a replica with a mark is counted once on every rank.
    Neither raises. Source: megatron.core.tensor_parallel.param_is_not_tensor_parallel_duplicate, TransformerEngine
    `set_tensor_model_parallel_attributes`.
    """
    if TAGS not in scenario.options or mesh.tp == 1:
        return {}
    dims = {param.fqn: param.spec.tp_dim for param in model_spec(scenario.model).unique_params}
    return {fqn: dim for fqn, dim in dims.items() if dim is not None}


CONTRACT = TransformerEngineContract()
