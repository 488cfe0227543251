"""The groups of elements that share one scale when FusedAdam keeps its state scaled in a narrow dtype, from the written
contract.

A moment in fp16 or fp8 is stored divided by a scale. FusedAdam takes one scale for every tensor that it sees, from the
largest magnitude in it, and what it sees under a distributed optimizer is the rank's shard of a parameter. So a
*domain* is a rank's shard, and the stored bits depend on the partition. For example, where two ranks own elements 0 to
9 and 10 to 15 of a weight, the twin takes one scale over the first ten elements and one over the other six, although it
has the whole weight in one tensor.

The shards are intervals of Megatron's buffers, which `partition` computes.

Source: transformer_engine.pytorch.optimizers.FusedAdam._apply_scale (2.10 to 2.20.2), over the shards of
megatron.core.optimizer.distrib_optimizer (see `partition`).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shardproof.mechanisms.megatron.partition import local_numel, shards, whole
from shardproof.models import NamedParam, model_spec
from shardproof.scenario import Mesh, Scenario

Domains = npt.NDArray[np.int64]


def scale_domains(scenario: Scenario, mesh: Mesh) -> dict[str, tuple[int, ...]]:
    """Fully qualified name of each trained parameter → the number of each element's domain, row-major. A number
    occurs in one parameter only."""
    spec = model_spec(scenario.model)
    trained = [p for p in spec.unique_params if p.spec.trainable == "yes"]
    shared = scenario.expert_parallel
    experts = [p for p in trained if p.spec.ep_dim is not None and shared > 1]
    dense = [p for p in trained if p not in experts]
    found: dict[str, tuple[int, ...]] = {}
    for params, ways in ((dense, 1), (experts, shared)):
        cut = Mesh(1, max(1, mesh.dp_shard // ways), mesh.tp if ways == 1 else 1)
        for fqn, local in _owners(scenario, params, cut, ways).items():
            param = spec.param(fqn)
            dim, parts = (param.spec.tp_dim, mesh.tp) if ways == 1 else (param.spec.ep_dim, ways)
            numbered = [local + cut.dp_shard * part + mesh.world * len(found) for part in range(parts)]
            found[fqn] = tuple(whole(numbered, param, dim).ravel().tolist())
    return found


def _owners(scenario: Scenario, params: list[NamedParam], mesh: Mesh, ways: int) -> dict[str, Domains]:
    """The owner of each element that a model-parallel rank has: a rank of its data-parallel group."""
    owner = {p.fqn: np.zeros(local_numel(p, mesh, ways), np.int64) for p in params}
    for rank in range(mesh.dp_shard):
        for shard in shards(scenario, params, mesh, rank, ways):
            owner[shard.fqn][shard.start : shard.end] = rank
    return owner
