"""Records of local tensors that have no place in a logical one, and of ranks that hold nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from shardproof.layout import Box
from shardproof.observe.assemble import assemble
from shardproof.trainer.rank.modules import Modules
from shardproof.trainer.rank.optimizers import Optimizer
from shardproof.trainer.rank.pieces import (
    At,
    Cut,
    Held,
    Unreadable,
    array_records,
    raw,
    records_beside,
    records_of,
    whole_tensor,
)


def interval(start: int, count: int, *, own: bool = False, rank_holds: int = 5) -> Held:
    """A flat piece of a tensor of 3 × 3, at position 1 of a local buffer."""
    cut = Cut(("w", "tied"), (3, 3), Box((start,), (count,)), Box((1,), (count,)), flat=True)
    return Held(torch.arange(float(rank_holds)), (cut,), own)


def test_a_flat_piece_is_an_interval_of_the_original_under_each_name() -> None:
    first, second = records_of(At(2, 1), "param", interval(4, 3))
    assert (first.fqn, second.fqn) == ("w", "tied")
    assert (first.op, first.rank, first.shape, first.start, first.size, first.flat) == (2, 1, (3, 3), (4,), (3,), True)
    assert np.frombuffer(first.data, np.float32).tolist() == [1.0, 2.0, 3.0]


def test_what_is_a_ranks_own_is_whole_as_it_lies_there() -> None:
    record, _ = records_of(At(0, 1), "param", interval(4, 3, own=True))
    assert (record.fqn, record.shape, record.start, record.size, record.flat) == ("rank1.w", (3,), (0,), (3,), False)
    assert not assemble([record])[1]


def test_state_of_another_shape_beside_a_piece_is_the_ranks_own() -> None:
    (record,) = records_beside(At(0, 1), "state", torch.ones(2), interval(4, 3), ".rows")
    assert (record.fqn, record.shape) == ("rank1.w.rows", (2,))
    (record,) = records_beside(At(0, 1), "state", torch.ones(2), whole_tensor(torch.ones(3), ("w", "tied")), ".rows")
    assert (record.fqn, record.shape) == ("w.rows", (2,))


def test_a_rank_without_elements_joins_with_one_that_has_them() -> None:
    records = [*records_of(At(0, 0), "param", interval(0, 9, rank_holds=10)),
               *records_of(At(0, 1), "param", interval(9, 0, rank_holds=1))]  # fmt: skip
    logical, problems = assemble(records)
    assert not problems
    assert {value.shape for value in logical.values()} == {(3, 3)}


@pytest.mark.parametrize(("start", "count", "counted"), [(0, 9, ["w"]), (0, 4, ["w"]), (9, 0, [])])
def test_a_count_of_steps_is_of_ranks_that_hold_elements(start: int, count: int, counted: list[str]) -> None:
    weight = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.Adam([weight])
    optimizer.state[weight]["step"] = torch.tensor(3.0)
    modules = Modules(parameters={id(weight): interval(start, count, rank_holds=count + 1)})
    records = [*Optimizer("optimizer", optimizer).records(At(0, 1), modules, {})]
    assert [record.fqn for record in records if record.role == "step"] == counted


def test_every_rank_holds_an_empty_parameter() -> None:
    assert interval(9, 0).nothing_of(("w", "tied"))
    assert not interval(9, 0).nothing_of(("other",))
    assert not whole_tensor(torch.empty(0, 3), ("w",)).nothing_of(("w",))


@pytest.mark.parametrize(
    ("dtype", "name", "each"),
    [
        (torch.bfloat16, "bf16", 1), (torch.int8, "int8", 1), (torch.uint16, "uint16", 1), (torch.bool, "bool", 1),
        (torch.float8_e4m3fn, "fp8e4m3", 1), (torch.float8_e5m2, "fp8e5m2", 1), (torch.complex64, "fp32", 2),
        (torch.complex128, "fp64", 2), (torch.float8_e8m0fnu, "uint8", 1),
    ],
)  # fmt: skip
def test_every_dtype_is_recorded(dtype: torch.dtype, name: str, each: int) -> None:
    tensor = torch.zeros(6, dtype=dtype)
    assert raw(tensor) == (name, each, bytes(6 * dtype.itemsize))
    flat = Held(tensor, (Cut(("w",), (2, 3), Box((0,), (6,)), Box((0,), (6,)), flat=True),))
    for place in (flat, whole_tensor(tensor.reshape(2, 3), ("w",))):
        (value,), problems = (lambda found: (found[0].values(), found[1]))(assemble(records_of(At(0, 0), "p", place)))
        assert not problems
        assert value.shape == ((2, 3) if each == 1 else (2, 3, each))


@pytest.mark.parametrize("tensor", [torch.ones(2, device="meta"), torch.ones(2, 2).to_sparse()])
def test_what_has_no_bytes_in_rows_is_unreadable(tensor: torch.Tensor) -> None:
    with pytest.raises(Unreadable):
        list(records_of(At(0, 0), "param", whole_tensor(tensor, ("w",))))


def test_arrays() -> None:
    (record,) = array_records(At(0, 0), "extra_state", "a", np.zeros((2, 2), "complex64"))
    assert (record.dtype, record.shape) == ("uint8", (2, 2, 8))
    objects: np.ndarray[Any, Any] = np.array([object()])
    with pytest.raises(Unreadable, match="objects"):
        list(array_records(At(0, 0), "extra_state", "a", objects))
