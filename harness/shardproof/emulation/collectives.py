"""Collectives that NCCL supports and gloo does not: premultiplied reductions, mixed dtypes in one call, and gathers of
tensors of different sizes.

`PREMUL_SUM` multiplies each rank's input by a factor, in the input's dtype, and then sums; `AVG` does so with one over
the size of the group. In a coalescing block torch hands NCCL all gathers or all reduce-scatters at once, with the
reduction that the first of them asked for. gloo would take the first one's dtype as well, and mix up bytes, so here
each runs by itself. For example, Megatron-FSDP puts a bf16 and an fp32 gradient into one block; the fp32 one is then
reduced as the bf16 one asked for, which is a defect of it that only shows because this does the same.

`all_gather` into a list takes a tensor of another size from each rank, where the list says so; torch hands NCCL one
broadcast a rank then, and so does this. Megatron-Core's layer-wise optimizer gathers whole parameters so.

*Does not emulate* other reductions of NCCL, its order of summation, nor that a block's collectives start at its end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from shardproof.emulation.used_symbols import touch
from shardproof.ownership import refused

_all_reduce = dist.all_reduce
_reduce_scatter = dist.reduce_scatter_tensor
_all_gather = dist.all_gather_into_tensor
_all_gather_list = dist.all_gather


@dataclass(frozen=True)
class Premultiplied:
    """The reduction that `_make_nccl_premul_sum` returns."""

    factor: float


_blocks: dict[Any, tuple[list[Any], Any]] = {}
"""Process group → its last coalescing block, and the reduction that the first collective in it asked for."""


def _make_nccl_premul_sum(factor: float) -> Premultiplied:
    touch("torch.distributed._make_nccl_premul_sum")
    return Premultiplied(float(factor))


def _of_block(op: Any, group: Any) -> Any:
    """The reduction that a collective is really done with: inside a block, the one that the block's first collective
    asked for."""
    block = distributed_c10d._world.pg_coalesce_state.get(group)
    if block is None:
        return op
    if group not in _blocks or _blocks[group][0] is not block:
        _blocks[group] = (block, op)
    return _blocks[group][1]


def _factor(op: Any, group: Any) -> float | None:
    """The factor that a collective's input is multiplied by; None where the backend has the reduction itself."""
    if isinstance(op, Premultiplied):
        return op.factor
    if op == dist.ReduceOp.AVG:
        touch("torch.distributed.ReduceOp.AVG")
        return 1.0 / int(group.size())
    return None


@contextmanager
def _alone(group: Any) -> Iterator[bool]:
    """Leave the group's coalescing block for a moment, if one is open; tells whether there was one."""
    blocks = distributed_c10d._world.pg_coalesce_state
    block = blocks.pop(group, None)
    try:
        yield block is not None
    finally:
        if block is not None:
            blocks[group] = block


def _all_reduce_scaled(
    tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
) -> Any:
    group = group or distributed_c10d._get_default_group()
    op = _of_block(op, group)
    factor = _factor(op, group)
    if factor is None:
        return _all_reduce(tensor, op=op, group=group, async_op=async_op)
    tensor.mul_(factor)
    return _all_reduce(tensor, group=group, async_op=async_op)


def _reduce_scatter_scaled(
    output: torch.Tensor,
    input: torch.Tensor,  # noqa: A002  (torch's name)
    op: Any = dist.ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
) -> Any:
    group = group or distributed_c10d._get_default_group()
    op = _of_block(op, group)
    factor = _factor(op, group)
    with _alone(group) as in_block:
        if factor is None:
            return _reduce_scatter(output, input, op=op, group=group, async_op=async_op and not in_block)
        return _reduce_scatter(output, input * factor, group=group, async_op=async_op and not in_block)


def _all_gather_alone(
    output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any = None, async_op: bool = False
) -> Any:
    group = group or distributed_c10d._get_default_group()
    with _alone(group) as in_block:
        return _all_gather(output_tensor, input_tensor, group=group, async_op=async_op and not in_block)


class _Ended:
    """A collective that has ended when it returns."""

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True


def _all_gather_uneven(
    tensor_list: list[torch.Tensor], tensor: torch.Tensor, group: Any = None, async_op: bool = False
) -> Any:
    if len({part.shape for part in tensor_list}) <= 1 or distributed_c10d._rank_not_in_group(group):
        return _all_gather_list(tensor_list, tensor, group=group, async_op=async_op)
    touch("torch.distributed.all_gather (uneven)")
    distributed_c10d._ensure_all_tensors_same_dtype(tensor_list, tensor)
    group = group or distributed_c10d._get_default_group()
    own = tensor_list[group.rank()]
    if own.numel() != tensor.numel():
        raise refused(ValueError("Tensor input and output of _broadcast_oop must have the same number of elements"))
    own.copy_(tensor.reshape(own.shape))
    for rank, part in enumerate(tensor_list):
        if part.numel():
            dist.broadcast(part, group=group, group_src=rank)
    return _Ended() if async_op else None


REPLACEMENTS: dict[str, Callable[..., Any]] = {
    "_make_nccl_premul_sum": _make_nccl_premul_sum,
    "all_gather": _all_gather_uneven,
    "all_gather_into_tensor": _all_gather_alone,
    "all_reduce": _all_reduce_scaled,
    "reduce_scatter_tensor": _reduce_scatter_scaled,
}
"""Attributes of `torch.distributed` that are replaced while the device is emulated."""
