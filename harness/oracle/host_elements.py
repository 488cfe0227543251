"""Which elements the hybrid CPU-offload optimizer of Megatron steps on the host, from the written contract.

Every rank of a distributed optimizer offloads whole shards, in the order in which its optimizer holds them, until they
make up the fraction asked for: the shards of fp32 parameters first, then those of parameters in half, each in the order
of the gradient buffers. There is a buffer for each storage dtype, in the order in which the model shows them; it holds
the parameters last to first, each from a multiple of 64 elements on, in buckets whose ends are padded to a multiple of
128 and of the ranks; every rank owns an equal part of every bucket.

Source: megatron.core.optimizer.cpu_offloading.HybridDeviceOptimizer._get_sub_optimizer_param_groups,
distrib_optimizer._build_model_and_main_param_groups, distributed.param_and_grad_buffer._ParamAndGradBuffer
(0.13 to 0.16). *Does not know* the order of several param groups, which changes with the release, nor that of experts
that ranks share out: `constraints` leaves those scenarios out where it decides the kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import lcm, prod

import numpy as np
import numpy.typing as npt

from harness.models import ModelSpec, NamedParam, model_spec, storage_dtype
from harness.oracle.contracts import half_dtype, kernels, rules
from harness.scenario import Mesh, Scenario

BUCKET_ELEMENTS = 48
"""Elements after which a bucket is closed, where the scenario has several."""

START, END = 64, 128
"""What a parameter's start and a bucket's end are padded to a multiple of, in elements."""

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class _Shard:
    """Elements `start` to `end` of a parameter's flattened tensor-parallel shard, owned by one rank."""

    fqn: str
    start: int
    end: int


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
    """Whether the way in which ranks partition the state decides what is stepped on the host, or by which kernel."""
    return mixes_kernels(scenario) or (knows_host(scenario) and scenario.offload.fraction < 1)


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
    local = {p.fqn: np.zeros(_local_numel(p, mesh.tp), np.bool_) for p in trained}
    for rank in range(mesh.dp_shard):
        for shard in _offloaded(list(_shards(scenario, trained, mesh, rank)), scenario.offload.fraction):
            local[shard.fqn][shard.start : shard.end] = True
    return {fqn: _whole(mask, spec, fqn, mesh.tp) for fqn, mask in local.items()}


def _offloaded(shards: list[_Shard], fraction: float) -> Iterator[_Shard]:
    """The shards, in the optimizer's order, that come before the threshold is reached."""
    threshold = sum(shard.end - shard.start for shard in shards) * fraction
    taken = 0
    for shard in shards:
        if taken < threshold:
            taken += shard.end - shard.start
            yield shard


def _shards(scenario: Scenario, trained: list[NamedParam], mesh: Mesh, rank: int) -> Iterator[_Shard]:
    """What a rank owns, in the order in which its optimizer holds it: without a distributed optimizer everything, in
    the model's order."""
    if scenario.sharding == "replicate":
        yield from (_Shard(param.fqn, 0, _local_numel(param, mesh.tp)) for param in trained)
        return
    buffers: dict[str, list[NamedParam]] = {}
    for param in trained:
        buffers.setdefault(storage_dtype(scenario.dtype, param.spec), []).append(param)
    for storage in sorted(buffers, key=lambda dtype: dtype != "fp32"):
        yield from _owned(buffers[storage], scenario, mesh, rank)


def _owned(params: list[NamedParam], scenario: Scenario, mesh: Mesh, rank: int) -> Iterator[_Shard]:
    """What a rank owns of one buffer, bucket by bucket."""
    limit = BUCKET_ELEMENTS if "overlap_grad_reduce" in scenario.options and "one_bucket" not in scenario.options else 0
    bucket: list[tuple[NamedParam, int]] = []
    start = end = 0
    for param in reversed(params):
        at = -(-end // START) * START
        end = at + _local_numel(param, mesh.tp)
        bucket.append((param, at))
        if limit and end - start >= limit:
            yield from _of_bucket(bucket, start, end, mesh, rank)
            start = end = _padded_end(end, mesh)
            bucket = []
    if bucket:
        yield from _of_bucket(bucket, start, end, mesh, rank)


def _of_bucket(bucket: list[tuple[NamedParam, int]], start: int, end: int, mesh: Mesh, rank: int) -> Iterator[_Shard]:
    share = (_padded_end(end, mesh) - start) // mesh.dp_shard
    low, high = start + rank * share, start + (rank + 1) * share
    for param, at in bucket:
        first, last = max(low, at), min(high, at + _local_numel(param, mesh.tp))
        if first < last:
            yield _Shard(param.fqn, first - at, last - at)


def _padded_end(end: int, mesh: Mesh) -> int:
    multiple = lcm(mesh.dp_shard, END)
    return -(-end // multiple) * multiple


def _local_numel(param: NamedParam, tp: int) -> int:
    return param.spec.numel // tp if param.spec.tp_dim is not None else param.spec.numel


def _whole(local: Mask, spec: ModelSpec, fqn: str, tp: int) -> Mask:
    """The logical tensor's mask from that of a tensor-parallel shard, which is the same on every rank."""
    shape, dim = spec.param(fqn).spec.shape, spec.param(fqn).spec.tp_dim
    if tp == 1 or dim is None:
        return local.reshape(shape)
    piece = (*shape[:dim], shape[dim] // tp, *shape[dim + 1 :])
    if prod(piece) != local.size:
        raise ValueError(
            f"tensor parallelism {tp} does not divide dim {dim} of {fqn}, {list(shape)}: allowed: its divisors"
        )
    return np.concatenate([local.reshape(piece)] * tp, axis=dim)
