"""What assembly says of pieces that do not fit, and which pieces need no closer look. Each test is here because a
change of the code went unnoticed without it (`docs/mutation.md`)."""

from __future__ import annotations

import numpy as np
import pytest
from shardproof.observe import assemble as module
from shardproof.observe.assemble import assemble, elements_of, record_key
from shardproof.observe.logical import Key, Problem
from shardproof.observe.record import Record, whole

SHAPE = (4, 3)
NUMBERS = np.arange(12, dtype=np.float32).reshape(SHAPE)
KEY = Key(1, "live", "param", "w")


def piece(rank: int, start: tuple[int, ...], data: np.ndarray, *, flat: bool = False, replica: int = 0) -> Record:  # type: ignore[type-arg]
    return Record(1, rank, "live", "param", "w", "fp32", SHAPE, start, data.shape, data.tobytes(), flat, replica)


ROWS = [piece(0, (0, 0), NUMBERS[:2]), piece(1, (2, 0), NUMBERS[2:])]
RUNS = [piece(rank, (at,), NUMBERS.reshape(-1)[at : at + 5], flat=True) for rank, at in ((0, 0), (1, 5), (2, 10))]


@pytest.mark.parametrize(
    "pieces",
    [
        [piece(0, (0, 0), NUMBERS)],
        [piece(0, (0, 0), NUMBERS), piece(1, (0, 0), NUMBERS)],
        ROWS,
        ROWS[::-1],
        [*ROWS, piece(2, (0, 0), NUMBERS[:2]), piece(3, (2, 0), NUMBERS[2:])],
        RUNS,
        [piece(0, (0, 0), NUMBERS[:, :1]), piece(1, (0, 1), NUMBERS[:, 1:])],
        [piece(0, (0,), NUMBERS.reshape(-1), flat=True)],
    ],
)
def test_sound_pieces_need_no_closer_look(pieces: list[Record], monkeypatch: pytest.MonkeyPatch) -> None:
    """This is the hot path: thousands of values of a matrix of scenarios pass here."""
    monkeypatch.setattr(module, "_Inspection", None)
    logical, problems = assemble(pieces)
    assert problems == []
    assert logical[KEY].data == NUMBERS.tobytes()
    assert (logical[KEY].dtype, logical[KEY].shape) == ("fp32", SHAPE)


@pytest.mark.parametrize(("start", "kind"), [((1, 0), "size"), ((0,), "size"), ((), "size")])
def test_a_whole_tensor_at_another_place_is_not_sound(start: tuple[int, ...], kind: str) -> None:
    logical, problems = assemble([piece(0, start, NUMBERS)])
    assert (logical, [p.kind for p in problems]) == ({}, [kind])


def test_the_name_of_a_value_is_that_of_its_pieces() -> None:
    assert record_key(ROWS[1]) == KEY
    assert record_key(ROWS[1]._replace(role="rng", fqn="torch")) == Key(1, "live", "rng", "rank1.torch")
    logical, _ = assemble([*ROWS, ROWS[0]._replace(role="warning", fqn="a"), ROWS[1]._replace(role="warning", fqn="a")])
    assert {key.fqn for key in logical} <= {"w", "rank0.a", "rank1.a"}


def copies(*changed: tuple[int, float]) -> list[Record]:
    """Two copies, cut in rows and in runs; elements of the second are other numbers."""
    other = NUMBERS.copy().reshape(-1)
    for at, number in changed:
        other[at] = number
    runs = [piece(rank, (at,), other[at : at + 6], flat=True, replica=1) for rank, at in ((2, 0), (3, 6))]
    return [*ROWS, *runs]


def test_copies_that_are_cut_otherwise_agree() -> None:
    assert assemble(copies()) == ({KEY: assemble(ROWS)[0][KEY]}, [])


