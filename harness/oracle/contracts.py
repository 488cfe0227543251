"""Contracts: what a system promises where the answer is a choice, as data with its source.

The twin and the grid take the dtype of every stage from here. A system is checked against it: a system
that stores, computes or reduces in another dtype than its contract is a mismatch, not a variant.
"""

from __future__ import annotations

from dataclasses import dataclass

from harness.models import ParamSpec, storage_dtype
from harness.scenario import Scenario


@dataclass(frozen=True)
class Stages:
    """The dtype of each stage a parameter's value and gradient pass through.

    storage: the model's parameter. compute: inside the forward, and of the gradient that comes out of it.
    accumulate: sum over microbatches. reduce: sum over ranks. main_grad: as the optimizer sees it.
    master: separate master parameter (None: the optimizer steps on `storage`). state: moments.
    """

    storage: str
    compute: str
    accumulate: str
    reduce: str
    main_grad: str
    master: str | None
    state: str


@dataclass(frozen=True)
class Contract:
    """One promise: what it says and where that is written."""

    promise: str
    source: str


FSDP2 = (
    Contract(
        "parameters compute in param_dtype, else in their storage dtype",
        "torch.distributed.fsdp.MixedPrecisionPolicy",
    ),
    Contract(
        "gradients accumulate and reduce in reduce_dtype, else in the compute dtype",
        "torch FSDPParam.to_accumulated_grad_if_needed",
    ),
    Contract(
        "the sharded gradient is cast to the storage dtype before the optimizer",
        "torch foreach_reduce, orig_dtype",
    ),
    Contract(
        "optimizer state has the dtype of the tensor it steps on",
        "torch.optim.adam._init_group, zeros_like",
    ),
    Contract(
        "dim 0 is sharded in torch.chunk order, inside the tp shard",
        "torch FSDPParam._init_sharded_param, _StridedShard",
    ),
)

ZERO1 = (
    Contract(
        "gradient buffers hold the reduce dtype, else the storage dtype; accumulation happens in the buffer",
        "Megatron DistributedDataParallel, grad_reduce_in_fp32",
    ),
    Contract(
        "with masters, main gradient, master and moments have their dtype; the model parameter is the rounded master",
        "Megatron DistributedOptimizer",
    ),
    Contract(
        "a buffer is a flat concatenation of a dtype's parameters in reverse order, padded so that each rank owns an "
        "equal range of each bucket",
        "Megatron _ParamAndGradBuffer",
    ),
)


def stages(scenario: Scenario, spec: ParamSpec) -> Stages:
    """The dtype contract of one parameter under a scenario's sharding and dtype policy."""
    policy = scenario.dtype
    storage = storage_dtype(policy, spec)
    compute = policy.param or storage
    reduce = policy.reduce or compute
    if scenario.sharding == "fully_shard":
        return Stages(storage, compute, reduce, reduce, storage, None, storage)
    master = policy.master if policy.master and policy.master != storage else None
    main_grad = master or storage
    return Stages(storage, compute, reduce, reduce, main_grad, master, master or storage)
