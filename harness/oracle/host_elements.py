"""Which elements the hybrid CPU-offload optimizer of Megatron steps on the host, from the written contract.

Every rank of a distributed optimizer offloads whole shards, in the order in which its optimizer holds them, until they
make up the fraction asked for: the shards of fp32 parameters first, then those of parameters in half, each in the order
of the gradient buffers (`partition`).

Source: megatron.core.optimizer.cpu_offloading.HybridDeviceOptimizer._get_sub_optimizer_param_groups (0.13 to 0.16).
*Does not know* the order of several param groups, which changes with the release, nor that of experts that ranks share
out: `constraints` leaves those scenarios out where it decides the kernel.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from harness.models import model_spec
from harness.oracle.contracts import half_dtype, has_scales, kernels, rules
from harness.oracle.partition import Shard, local_numel, shards, whole
from harness.scenario import Mesh, Scenario

Mask = npt.NDArray[np.bool_]


def mixes_kernels(scenario: Scenario) -> bool:
    """Whether host and device step with kernels that round differently, so that it matters which one an element has:
    two implementations, or one on the CPU and on a GPU."""
    device, host = kernels(scenario)
    return device != host or (scenario.device == "cuda" and 0 < scenario.offload.fraction < 1)


def knows_host(scenario: Scenario) -> bool:
    """Whether it is known which elements are stepped on the host, so that ranks record them.

    Not so without a distributed optimizer where something is in half: the masters are made after the hybrid optimizer
    has taken its parameters, and none is on the host (NVIDIA/Megatron-LM issue 4046).
    """
    if not scenario.offload.fraction or not rules(scenario.system).host_kernel:
        return False
    if scenario.sharding == "replicate" and half_dtype(scenario.dtype) is not None:
        return False
    return scenario.offload.fraction == 1 or not (_has_groups(scenario) or _shares_experts(scenario))


def partition_matters(scenario: Scenario) -> bool:
    """Whether the way in which ranks partition the state decides what is stepped on the host, by which kernel, or over
    what a scale is taken."""
    return has_scales(scenario) or mixes_kernels(scenario) or (knows_host(scenario) and scenario.offload.fraction < 1)


def _has_groups(scenario: Scenario) -> bool:
    return scenario.optimizer.groups == "model" and len(model_spec(scenario.model).groups) > 1


def _shares_experts(scenario: Scenario) -> bool:
    experts = any(p.spec.ep_dim is not None for p in model_spec(scenario.model).params)
    return scenario.expert_parallel > 1 and experts


def host_elements(scenario: Scenario, mesh: Mesh) -> dict[str, Mask]:
    """Fully qualified name → which elements of the logical tensor are stepped on the host, in its shape.

    Empty where that is not known and does not matter. Ranks of a tensor-parallel group decide alike: their shards are
    of equal size.

    Raises:
        ValueError: they are not.
    """
    if not mixes_kernels(scenario) and not knows_host(scenario):
        return {}
    spec = model_spec(scenario.model)
    trained = [p for p in spec.unique_params if p.spec.trainable == "yes"]
    local = {p.fqn: np.zeros(local_numel(p, mesh), np.bool_) for p in trained}
    for rank in range(mesh.dp_shard):
        for shard in _offloaded(list(shards(scenario, trained, mesh, rank)), scenario.offload.fraction):
            local[shard.fqn][shard.start : shard.end] = True
    params = {param.fqn: param for param in trained}
    return {fqn: whole([mask] * mesh.tp, params[fqn], params[fqn].spec.tp_dim) for fqn, mask in local.items()}


def _offloaded(shards: list[Shard], fraction: float) -> Iterator[Shard]:
    """The shards, in the optimizer's order, that come before the threshold is reached."""
    threshold = sum(shard.end - shard.start for shard in shards) * fraction
    taken = 0
    for shard in shards:
        if taken < threshold:
            taken += shard.end - shard.start
            yield shard
