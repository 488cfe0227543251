"""NCCL's reductions that multiply before they add, over a backend that only adds.

`PREMUL_SUM` multiplies each rank's input by a factor in the input's dtype, then sums; `AVG` does so with one over the
size of the group. Inside a coalescing block every collective is reduced as its first one is, as torch's fast path does.

*Does not emulate* other reductions of NCCL, nor its order of summation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from harness.emulation.touched import touch

_all_reduce = dist.all_reduce
_reduce_scatter = dist.reduce_scatter_tensor


@dataclass(frozen=True)
class Premultiplied:
    """The reduction that `_make_nccl_premul_sum` returns."""

    factor: float


_first: dict[Any, Any] = {}
"""Process group → the reduction that the first collective of its open coalescing block asked for."""


def _make_nccl_premul_sum(factor: float) -> Premultiplied:
    touch("torch.distributed._make_nccl_premul_sum")
    return Premultiplied(float(factor))


def _factor(op: Any, group: Any) -> float | None:
    """What a collective's input is multiplied by; None for a reduction of the backend's own."""
    group = group or distributed_c10d._get_default_group()
    waiting = distributed_c10d._world.pg_coalesce_state.get(group)
    if waiting is not None:
        op = _first.setdefault(group, op) if waiting else _set_first(group, op)
    if isinstance(op, Premultiplied):
        return op.factor
    if op == dist.ReduceOp.AVG:
        touch("torch.distributed.ReduceOp.AVG")
        return 1.0 / int(group.size())
    return None


def _set_first(group: Any, op: Any) -> Any:
    _first[group] = op
    return op


def _plain(op: Any) -> Any:
    return dist.ReduceOp.SUM if isinstance(op, Premultiplied) or op == dist.ReduceOp.AVG else op


def _all_reduce_scaled(
    tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
) -> Any:
    factor = _factor(op, group)
    if factor is not None:
        tensor.mul_(factor)
    return _all_reduce(tensor, op=_plain(op), group=group, async_op=async_op)


def _reduce_scatter_scaled(
    output: torch.Tensor,
    input: torch.Tensor,  # noqa: A002  (torch's name)
    op: Any = dist.ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
) -> Any:
    factor = _factor(op, group)
    source = input if factor is None else input * factor
    return _reduce_scatter(output, source, op=_plain(op), group=group, async_op=async_op)


REPLACEMENTS: dict[str, Callable[..., Any]] = {
    "_make_nccl_premul_sum": _make_nccl_premul_sum,
    "all_reduce": _all_reduce_scaled,
    "reduce_scatter_tensor": _reduce_scatter_scaled,
}
"""Attributes of `torch.distributed` that are replaced while the device is emulated."""