def test_a_copy_that_differs_is_told_with_its_ranks() -> None:
    logical, problems = assemble(copies((7, 70.0)))
    assert problems == [Problem(KEY, "replica_conflict", (2, 3), "copy 1, on ranks [2, 3], differs from copy 0")]
    assert logical[KEY].data == NUMBERS.tobytes(), "the first copy is kept"


def test_what_is_wrong_with_a_copy_is_told_of_the_value() -> None:
    _, problems = assemble(copies()[:-1])
    assert [(p.key, p.kind) for p in problems] == [(KEY, "gap")]


def test_a_gap_is_told_with_its_first_element() -> None:
    _, (problem,) = assemble(ROWS[:1])
    assert problem == Problem(KEY, "gap", (0,), "6 of 12 elements are on no rank, the first at [2, 0]")


def test_of_equally_many_the_lowest_rank_is_kept() -> None:
    high, low = piece(5, (0, 0), NUMBERS + 1), piece(4, (0, 0), NUMBERS)
    logical, (problem,) = assemble([high, low])
    assert logical[KEY].data == NUMBERS.tobytes()
    assert problem.ranks == (5,)
    assert problem.detail == (
        "[0:4, 0:3]: ranks [5] differ from ranks [4]; rank 5 in 12 of 12 elements, the first at [0, 0]"
    )


def test_one_rank_with_copies_that_differ_is_told_as_one() -> None:
    _, (problem,) = assemble([piece(3, (0, 0), NUMBERS), piece(3, (0, 0), NUMBERS * 2)])
    assert problem.detail == (
        "[0:4, 0:3]: rank 3 holds several copies that differ in 11 of 12 elements, the first at [0, 1]"
    )


def test_several_ranks_with_copies_that_differ_are_told_together() -> None:
    pieces = [piece(rank, (0, 0), NUMBERS * factor) for rank in (1, 2) for factor in (1, 2)]
    _, (problem,) = assemble(pieces)
    assert problem.detail.startswith("[0:4, 0:3]: each of ranks [1, 2] holds several copies that differ in 11 of 12")


def test_a_flat_whole_is_a_copy_of_a_whole() -> None:
    flat = piece(1, (0,), NUMBERS.reshape(-1) + 1, flat=True)
    _, (problem,) = assemble([piece(0, (0, 0), NUMBERS), flat])
    assert problem.kind == "replica_conflict"


def test_problems_of_several_kinds_are_all_told() -> None:
    _, problems = assemble([*ROWS, piece(2, (0, 0), NUMBERS[:2] + 1), piece(3, (1, 0), NUMBERS[1:3])])
    assert [p.kind for p in problems] == ["replica_conflict", "overlap"]


def test_elements_are_numbered_in_the_whole_tensor() -> None:
    assert elements_of(ROWS[1]).tolist() == [6, 7, 8, 9, 10, 11]
    assert elements_of(RUNS[2]).tolist() == [10, 11]
    assert elements_of(whole(0, 0, "param", "w", "fp32", (2, 1, 2), b"")).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("size", [SHAPE, (2, 3)])
@pytest.mark.parametrize("data", [NUMBERS, NUMBERS[:3]])
def test_a_single_piece_with_other_bytes_than_its_box_takes_is_refused(size: tuple[int, ...], data: np.ndarray) -> None:  # type: ignore[type-arg]
    if data.shape == size:
        assert assemble([piece(0, (0, 0), data)])[1] == []
        return
    _, (problem,) = assemble([piece(0, (0, 0), NUMBERS)._replace(size=size, data=data.tobytes())])
    assert (problem.kind, problem.ranks) == ("size", (0,))


def test_problems_of_one_kind_are_one_with_all_their_ranks() -> None:
    other = [row._replace(rank=row.rank + 2, data=(row.data[::-1])) for row in ROWS]
    third = [row._replace(rank=row.rank + 4) for row in ROWS]
    _, (problem,) = assemble([*ROWS, *other, *third])
    assert (problem.kind, problem.ranks) == ("replica_conflict", (2, 3))
    assert problem.detail.startswith("[0:2, 0:3]")
