"""Records of local tensors that have no place in a logical one, and of ranks that hold nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from shardproof.layout import Box, chunk
from shardproof.observe.assemble import assemble
from shardproof.observe.record import Record
from shardproof.trainer.observed import placed
from shardproof.trainer.rank.boxes import Sharding
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
    uneven,
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


def of_rank(rank: int, lengths: Sequence[int], rows: int) -> list[Record]:
    """The record of a rank's rows of a tensor of `rows` × 2, as a DTensor tells it: even parts by rule, if it can."""
    start, even = chunk(rows, len(lengths), rank)
    begin, length = sum(lengths[:rank]), lengths[rank]
    rule, local = Box((start, 0), (even, 2)), torch.arange(2.0 * begin, 2.0 * (begin + length)).reshape(length, 2)
    box = rule if even == length else uneven(rule, [Sharding(0, len(lengths), rank)], (length, 2), (rows, 2))
    assert box is not None
    return list(records_of(At(1, rank), "param", Held(local, (Cut(("w",), (rows, 2), box, Box((0, 0), box.size)),))))


@given(st.lists(st.integers(0, 4), min_size=1, max_size=4).filter(any))
def test_parts_that_are_cut_unevenly_make_one_tensor(lengths: list[int]) -> None:
    """Each begins where the one of the rank before it ends, also where some lie as even parts would."""
    rows = sum(lengths)
    records = [record for rank in range(len(lengths)) for record in of_rank(rank, lengths, rows)]
    logical, problems = assemble(placed(reversed(records)))
    assert not problems
    assert [(key.fqn, value.shape) for key, value in logical.items()] == [("w", (rows, 2))]
    (value,) = logical.values()
    assert np.frombuffer(value.data, np.float32).tolist() == list(range(2 * rows))


def test_parts_that_are_too_short_together_are_each_ranks_own() -> None:
    logical, problems = assemble(placed([*of_rank(0, [3, 1], 5), *of_rank(1, [3, 1], 5)]))
    assert not problems
    assert [(key.fqn, value.shape) for key, value in logical.items()] == [("rank0.w", (3, 2)), ("rank1.w", (1, 2))]


def test_a_part_that_is_cut_in_another_dim_has_no_place() -> None:
    rule, sharding = Box((0, 0), (4, 2)), Sharding(0, 2, 0)
    assert uneven(rule, [sharding], (5, 1), (8, 2)) is None
    assert uneven(rule, [sharding], (10,), (8, 2)) is None
    assert uneven(rule, [sharding, Sharding(1, 2, 0)], (5, 2), (8, 2)) is None
