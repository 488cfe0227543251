"""The elements that Megatron's hybrid CPU-offload optimizer steps on the host, from the written contract.

Host and device step with kernels that round differently, so that the twin has to know which one an element has. Every
rank of a distributed optimizer offloads whole shards, in the order in which its optimizer holds them, until they make
up the fraction asked for: first the shards of fp32 parameters, then those of parameters in half, each in the order of
the gradient buffers (`partition`). For example, with `offload=cpu=0.5` a rank with shards of 8, 4 and 4 elements
offloads the first one only.

Source: megatron.core.optimizer.cpu_offloading.HybridDeviceOptimizer._get_sub_optimizer_param_groups (0.13 to 0.16).
*Does not know* the order of several param groups, which changes with the release, nor that of experts that ranks share
out: `constraints` leaves those scenarios out where it decides the kernel.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from shardproof.mechanisms.megatron.partition import Shard, local_numel, shards, whole
from shardproof.models import model_spec
from shardproof.scenario import Mesh, Scenario


def host_elements(scenario: Scenario, mesh: Mesh) -> dict[str, bytes]:
    """Name → which elements of the logical tensor are stepped on the host, one byte each, row-major.

    Ranks of a tensor-parallel group decide alike: their shards are of equal size.

    Raises:
        ValueError: they are not.
    """
    spec = model_spec(scenario.model)
    trained = [p for p in spec.unique_params if p.spec.trainable == "yes"]
    local = {p.fqn: np.zeros(local_numel(p, mesh), np.bool_) for p in trained}
    for rank in range(mesh.dp_shard):
        for shard in _offloaded(list(shards(scenario, trained, mesh, rank)), scenario.offload.fraction):
            local[shard.fqn][shard.start : shard.end] = True
    params = {param.fqn: param for param in trained}
    return {fqn: whole([mask] * mesh.tp, params[fqn], params[fqn].spec.tp_dim).tobytes() for fqn, mask in local.items()}


def _offloaded(shards: list[Shard], fraction: float) -> Iterator[Shard]:
    """The shards, in the optimizer's order, that come before the threshold is reached."""
    threshold = sum(shard.end - shard.start for shard in shards) * fraction
    taken = 0
    for shard in shards:
        if taken < threshold:
            taken += shard.end - shard.start
            yield shard
