"""Assembly: any partition joins to the whole tensor; every defect of the pieces is found and named."""

from __future__ import annotations

from itertools import pairwise, product
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from shardproof.layout import shard_box
from shardproof.observe.assemble import assemble, elements_of, record_key
from shardproof.observe.logical import Key, Problem, Value
from shardproof.observe.record import ITEMSIZE, Record, whole

SHAPES = st.lists(st.integers(1, 6), max_size=3).map(tuple)
DTYPES = st.sampled_from(sorted(ITEMSIZE))
KEY = Key(3, "live", "param", "a.weight")


def tensor(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Distinct bytes everywhere, shape `(*shape, itemsize)`."""
    itemsize = ITEMSIZE[dtype]
    return (np.arange(prod(shape) * itemsize, dtype=np.uint32) * 7 + 1).astype(np.uint8).reshape(*shape, itemsize)


def boxed(rank: int, dtype: str, full: np.ndarray, start: tuple[int, ...], size: tuple[int, ...]) -> Record:
    view = full[tuple(slice(at, at + n) for at, n in zip(start, size, strict=True))]
    return Record(3, rank, "live", "param", "a.weight", dtype, full.shape[:-1], start, size, view.tobytes())


def flat(rank: int, dtype: str, full: np.ndarray, start: int, length: int) -> Record:
    view = full.reshape(-1, ITEMSIZE[dtype])[start : start + length]
    shape = full.shape[:-1]
    return Record(3, rank, "live", "param", "a.weight", dtype, shape, (start,), (length,), view.tobytes(), True)


def sharded(
    shape: tuple[int, ...], dtype: str, sizes: tuple[int, int, int], tp_dim: int | None
) -> tuple[np.ndarray, list[Record]]:
    full = tensor(shape, dtype)
    boxes = [shard_box(shape, sizes, coordinate, tp_dim) for coordinate in product(*map(range, sizes))]
    return full, [boxed(rank, dtype, full, *box) for rank, box in enumerate(boxes)]


def only(pieces: list[Record]) -> tuple[Value | None, Problem]:
    values, problems = assemble(pieces)
    (problem,) = problems
    assert problem.key == KEY
    return values.get(KEY), problem


@given(SHAPES, DTYPES, st.tuples(st.integers(1, 2), st.integers(1, 5), st.integers(1, 3)), st.randoms(), st.data())
def test_every_mesh_joins_to_the_whole(shape, dtype, sizes, random, data) -> None:  # type: ignore[no-untyped-def]
    tp_dim = data.draw(st.sampled_from([None, *range(len(shape))]))
    full, pieces = sharded(shape, dtype, sizes, tp_dim)
    random.shuffle(pieces)
    assert assemble(pieces) == ({KEY: Value(dtype, shape, full.tobytes())}, [])


@given(SHAPES, DTYPES, st.integers(1, 6), st.integers(0, 9), st.randoms())
def test_flat_bucket_shares_join_to_the_whole(shape, dtype, parts, before, random) -> None:  # type: ignore[no-untyped-def]
    """A tensor that begins `before` elements into a flat buffer, of which every rank owns an equal range."""
    full, numel = tensor(shape, dtype), prod(shape)
    share = -(-(before + numel) // parts)
    cuts = [min(max(share * rank - before, 0), numel) for rank in range(parts + 1)]
    pieces = [flat(rank, dtype, full, low, high - low) for rank, (low, high) in enumerate(pairwise(cuts))]
    random.shuffle(pieces)
    assert assemble(pieces) == ({KEY: Value(dtype, shape, full.tobytes())}, [])


@given(st.tuples(st.integers(1, 6), st.integers(1, 6)), st.integers(1, 4), st.data())
def test_a_lost_piece_is_a_gap(shape: tuple[int, int], parts: int, data: st.DataObject) -> None:
    _, pieces = sharded(shape, "fp32", (1, parts, 1), None)
    lost = data.draw(st.sampled_from([p for p in pieces if p.data]))
    rest = [p for p in pieces if p is not lost]
    if not rest:
        assert assemble(rest) == ({}, [])
        return
    value, problem = only(rest)
    assert value is None
    assert problem.kind == "gap"
    assert f"{prod(lost.size)} of {prod(shape)} elements" in problem.detail
    assert f"the first at {list(lost.start)}" in problem.detail


@given(st.sampled_from(["fp32", "bf16", "uint8"]), st.integers(2, 5), st.data())
def test_replicas_must_agree_bit_for_bit(dtype: str, ranks: int, data: st.DataObject) -> None:
    full = tensor((3, 4), dtype)
    pieces = [whole(3, rank, "param", "a.weight", dtype, (3, 4), full.tobytes()) for rank in range(ranks)]
    position = data.draw(st.integers(0, len(full.tobytes()) - 1))
    broken = bytearray(full.tobytes())
    broken[position] ^= 1
    victim = data.draw(st.integers(0, ranks - 1))
    pieces[victim] = pieces[victim]._replace(data=bytes(broken))
    value, problem = only(pieces)
    assert problem.kind == "replica_conflict"
    if ranks > 2:
        assert problem.ranks == (victim,)
        assert value == Value(dtype, (3, 4), full.tobytes())
    else:
        assert problem.ranks == (1,), "of equally many, the lowest rank counts as right"
    row, column = divmod(position // ITEMSIZE[dtype], 4)
    assert f"1 of 12 elements, the first at [{row}, {column}]" in problem.detail


@given(st.lists(st.text(min_size=1), min_size=2, max_size=5))
def test_a_text_is_one_value_however_long_it_is(texts: list[str]) -> None:
    lines = [text.encode() for text in texts]
    pieces = [whole(3, rank, "param", "a.weight", "utf8", (len(line),), line) for rank, line in enumerate(lines)]
    values, problems = assemble(pieces)
    agreed = max(dict.fromkeys(lines), key=lines.count)
    assert values == {KEY: Value("utf8", (len(agreed),), agreed)}
    assert [problem.kind for problem in problems] == ["replica_conflict"] * (len({*lines}) > 1)
    for problem in problems:
        assert problem.ranks == tuple(rank for rank, line in enumerate(lines) if line != agreed)
        assert all(repr(text) in problem.detail for text in texts)


def test_replica_conflict_inside_shards_names_the_logical_index() -> None:
    _, pieces = sharded((4, 3), "fp32", (3, 2, 1), None)
    pieces[5] = pieces[5]._replace(data=bytes(len(pieces[5].data)))
    value, problem = only(pieces)
    assert (problem.kind, problem.ranks) == ("replica_conflict", (5,))
    assert "[2:4, 0:3]: ranks [5] differ from ranks [1, 3]; rank 5 in 6 of 6 elements" in problem.detail
    assert "the first at [2, 0]" in problem.detail
    assert value is not None


def test_partial_overlap_is_a_problem_even_when_the_bits_agree() -> None:
    full = tensor((4, 2), "fp32")
    pieces = [boxed(0, "fp32", full, (0, 0), (3, 2)), boxed(1, "fp32", full, (2, 0), (2, 2))]
    value, problem = only(pieces)
    assert (problem.kind, problem.ranks) == ("overlap", (0, 1))
    assert "rank 1 holds [2:4, 0:2], rank 0 [0:3, 0:2]" in problem.detail
    assert value == Value("fp32", (4, 2), full.tobytes())


def test_flat_and_boxed_pieces_of_one_tensor_mix() -> None:
    full = tensor((4, 2), "fp32")
    pieces = [boxed(0, "fp32", full, (0, 0), (2, 2)), flat(1, "fp32", full, 4, 4)]
    assert assemble(pieces) == ({KEY: Value("fp32", (4, 2), full.tobytes())}, [])
    value, problem = only([*pieces, flat(2, "fp32", full, 0, 8)])
    assert (value, problem.kind, problem.ranks) == (Value("fp32", (4, 2), full.tobytes()), "overlap", (0, 1, 2))


@pytest.mark.parametrize(
    ("kind", "change", "detail"),
    [
        ("dtype", {"dtype": "int32"}, "fp32 on ranks [0]; int32 on ranks [1]"),
        ("shape", {"shape": (2, 4)}, "(4, 2) on ranks [0]; (2, 4) on ranks [1]"),
        ("dtype", {"dtype": "fp4"}, "fp32 on ranks [0]; fp4 on ranks [1]"),
        ("size", {"data": b"\0" * 15}, "rank 1 has 15 bytes for [2:4, 0:2], which takes 16"),
        ("size", {"start": (3, 0)}, "rank 1 holds [3:5, 0:2], which is not inside [4, 2]"),
        ("size", {"start": (2,)}, "rank 1 holds [2:4], which is not inside [4, 2]"),
        ("size", {"start": (-2, 0)}, "rank 1 holds [-2:0, 0:2], which is not inside [4, 2]"),
        ("size", {"start": (6,), "size": (4,), "flat": True}, "rank 1 holds flat [6:10], which is not inside [8]"),
        ("gap", {"start": (0, 0), "size": (2, 1), "data": b"\0" * 8}, "4 of 8 elements"),
    ],
)
def test_defects_of_a_piece_are_named(kind: str, change: dict[str, object], detail: str) -> None:
    full = tensor((4, 2), "fp32")
    good, other = boxed(0, "fp32", full, (0, 0), (2, 2)), boxed(1, "fp32", full, (2, 0), (2, 2))
    values, problems = assemble([good, other._replace(**change)])  # type: ignore[arg-type]
    assert KEY not in values
    assert kind in [p.kind for p in problems]
    assert detail in " | ".join(p.detail for p in problems)


def test_an_unknown_dtype_everywhere_is_a_dtype_problem() -> None:
    value, problem = only([whole(3, 0, "param", "a.weight", "fp4", (2,), b"12")])
    assert (value, problem.kind, problem.detail) == (None, "dtype", "unknown dtype 'fp4'")


def test_empty_pieces_alone_are_a_gap_unless_the_shape_is_empty() -> None:
    empty = Record(3, 0, "live", "param", "a.weight", "fp32", (4, 2), (4, 0), (0, 2), b"")
    value, problem = only([empty, empty._replace(rank=1)])
    assert (value, problem.kind) == (None, "gap")
    none = whole(3, 0, "param", "a.weight", "fp32", (0, 2), b"")
    assert assemble([none, none._replace(rank=1)]) == ({KEY: Value("fp32", (0, 2), b"")}, [])


def test_an_empty_piece_must_also_lie_inside_the_tensor() -> None:
    full = tensor((4, 2), "fp32")
    outside = Record(3, 1, "live", "param", "a.weight", "fp32", (4, 2), (5, 0), (0, 2), b"")
    value, problem = only([boxed(0, "fp32", full, (0, 0), (4, 2)), outside])
    assert (value, problem.kind, problem.ranks) == (None, "size", (1,))


def test_scalars_and_whole_flat_pieces() -> None:
    step = whole(3, 0, "param", "a.weight", "fp32", (), b"abcd")
    assert assemble([step, step._replace(rank=1)]) == ({KEY: Value("fp32", (), b"abcd")}, [])
    as_flat = step._replace(rank=2, start=(0,), size=(1,), flat=True)
    assert assemble([step, as_flat]) == ({KEY: Value("fp32", (), b"abcd")}, [])


def test_per_rank_roles_are_kept_apart() -> None:
    records = [whole(0, rank, "rng", "cpu", "uint8", (2,), bytes([rank, 1])) for rank in (0, 1)]
    assert assemble(records) == (
        {Key(0, "live", "rng", f"rank{rank}.cpu"): Value("uint8", (2,), bytes([rank, 1])) for rank in (0, 1)},
        [],
    )
    assert [record_key(r).fqn for r in records] == ["rank0.cpu", "rank1.cpu"]


@given(SHAPES, st.tuples(st.integers(1, 2), st.integers(1, 3), st.integers(1, 3)), st.data())
def test_elements_of_are_the_flat_indices_in_data_order(shape, sizes, data) -> None:  # type: ignore[no-untyped-def]
    full, pieces = sharded(shape, "int32", sizes, data.draw(st.sampled_from([None, *range(len(shape))])))
    for piece in pieces:
        assert full.reshape(-1, 4)[elements_of(piece)].tobytes() == piece.data


def test_copies_that_are_cut_differently_must_each_be_whole_and_agree() -> None:
    def piece(rank: int, start: int, numbers: list[float], replica: int) -> Record:
        data = np.array(numbers, np.float32).tobytes()
        return Record(0, rank, "live", "master", "a", "fp32", (3,), (start,), (len(numbers),), data, True, replica)

    first = [piece(0, 0, [1, 2], 0), piece(2, 2, [3], 0)]
    logical, problems = assemble([*first, piece(1, 0, [1], 1), piece(3, 1, [2, 3], 1)])
    assert (len(logical), problems) == (1, [])
    _, problems = assemble([*first, piece(1, 0, [1], 1), piece(3, 1, [2, 4], 1)])
    assert [(p.kind, p.ranks) for p in problems] == [("replica_conflict", (1, 3))]
    _, problems = assemble([*first, piece(1, 0, [1], 1)])
    assert [p.kind for p in problems] == ["gap"]


def test_a_rank_without_a_copy_of_its_own_may_speak_first_and_last() -> None:
    """Of a parameter that all ranks hold, the host of ranks 0 and 1 has copies, cut in two; ranks 2 and 3 own none."""
    data = np.arange(4, dtype=np.float32).tobytes()
    whole = [Record(0, rank, "live", "param", "a", "fp32", (4,), (0,), (4,), data) for rank in range(4)]
    copies = [Record(0, rank, "live", "param", "a", "fp32", (4,), (start,), (2,), part, True, 1)
              for rank, start, part in ((0, 0, data[:8]), (1, 2, data[8:]))]  # fmt: skip
    records = [whole[0], copies[0], whole[1], copies[1], *whole[2:]]
    logical, problems = assemble(records)
    assert (len(logical), problems) == (1, [])
    _, problems = assemble([whole[0], copies[0]._replace(data=bytes(8)), *records[2:]])
    assert [p.kind for p in problems] == ["replica_conflict"]
