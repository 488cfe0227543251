"""NCCL's reductions and coalescing blocks over gloo, in a world of one rank: what is scaled, and by whose factor."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from shardproof.emulation import cuda
from torch._C._distributed_c10d import HashStore
from torch.distributed import distributed_c10d

pytestmark = pytest.mark.filterwarnings("ignore:.* is deprecated:FutureWarning")  # torch 2.13 has new names for some


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    with cuda.emulated():
        yield
    dist.destroy_process_group()


def half() -> object:
    return dist._make_nccl_premul_sum(0.5)  # type: ignore[attr-defined]


def scattered(op: object, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    output = torch.zeros(2, dtype=dtype)
    dist.reduce_scatter_tensor(output, torch.tensor([2.0, 4.0], dtype=dtype), op=op)
    return output


def test_a_premultiplied_sum_scales_the_input_and_leaves_it_alone_where_there_is_an_output() -> None:
    tensor = torch.tensor([2.0, 4.0])
    dist.all_reduce(tensor, op=half())
    assert tensor.tolist() == [1.0, 2.0]
    given, output = torch.tensor([2.0, 4.0]), torch.zeros(2)
    dist.reduce_scatter_tensor(output, given, op=half())
    assert (given.tolist(), output.tolist()) == ([2.0, 4.0], [1.0, 2.0])


def test_an_average_divides_by_the_size_of_the_group_and_a_sum_is_torchs() -> None:
    assert scattered(dist.ReduceOp.AVG).tolist() == [2.0, 4.0]
    assert scattered(dist.ReduceOp.SUM).tolist() == [2.0, 4.0]


def test_a_block_reduces_all_as_its_first_asks() -> None:
    group = dist.group.WORLD
    with distributed_c10d._coalescing_manager(group):  # type: ignore[attr-defined]
        plain = [scattered(dist.ReduceOp.SUM, torch.bfloat16), scattered(half())]
    with distributed_c10d._coalescing_manager(group):  # type: ignore[attr-defined]
        halved = [scattered(half()), scattered(dist.ReduceOp.SUM, torch.bfloat16)]
    assert [t.tolist() for t in plain] == [[2.0, 4.0], [2.0, 4.0]]
    assert [t.tolist() for t in halved] == [[1.0, 2.0], [1.0, 2.0]]


def test_a_block_gathers_every_tensor_in_its_own_dtype() -> None:
    half_precision, single = torch.zeros(2, dtype=torch.bfloat16), torch.zeros(3)
    with distributed_c10d._coalescing_manager(dist.group.WORLD, async_ops=True) as block:  # type: ignore[attr-defined]
        dist.all_gather_into_tensor(half_precision, torch.tensor([1.0, 2.0], dtype=torch.bfloat16), async_op=True)
        dist.all_gather_into_tensor(single, torch.tensor([3.0, 4.0, 5.0]), async_op=True)
    block.wait()
    assert (half_precision.tolist(), single.tolist()) == ([1.0, 2.0], [3.0, 4.0, 5.0])
