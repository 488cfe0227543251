"""Which parameters a tensor-parallel layer marks as a part of a whole, and along which dim, from the written contract.

Megatron reads the marks wherever it takes a norm over all gradients, or reduces them. A shard without a mark counts as
a replica, and is left out on all ranks but the first; a replica with a mark is counted once on every rank. Neither
raises.

Source: megatron.core.tensor_parallel.param_is_not_tensor_parallel_duplicate, TransformerEngine
`set_tensor_model_parallel_attributes`.
"""

from __future__ import annotations

from shardproof.models import model_spec
from shardproof.scenario import Mesh, Scenario
from shardproof.systems.transformer_engine.switches import TAGS


def parallel_tags(scenario: Scenario, mesh: Mesh) -> dict[str, int]:
    """Name of each parameter that must have `tensor_model_parallel` → its `partition_dim`. Empty where a scenario
    does not record marks."""
    if TAGS not in scenario.options or mesh.tp == 1:
        return {}
    dims = {param.fqn: param.spec.tp_dim for param in model_spec(scenario.model).unique_params}
    return {fqn: dim for fqn, dim in dims.items() if dim is not None}
