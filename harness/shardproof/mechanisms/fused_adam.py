"""The promises of FusedAdam (apex and TransformerEngine), for the contracts of all systems that use it as their
optimizer.

FusedAdam can keep masters and moments inside its own state, in dtypes of their own. Two of its ways decide bits:

* In bf16 training a master may be kept as the 16 bits that its parameter lacks, a *remainder*. The parameter is then
  the master rounded half away from zero, and not to the nearest even.
* State in fp16 or fp8 is divided by a scale, which is taken from the largest magnitude in the rank's shard of the
  parameter. The elements of that shard are the *domain* of the scale. So the stored bits depend on how ranks share a
  parameter out: the twin must know the domains, though it knows no ranks.

docs/fused-adam.md has the arithmetic, step by step.

Source: transformer_engine.pytorch.optimizers.FusedAdam (2.10 to 2.20.2).
"""

from __future__ import annotations

from abc import abstractmethod

from shardproof.models import ParamSpec
from shardproof.oracle.contract import KINDS, Clause, Contract
from shardproof.oracle.inputs import PreciseState, Stages
from shardproof.protocol.accepts import Constraint
from shardproof.scenario import Scenario

SCALED = ("fp16", "fp8e4m3")
"""Dtypes in which a state is divided by a scale (`dtype_to_range_map`)."""

DECOUPLED = "decoupled_grad"
"""The switch under which FusedAdam reads gradients in the dtype that they were reduced in, not in that of what it
steps on."""
PRECISION_AWARE = "precision_aware"
"""The switch under which FusedAdam keeps masters and moments in its own state, in dtypes of their own, and reads
gradients as `decoupled_grad` does. Megatron's `use_precision_aware_optimizer`."""
REMAINDERS = "remainders"
"""The switch under which a bf16 parameter's master is kept as its lower 16 bits."""

SCALES = Clause(
    "a master in fp16 and moments in fp16 or fp8 are divided by a scale: the largest magnitude of the rank's shard of "
    "the parameter over 32752 or 448; a checkpoint holds their product in fp32, and a load takes new scales",
    "TransformerEngine FusedAdam, _apply_scale, get_unscaled_state, set_scaled_state",
)
HALF_AWAY = Clause(
    "a bf16 parameter is its fp32 master rounded half away from zero where the optimizer keeps the lower 16 bits of "
    "the master as a signed remainder",
    "TransformerEngine FusedAdam, store_param_remainders",
)


class FusedAdamContract(Contract):
    """A contract of a system that may step with FusedAdam (`optimizer …/impl=multi_tensor`)."""

    @abstractmethod
    def masters_in_state(self, scenario: Scenario) -> bool:
        """Whether masters are a part of FusedAdam's state."""

    def beside(self, scenario: Scenario) -> bool:
        """Whether FusedAdam keeps masters in dtypes of their own in its state, beside the parameters that it steps."""
        return PRECISION_AWARE in scenario.options

    def reads_decoupled(self, scenario: Scenario) -> bool:
        """Whether the optimizer reads gradients in the dtype that they were reduced in."""
        return not {DECOUPLED, PRECISION_AWARE}.isdisjoint(scenario.options)

    def scaled_master(self, scenario: Scenario) -> bool:
        """Whether masters are stored in fp16 and divided by a scale, while FusedAdam calculates with them in fp32."""
        return scenario.dtype.master == "fp16" and self.beside(scenario)

    def calculates_in(self, scenario: Scenario, spec: ParamSpec) -> str:
        stepped = self.stepped_dtype(scenario, spec)
        return "fp32" if stepped == "fp16" and self.scaled_master(scenario) else stepped

    def master(self, scenario: Scenario, storage: str) -> str | None:
        if self.scaled_master(scenario):
            return scenario.dtype.master if storage != "fp32" else None
        return super().master(scenario, storage)

    def main_grad(self, scenario: Scenario, storage: str, reduce: str, stepped: str) -> str:
        return (scenario.dtype.grad or reduce) if self.reads_decoupled(scenario) else stepped

    def moment(self, scenario: Scenario, stepped: str) -> str:
        return "fp32" if PRECISION_AWARE in scenario.options else stepped

    def precise_state(self, scenario: Scenario) -> PreciseState | None:
        if self.kernels(scenario)[0] != "multi_tensor" or not self.reads_decoupled(scenario):
            return None
        return self.own_dtypes(scenario)

    def own_dtypes(self, scenario: Scenario) -> PreciseState:
        """The dtypes that FusedAdam is asked for."""
        policy = scenario.dtype
        master = "fp16" if policy.master == "fp16" else None
        return PreciseState(policy.exp_avg or "fp32", policy.exp_avg_sq or "fp32", master)

    def scaled_roles(self, scenario: Scenario, stages: Stages) -> tuple[str, ...]:
        if not self.masters_in_state(scenario):
            return ()
        kept = {"master": stages.master, "exp_avg": stages.exp_avg, "exp_avg_sq": stages.exp_avg_sq}
        return tuple(role for role, dtype in kept.items() if dtype in SCALED)

    def rounds_half_away(self, scenario: Scenario, stages: Stages) -> bool:
        asked = {PRECISION_AWARE, REMAINDERS} & set(scenario.options)
        return bool(asked) and self.masters_in_state(scenario) and (stages.storage, stages.master) == ("bf16", "fp32")


def constraints(contract: FusedAdamContract) -> tuple[Constraint, ...]:
    """What has no meaning, or no single right answer, for a system with such a contract."""
    return (
        Constraint(
            "multi-tensor-half",
            "FusedAdam and FusedSGD step in fp32 here: parameters in half have masters, save where FusedAdam alone "
            "steps",
            lambda s: (
                s.optimizer.impl == "multi_tensor" and any(contract.calculates_in(s, spec) != "fp32" for spec in KINDS)
            ),
        ),
        Constraint(
            "precision-aware-dtypes",
            "only a precision-aware optimizer has dtypes of its own for the gradient it reads and for its moments",
            lambda s: bool(s.dtype.grad or s.dtype.exp_avg or s.dtype.exp_avg_sq) and not contract.beside(s),
        ),
        Constraint(
            "precision-aware-gradient",
            "a precision-aware optimizer reads the gradient in the dtype it was reduced in",
            lambda s: (
                s.dtype.grad is not None
                and any(s.dtype.grad != contract.stages(s, spec, s.mesh).reduce for spec in KINDS)
            ),
        ),
        Constraint(
            "precision-aware-offload",
            "the hybrid optimizer of CPU offload takes no dtypes for its moments",
            lambda s: bool(s.dtype.exp_avg or s.dtype.exp_avg_sq) and s.offload.fraction > 0,
        ),
    )
