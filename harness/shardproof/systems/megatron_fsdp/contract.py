"""What Megatron-FSDP promises.

It shards the rows of each parameter, but unlike FSDP2 unevenly: where a bucket is cut, there one rank ends and the next
begins (`shardproof.mechanisms.row_buffers`). The optimizer steps main parameters, which are masters in fp32 unless
asked otherwise, and a checkpoint holds those under the names of the model's parameters.
"""

from __future__ import annotations

from shardproof.mechanisms.fused_adam import PRECISION_AWARE, FusedAdamContract
from shardproof.oracle.contract import Clause
from shardproof.scenario import Scenario


class MegatronFsdpContract(FusedAdamContract):
    """What differs from a plain torch loop: flat buffers cut at whole rows, main parameters (masters) beside the
    model's, and gradients of zeros for what no forward uses."""

    clauses = (
        Clause(
            "a unit's parameters of one dtype lie in a flat buffer, widest rows first, that is cut into equal ranges "
            "at whole rows of every parameter: dim 0 is sharded unevenly, and a parameter may lie on one rank alone",
            "megatron_fsdp.param_and_grad_buffer, build_data_parallel_buffer_index",
        ),
        Clause(
            "the optimizer steps on main parameters of main_params_dtype, fp32 unless asked otherwise; the model's are "
            "their rounded values",
            "megatron_fsdp.MixedPrecisionPolicy.main_params_dtype",
        ),
        Clause(
            "gradients accumulate and reduce in main_grads_dtype, else in the parameter's own dtype; the optimizer "
            "reads them in the dtype of what it steps on",
            "megatron_fsdp.MixedPrecisionPolicy.main_grads_dtype",
        ),
        Clause(
            "where gradients are decoupled, FusedAdam reads them in the dtype they were reduced in; a precision-aware "
            "one steps the model's parameters and keeps their masters in its state: no main parameters",
            "megatron_fsdp README, use_decoupled_grad; TransformerEngine FusedAdam, use_decoupled_grad, master_weights",
        ),
        Clause(
            "sharding leaves no trace: an optimizer that was sharded has taken no step and moved no parameter",
            "NVIDIA/Megatron-LM pull request 5976",
        ),
        Clause("a checkpoint's model section holds the main parameters", "megatron_fsdp.MegatronFSDP, state_dict"),
    )
    zero_gradients = True
    trainable_only = True
    owner_groups = True
    sharded_masters = True

    def main_params(self, scenario: Scenario) -> str | None:
        """The dtype of the main parameters that the library is asked for; None for none."""
        if {"no_main_params", PRECISION_AWARE} & {*scenario.options}:
            return None
        return scenario.dtype.master or ("fp32" if scenario.dtype.storage == "fp32" else None)

    def master(self, scenario: Scenario, storage: str) -> str | None:
        """Main parameters have memory of their own also where they are of the model's dtype."""
        return self.main_params(scenario) or super().master(scenario, storage)

    def reference_sharding(self, scenario: Scenario) -> str:
        apart = self.main_params(scenario) and scenario.sharding == "fully_shard"
        return "zero1" if apart else super().reference_sharding(scenario)

    def masters_in_state(self, scenario: Scenario) -> bool:
        return PRECISION_AWARE in scenario.options and not scenario.offload.fraction

    def masters_in_model(self, scenario: Scenario) -> bool:
        return not self.masters_in_state(scenario)

    def fused(self, scenario: Scenario) -> bool:
        """Whether FusedAdam steps, not torch's optimizer."""
        return scenario.optimizer.impl == "multi_tensor"


CONTRACT = MegatronFsdpContract()
