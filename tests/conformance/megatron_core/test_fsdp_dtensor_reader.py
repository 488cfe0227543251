"""The reader of fsdp_dtensor puts the sections of a fused weight where the logical parameter has them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from shardproof.diff import diff
from shardproof.layout import chunk
from shardproof.models import NamedParam, model_spec
from shardproof.observe.assemble import assemble
from shardproof.observe.logical import Key, Value
from shardproof.observe.record import Record
from shardproof.program import expand
from shardproof.readers.errors import CheckpointError
from shardproof.readers.pieces import TensorPiece
from shardproof.scenario import Scenario
from shardproof.systems.megatron_core.fsdp_dtensor import _Reader

BASE = Scenario(system="megatron-core", sharding="zero1", checkpoint="fsdp_dtensor").with_axes(
    {"dtype": "bf16/master=fp32", "program": "build step save", "options": "fsdp_optim"}
)


def reader(model: str, mesh: str) -> _Reader:
    scenario = BASE.with_axes({"model": model, "mesh": mesh})
    return _Reader(expand(scenario)[2], scenario, Path("checkpoint"))


def numbered(named: NamedParam) -> np.ndarray:
    return np.arange(named.spec.numel, dtype=np.float32).reshape(named.spec.shape)


def section(named: NamedParam, index: int, tp: int) -> np.ndarray:
    """A section of the numbered parameter as all tensor-parallel ranks together have it."""
    whole = numbered(named)
    if named.spec.stacked:
        return whole[index]
    shares = []
    for rank in range(tp):
        start, size = chunk(named.spec.shape[0], tp, rank)
        edges = [0, *np.cumsum([rows // tp for _, rows in named.spec.sections])]
        at = list(pairwise(edges))[index]
        shares.append(whole[start : start + size][at[0] : at[1]])
    return np.concatenate(shares)


def piece(path: tuple[str, ...], values: np.ndarray, first: int, last: int) -> TensorPiece:
    start = (first, *(0,) * (values.ndim - 1))
    return TensorPiece(path, 0, "fp32", values.shape, start, values[first:last].shape, values[first:last].tobytes())


def put_together(named: NamedParam, records: list[Record]) -> np.ndarray:
    found = np.full(named.spec.shape, np.nan, np.float32)
    for record in records:
        assert (record.role, record.fqn, record.shape) == ("exp_avg", named.fqn, named.spec.shape)
        place = tuple(slice(s, s + n) for s, n in zip(record.start, record.size, strict=True))
        assert np.isnan(found[place]).all()
        found[place] = np.frombuffer(record.data, np.float32).reshape(record.size)
    return found


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("model", ["gated", "gdn"])
def test_all_sections_in_pieces_make_the_parameter(model: str, tp: int) -> None:
    reads = reader(model, f"1x2x{tp}")
    for named in model_spec(model).params:
        records = []
        for index, (suffix, _) in enumerate(named.spec.sections):
            values = section(named, index, tp)
            path = ("optimizer", "state", f"module.module.{named.fqn}{suffix}", "exp_avg")
            for first, last in pairwise([0, 1, len(values)]):
                records += list(reads.records(piece(path, values, first, last)))
        assert np.array_equal(put_together(named, records), numbered(named))


def test_a_frozen_weight_is_stored_as_it_is_and_a_trained_one_as_its_master() -> None:
    reads = reader("frozen_tower", "1x2x1")
    for named in model_spec("frozen_tower").unique_params:
        values = np.zeros(named.spec.shape, np.float32)
        (record,) = reads.records(piece(("model", f"module.module.{named.fqn}"), values, 0, len(values)))
        assert record.role == ("master" if named.spec.trainable == "yes" else "param"), named.fqn


def test_too_few_rows_are_a_gap_and_too_many_are_refused() -> None:
    reads, named = reader("gated", "1x2x1"), model_spec("gated").params[0]
    path = ("optimizer", "state", f"{named.fqn}_w", "exp_avg")
    rows = section(named, 0, 1)
    half = put_together(named, list(reads.records(piece(path, rows[:3], 0, 3))))
    assert np.isnan(half).sum() == named.spec.numel - 9
    with pytest.raises(CheckpointError, match="whole rows"):
        list(reads.records(piece(path, np.concatenate([rows, rows]), 0, 12)))


Pieces = list[tuple[int, np.ndarray, int, int]]
"""Section, its rows as they are stored, first and last row of a piece."""


def whole(named: NamedParam, tp: int) -> Pieces:
    sections = [section(named, index, tp) for index in range(len(named.spec.sections))]
    return [(index, rows, 0, len(rows)) for index, rows in enumerate(sections)]


def without_last_row(named: NamedParam, tp: int) -> Pieces:
    """A section that was measured in one rank's part."""
    (index, rows, _, last), *rest = whole(named, tp)
    return [(index, rows, 0, last - 1), *rest]


def with_a_row_twice(named: NamedParam, tp: int) -> Pieces:
    """Two ranks that both think the first row theirs."""
    (index, rows, first, last), *rest = whole(named, tp)
    return [(index, rows, first, last), (index, rows, 0, 1), *rest]


def with_sections_swapped(named: NamedParam, tp: int) -> Pieces:
    """Two sections of one size under each other's names."""
    first, second, *rest = whole(named, tp)
    return [(first[0], *second[1:]), (second[0], *first[1:]), *rest]


def with_rows_shifted(named: NamedParam, tp: int) -> Pieces:
    """A section cut in another coordinate: each row holds what belongs one further."""
    (index, rows, first, last), *rest = whole(named, tp)
    return [(index, np.roll(rows, 1, axis=0), first, last), *rest]


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("model", ["gated", "gdn"])
@pytest.mark.parametrize(
    ("planted", "kinds"),
    [
        (whole, set()),
        (without_last_row, {"gap"}),
        (with_a_row_twice, {"overlap"}),
        (with_sections_swapped, {"bits"}),
        (with_rows_shifted, {"bits"}),
    ],
)
def test_what_is_planted_is_named(
    planted: Callable[[NamedParam, int], Pieces], kinds: set[str], model: str, tp: int
) -> None:
    reads = reader(model, f"1x2x{tp}")
    for named in model_spec(model).params:
        records = []
        for index, rows, first, last in planted(named, tp):
            path = ("optimizer", "state", f"module.module.{named.fqn}{named.spec.sections[index][0]}", "exp_avg")
            records += list(reads.records(piece(path, rows, first, last)))
        observed, problems = assemble(records)
        key = Key(reads.op.index, "written", "exp_avg", named.fqn)
        expected = {key: Value("fp32", named.spec.shape, numbered(named).tobytes())}
        found = diff(expected, observed, problems)
        assert {difference.kind for difference in found} == kinds, found
        assert all(difference.key == key for difference in found)
