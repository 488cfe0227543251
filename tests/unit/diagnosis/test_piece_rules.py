"""Rules about the pieces of a tensor and about shares in a state dict, on pieces made by hand: what each says, whole,
and at which boundary it is silent. Each test is here because a change of the code went unnoticed without it
(`docs/mutation.md`)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from shardproof.diagnosis import Context, Finding
from shardproof.diagnosis.rules import pieces, shares
from shardproof.diff import Difference, diff
from shardproof.observe.assemble import assemble
from shardproof.observe.logical import Key, Logical, Value
from shardproof.observe.record import LIVE, WRITTEN, Record
from shardproof.scenario import Mesh, Scenario

from tests.unit.diagnosis.test_diagnosis import context_of, live

STEP, SAVE = 1, 2
FOUR = Scenario(mesh=Mesh(1, 4, 1), program="build step save build load")
RECALLED = Scenario(mesh=Mesh(1, 4, 1), program="build step keep step recall")
RECALL = 4


def numbers(count: int, first: float = 1) -> np.ndarray:
    return np.arange(first, first + count, dtype=np.float32)


def value(array: np.ndarray) -> Value:
    return Value("fp32", array.shape, array.astype(np.float32).tobytes())


def flat(key: Key, rank: int, start: int, data: np.ndarray, shape: tuple[int, ...]) -> Record:
    """A stretch of the flattened tensor."""
    box = ((start,), (data.size,))
    return Record(
        key.op, rank, key.where, key.role, key.fqn, "fp32", shape, *box, data.astype(np.float32).tobytes(), True
    )


def box(key: Key, rank: int, start: tuple[int, ...], data: np.ndarray, shape: tuple[int, ...]) -> Record:
    raw = np.ascontiguousarray(data, np.float32).tobytes()
    return Record(key.op, rank, key.where, key.role, key.fqn, "fp32", shape, start, data.shape, raw)


def met(due: Logical, held: list[Record], key: Key, scenario: Scenario = FOUR) -> tuple[Difference, Context]:
    """The difference at a key where these values are due, and ranks hold these pieces."""
    observed, problems = assemble(held)
    given = replace(context_of(due, observed, scenario), records=held)
    found = [d for d in diff(due, observed, problems) if d.key == key]
    return found[0], given


# --- what another rank owns ----------------------------------------------------------------------------

A, B = live(STEP, "exp_avg", "a"), live(STEP, "exp_avg", "b")
A_DUE, B_DUE = numbers(6), numbers(6, 11)


def halves(key: Key, first: int, data: np.ndarray) -> list[Record]:
    """A tensor of 6, cut in two stretches of ranks `first` and the next one."""
    return [flat(key, first + part, part * 3, data[part * 3 : part * 3 + 3], (6,)) for part in range(2)]


def of_another(a: np.ndarray, b: np.ndarray = B_DUE, b_first: int = 2) -> tuple[Difference, Context]:
    return met({A: value(A_DUE), B: value(B_DUE)}, halves(A, 0, a) + halves(B, b_first, b), A)


def test_what_is_another_ranks_of_another_parameter() -> None:
    found = pieces.other_rank(*of_another(B_DUE))
    assert found == Finding(
        "certain",
        "of exp_avg of a rank 0 has rank 2's, rank 1 has rank 3's, which is of b, after operation 1 (step)",
        {"name": "a", "holds": "b", "ranks": [0, 1]},
    )
    half = pieces.other_rank(*of_another(np.concatenate([A_DUE[:3], B_DUE[3:]])))
    assert half is not None
    assert half.clause == "of exp_avg of a rank 1 has rank 3's, which is of b, after operation 1 (step)"
    crossed = pieces.other_rank(*of_another(np.concatenate([A_DUE[:3], B_DUE[:3]])))
    assert crossed is not None
    assert "rank 1 has rank 2's" in crossed.clause


@pytest.mark.parametrize(
    "given",
    [
        of_another(np.concatenate([B_DUE[:3], B_DUE[3:] + 1])),  # one of the two is otherwise
        of_another(np.concatenate([B_DUE[1:4], A_DUE[3:]])),  # of no rank
        of_another(B_DUE, B_DUE + 1),  # the other one is wrong too
        of_another(B_DUE, b_first=1),  # it lies on the same ranks
    ],
    ids=range(4),
)
def test_what_is_no_other_ranks(given: tuple[Difference, Context]) -> None:
    assert pieces._part_of_another(given[0], given[1].pair(given[0]), given[1]) is None  # type: ignore[arg-type]


def test_of_several_parameters_the_one_on_other_ranks_counts() -> None:
    c, c_due = live(STEP, "exp_avg", "c"), numbers(6, 31)
    due = {A: value(A_DUE), c: value(c_due), B: value(B_DUE)}
    for of_c in (halves(c, 0, c_due), halves(c, 2, c_due + 1)):  # on the same ranks, and wrong too
        found = pieces.other_rank(*met(due, halves(A, 0, B_DUE) + of_c + halves(B, 2, B_DUE), A))
        assert found is not None
        assert found.evidence["holds"] == "b"


def test_two_different_elements_may_be_chance() -> None:
    due, other = np.array([1, 1, 2, 5, 5, 6]), np.array([3, 3, 4, 9, 9, 8])
    wrong = np.array([3, 3, 4, 5, 5, 6])
    given = met({A: value(due), B: value(other)}, halves(A, 0, wrong) + halves(B, 2, other), A)
    assert pieces.other_rank(*given) is None


def test_roles_that_say_who_owns_what() -> None:
    for role in (*pieces.OWNED, "exp_avg_sq"):
        a, b = live(STEP, role, "a"), live(STEP, role, "b")
        given = met({a: value(A_DUE), b: value(B_DUE)}, halves(a, 0, B_DUE) + halves(b, 2, B_DUE), a)
        assert (pieces.other_rank(*given) is not None) is (role in pieces.OWNED)
    written = A._replace(where=WRITTEN), B._replace(where=WRITTEN)
    held = halves(written[0], 0, B_DUE) + halves(written[1], 2, B_DUE) + halves(A, 0, A_DUE) + halves(B, 2, B_DUE)
    found = pieces.other_rank(*met({written[0]: value(A_DUE), written[1]: value(B_DUE)}, held, written[0]))
    assert found is not None
    assert found.clause.startswith("of written exp_avg of a rank 0 has rank 2's")
    whole = [flat(live(STEP, "master", "a"), 0, 0, A_DUE, (6,)), *halves(A, 1, A_DUE)]
    given = replace(context_of({}, {}, FOUR), records=whole)
    assert [(rank, at.tolist()) for rank, at in pieces._owners(A, given)] == [(1, [0, 1, 2]), (2, [3, 4, 5])]
    assert pieces._owners(B, given) == []
    param = live(STEP, "param", "a")
    gathered = replace(given, records=[*halves(A, 1, A_DUE), flat(param, 1, 0, A_DUE, (6,))])
    for key in (param, param._replace(where=WRITTEN)):
        owners = pieces._owners(key, replace(gathered))
        assert [rank for rank, _ in owners] == [1, 2], "whose moments are shared out"


# --- another place of the same tensor ----------------------------------------------------------------

W = live(STEP, "exp_avg", "w")
EIGHT = numbers(8)


def stretches(*parts: np.ndarray) -> tuple[Difference, Context]:
    ends = np.cumsum([0, *(part.size for part in parts)])
    held = [flat(W, rank, int(ends[rank]), part, (8,)) for rank, part in enumerate(parts)]
    return met({W: value(EIGHT)}, held, W)


def test_stretches_from_other_places() -> None:
    assert pieces.other_offset(*stretches(EIGHT[:4], EIGHT[1:5])) == {1: (4, 7, 1)}
    assert pieces.other_offset(*stretches(EIGHT[4:], EIGHT[:4])) == {0: (0, 3, 4), 1: (4, 7, 0)}
    assert pieces.other_offset(*stretches(EIGHT[:4], np.array([5, 1, 2, 3]))) == {1: (5, 7, 0)}
    assert pieces.other_offset(*stretches(EIGHT[:4], np.array([5, 6, 1, 2]))) is None, "two elements may be chance"
    assert pieces.other_offset(*stretches(EIGHT[4:], np.array([9, 1, 2, 3]))) is None, "not all that deviate"
    assert pieces.other_offset(*stretches(np.array([1, 2, 6, 7, 8, 6, 7, 8]))) == {0: (2, 4, 5)}, "amid right ones"
    assert pieces.other_offset(*met({W: value(EIGHT)}, [flat(W, 0, 0, EIGHT[:4], (8,))], W)) is None
    (missing,) = diff({W: value(EIGHT)}, {})
    assert pieces.other_offset(missing, context_of({W: value(EIGHT)}, {}, FOUR)) is None
    difference, given = stretches(EIGHT[4:], EIGHT[:4])
    half = [piece._replace(dtype="fp16") for piece in given.records]
    assert pieces.other_offset(difference, replace(given, records=half)) is None
    short = [piece._replace(data=piece.data[:-4]) for piece in given.records]
    assert pieces.other_offset(difference, replace(given, records=short)) is None
    assert pieces.other_offset(difference, replace(given, records=())) is None


def test_a_stretch_is_found_where_elements_begin() -> None:
    bits = np.array([0x01000000, 0x00000001, 0x00000100, 0x01000000], np.uint32)
    held = Value("int32", (4,), bits.tobytes())
    assert pieces.position(bits[1:3], held) == 1
    assert pieces.position(bits[:1], held) == 0
    within = Value("uint8", (4,), b"\0\1\2\3")
    assert pieces.position(np.array([0x02010000], np.uint32), within) is None
    shifted = Value("int16", (3,), bytes([9, 1, 2, 8, 1, 2]))
    assert pieces.position(np.array([0x0201], np.uint16), shifted) == 2
    assert pieces.position(np.array([0x0202], np.uint16), shifted) is None
    twice = Value("bf16", (4,), bytes([0, 1, 1, 1, 0, 0, 1, 1]))
    assert pieces.position(np.array([0x0101], np.uint16), twice) == 1, "the first that is no half of two elements"


# --- dims exchanged within a part ----------------------------------------------------------------------

SQUARE = numbers(16).reshape(4, 4)


def boxes(*parts: np.ndarray, due: np.ndarray = SQUARE) -> tuple[Difference, Context]:
    held = [box(W, rank, (rank * 2, *(0,) * (due.ndim - 1)), part, due.shape) for rank, part in enumerate(parts)]
    return met({W: value(due)}, held, W)


def turned(part: np.ndarray, first: int = 0) -> np.ndarray:
    return part.swapaxes(first, first + 1).reshape(part.shape)


def test_three_different_elements_may_be_said_to_be_exchanged() -> None:
    due = np.array([[1, 2], [3, 3]])
    assert pieces.exchanged_in_parts(*boxes(due.T, due=due)) == (0, 1)
    (missing,) = diff({W: value(due)}, {})
    assert pieces.exchanged_in_parts(missing, context_of({W: value(due)}, {}, FOUR)) is None


def test_dims_exchanged_in_every_part_that_deviates() -> None:
    assert pieces.exchanged_in_parts(*boxes(turned(SQUARE[:2]), turned(SQUARE[2:]))) == (0, 1)
    assert pieces.exchanged_in_parts(*boxes(SQUARE[:2], turned(SQUARE[2:]))) == (0, 1)
    assert pieces.exchanged_in_parts(*boxes(turned(SQUARE[:2]), SQUARE[2:] + 1)) is None
    cube = numbers(4 * 3 * 2).reshape(4, 3, 2)
    assert pieces.exchanged_in_parts(*boxes(cube[:2], turned(cube[2:], 1), due=cube)) == (1, 2)
    assert pieces.exchanged_in_parts(*boxes(turned(cube[:2]), turned(cube[2:], 1), due=cube)) is None
    few = np.array([[1, 1], [2, 2], [1, 1], [2, 2]])
    assert pieces.exchanged_in_parts(*boxes(turned(few[:2]), few[2:], due=few)) is None
    assert pieces.exchanged_in_parts(*stretches(EIGHT[4:], EIGHT[:4])) is None
    difference, given = boxes(turned(SQUARE[:2]), turned(SQUARE[2:]))
    flattened = [piece._replace(flat=True) for piece in given.records]
    assert pieces.exchanged_in_parts(difference, replace(given, records=flattened)) is None
    other = [piece._replace(dtype="int32") for piece in given.records]
    assert pieces.exchanged_in_parts(difference, replace(given, records=other)) is None
    short = [piece._replace(data=piece.data[:-4]) for piece in given.records]
    assert pieces.exchanged_in_parts(difference, replace(given, records=short)) is None


# --- pieces of a checkpoint that lie elsewhere ----------------------------------------------------------

STORED = Key(SAVE, WRITTEN, "exp_avg", "w")
TWELVE = numbers(24).reshape(12, 2)


def filed(*parts: tuple[int, int, np.ndarray]) -> tuple[Difference, Context]:
    """`(rank, row, rows)`: what is written at which row of a tensor of 12 × 2."""
    return met(
        {STORED: value(TWELVE)}, [box(STORED, rank, (row, 0), data, (12, 2)) for rank, row, data in parts], STORED
    )


def test_pieces_that_are_described_elsewhere() -> None:
    swapped = filed((0, 0, TWELVE[6:]), (1, 6, TWELVE[:6]))
    assert pieces.wrong_coordinates(*swapped) == Finding(
        "certain",
        "of written exp_avg of w after operation 2 (save), in elements, rank 0 says 0 and holds what is at 12, rank 1 "
        "says 12 and holds what is at 0",
        {"name": "w", "moved": [[0, 0, 12], [1, 12, 0]]},
    )
    quarters = [TWELVE[row : row + 3] for row in (0, 3, 6, 9)]
    four = filed(*((rank, 3 * rank, part) for rank, part in enumerate(quarters[1:] + quarters[:1])))
    found = pieces.wrong_coordinates(*four)
    assert found is not None
    assert found.clause.endswith("rank 2 says 12 and holds what is at 18, …")
    three = filed(*((rank, 4 * rank, TWELVE[row : row + 4]) for rank, row in enumerate((4, 8, 0))))
    told = pieces.wrong_coordinates(*three)
    assert told is not None
    assert told.clause.endswith("rank 2 says 16 and holds what is at 0")


def test_pieces_that_say_nothing_of_where_they_lie() -> None:
    swapped = filed((0, 0, TWELVE[6:]), (1, 6, TWELVE[:6]))
    for kind in ("gap", "overlap", "size", "bits", "replica_conflict"):
        assert pieces.wrong_coordinates(replace(swapped[0], kind=kind), swapped[1]) is not None
    assert pieces.wrong_coordinates(replace(swapped[0], kind="missing"), swapped[1]) is None
    assert pieces.wrong_coordinates(swapped[0], replace(swapped[1], expected={})) is None
    assert pieces.wrong_coordinates(*filed((0, 0, TWELVE[:6]), (1, 6, TWELVE[6:] + 99))) is None, "nowhere"
    columns = [box(STORED, rank, (0, 1 - rank), TWELVE[:, rank : rank + 1], (12, 2)) for rank in range(2)]
    assert pieces.wrong_coordinates(*met({STORED: value(TWELVE)}, columns, STORED)) is None, "no run"
    moved = [flat(STORED, 0, 0, numbers(12, 13), (24,)), flat(STORED, 1, 12, numbers(12), (24,))]
    found = pieces.wrong_coordinates(*met({STORED: value(numbers(24))}, moved, STORED))
    assert found is not None
    assert found.evidence["moved"] == [[0, 0, 12], [1, 12, 0]]


def test_what_a_piece_must_have_to_be_recognised() -> None:
    piece = box(STORED, 0, (6, 0), TWELVE[:3], (12, 2))
    assert pieces._held_from(piece, value(TWELVE)) == 0
    assert pieces._held_from(piece._replace(dtype="int32"), value(TWELVE)) is None
    assert pieces._held_from(box(STORED, 0, (6, 0), TWELVE[:1], (12, 2)), value(TWELVE)) is None
    assert pieces._held_from(flat(STORED, 0, 0, numbers(3, 4), (24,)), value(TWELVE)) == 3, "three elements are enough"
    assert pieces._begin(piece) == 12
    assert pieces._begin(flat(STORED, 0, 7, numbers(3), (12, 2))) == 7
    assert pieces._flat_start((1, 2, 3), (4, 5, 6)) == 45
    assert not pieces._is_run(piece._replace(data=b""))
    assert pieces._is_run(piece._replace(flat=True, size=(6,), start=(12,)))


def test_a_fused_weight_that_was_cut_at_the_half_of_a_part() -> None:
    parts = ((0, 0, TWELVE[:2]), (0, 6, TWELVE[2:4]), (1, 3, TWELVE[6:8]))
    difference, given = filed(*parts)
    assert pieces.halves_of_a_part(difference, given) == Finding(
        "certain",
        "rank 0 filed the elements from 0 on and from 4 on, which follow each other in written exp_avg of w, at 0 and "
        "12, after operation 2 (save)",
        {"name": "w", "rank": 0, "filed_at": [0, 12], "hold": [0, 4]},
    )
    for other in (
        ((0, 0, TWELVE[:2]), (1, 6, TWELVE[2:4])),  # of two ranks
        ((0, 0, TWELVE[:2]), (0, 5, TWELVE[2:4])),  # not half a weight apart
        ((0, 0, TWELVE[:2]), (0, 6, TWELVE[3:5])),  # not one behind the other
        ((0, 0, TWELVE[:6]), (0, 6, TWELVE[6:])),  # where they belong
        ((0, 0, TWELVE[:2]), (0, 6, TWELVE[2:4] + 99)),  # nowhere
    ):
        assert pieces.halves_of_a_part(difference, replace(given, records=filed_records(*other))) is None
    assert pieces.halves_of_a_part(difference, replace(given, expected={})) is None
    at = replace(difference, key=STORED._replace(where=LIVE))
    everywhere = replace(given, expected=given.expected | {at.key: value(TWELVE)})
    assert pieces.halves_of_a_part(at, everywhere) is None
    columns = [box(STORED, 0, (0, n), TWELVE[:, n : n + 1], (12, 2)) for n in range(2)]
    assert pieces.halves_of_a_part(difference, replace(given, records=columns)) is None
    due = {STORED: value(numbers(16).reshape(4, 4))}
    parts_of_rows = [box(STORED, 0, (2 * n, 0), numbers(3, 1 + 3 * n).reshape(1, 3), (4, 4)) for n in range(2)]
    of_rows = met(due, parts_of_rows, STORED)
    assert pieces.halves_of_a_part(*of_rows) is None, "boxes that are no run, whatever they hold"
    assert pieces.wrong_coordinates(*of_rows) is None


def filed_records(*parts: tuple[int, int, np.ndarray]) -> list[Record]:
    return [box(STORED, rank, (row, 0), data, (12, 2)) for rank, row, data in parts]


# --- what some ranks own nothing of ------------------------------------------------------------------


def lacking(lost: set[str], empty: set[str], role: str = "exp_avg", where: str = WRITTEN, kind: str = "missing"
            ) -> Finding | None:  # fmt: skip
    """What is said of `a` where a save lacks `lost`, and rank 1 owns nothing of `empty`; rank 0 owns some of all."""
    keys = {name: Key(SAVE, where, role, name) for name in "abc"}
    due = {key: value(numbers(4)) for key in keys.values()}
    held = [flat(key._replace(where=LIVE), 0, 0, numbers(2), (4,)) for key in keys.values()]
    held += [flat(keys[name]._replace(where=LIVE), 1, 2, numbers(2), (4,)) for name in set(keys) - empty]
    held += [flat(key, 0, 0, numbers(4), (4,)) for name, key in keys.items() if name not in lost and where == WRITTEN]
    observed, _ = assemble(record for record in held if record.where == where)
    given = replace(context_of(due, observed, FOUR), records=held)
    (difference,) = diff({keys["a"]: due[keys["a"]]}, {})
    return pieces.empty_part_kept(replace(difference, kind=kind), given)


def test_an_empty_part_was_kept() -> None:
    assert lacking({"a"}, {"a"}) == Finding(
        "likely",
        "written exp_avg of a, of which ranks [1] hold nothing, is not in the checkpoint of operation 2 (save)",
        {"name": "a", "empty_on": [1]},
    )  # fmt: skip
    assert lacking({"a"}, {"a"}, kind="gap") == lacking({"a"}, {"a"}), "a gap that the empty part left"
    assert lacking({"a", "b"}, {"a", "b"}) is not None
    assert lacking({"a", "b"}, {"a"}) is None, "one is missing of which all hold some"
    assert lacking({"a"}, {"a", "b"}) is None, "one is there of which some hold nothing"
    assert lacking({"a", "b", "c"}, {"a", "b", "c"}) is None, "all are missing"
    assert lacking({"b"}, {"b"}) is None
    assert lacking(set(), set()) is None


def test_only_what_is_missing_was_not_kept() -> None:
    difference, given = filed((0, 0, TWELVE[6:]), (1, 6, TWELVE[:6]))
    assert pieces.empty_part_kept(difference, given) is None
    (gone,) = diff({STORED: value(TWELVE)}, {})
    for kind in ("missing", "gap"):
        assert pieces.empty_part_kept(replace(gone, kind=kind), replace(given, observed={})) is None


# --- shares in a state dict that was kept in memory ------------------------------------------------------

KEPT, BACK = live(2, "exp_avg", "w"), live(RECALL, "exp_avg", "w")
TALL = numbers(8).reshape(8, 1)


def recalled(
    got: np.ndarray, due: np.ndarray = TALL, owned: tuple[int, ...] = (0, 1, 2, 3), back: Key = BACK
) -> tuple[Difference, Context]:
    """A tensor of which four ranks owned two rows each when it was kept, and what a recall made of it."""
    held = [box(KEPT, rank, (rank * 2, 0), due[rank * 2 : rank * 2 + 2], due.shape) for rank in owned]
    held.append(box(back, 0, (0, 0), got, got.shape))
    return met({KEPT: value(due), back: value(due)}, held, back, RECALLED)


def wide(rows: int) -> np.ndarray:
    return numbers(rows * 3).reshape(rows, 3)


def test_a_share_that_was_filed_as_the_whole() -> None:
    due = wide(8)
    got = np.zeros_like(due)
    got[:2] = due[4:6]
    assert pieces.wrong_coordinates(*recalled(got, due)) == Finding(
        "certain",
        "exp_avg of w after operation 4 (recall) has the share of rank 2, which is from element 12 on, at its "
        "beginning, and zeros elsewhere",
        {"name": "w", "rank": 2, "elements": 6},
    )
    for spoilt in (np.s_[0, 0], np.s_[7, 2], np.s_[2, 0]):
        other = got.copy()
        other[spoilt] = 99
        assert shares.filed_as_whole(*recalled(other, due)) is None
    assert shares.filed_as_whole(*recalled(got, due, owned=(0, 1, 3))) is None
    first = np.zeros_like(due)
    first[:2] = due[:2]
    assert shares.filed_as_whole(*recalled(first, due)) is None, "the share at the beginning is in its place"
    elsewhere = live(3, "exp_avg", "w")
    assert shares.filed_as_whole(*recalled(got, due, back=elsewhere)) is None, "no load"
    difference, given = recalled(got, due)
    integers = {key: held._replace(dtype="int32") for key, held in given.expected.items()}
    whole = {key: held._replace(dtype="int32") for key, held in given.observed.items()}
    assert shares.filed_as_whole(difference, replace(given, expected=integers, observed=whole)) is None
    odd = [piece._replace(shape=(9, 3)) for piece in given.records]
    assert shares.filed_as_whole(difference, replace(given, records=odd)) is None


def test_a_share_of_few_different_elements_may_be_chance() -> None:
    due = np.array([[1], [2], [3], [4], [5], [5], [6], [7]])
    got = np.array([[5], [5], [0], [0], [0], [0], [0], [0]])
    assert shares.filed_as_whole(*recalled(got, due)) is None


def test_a_share_of_three_different_elements_is_no_chance() -> None:
    due = np.array([[1], [1], [2], [2], [5], [6], [7], [7]])
    of_two = np.concatenate([due[4:6], np.zeros((6, 1))])
    assert shares.filed_as_whole(*recalled(of_two, due)) is None
    rows = np.array([[1, 1], [1, 1], [2, 2], [2, 2], [5, 5], [6, 7], [8, 8], [8, 8]])
    assert shares.filed_as_whole(*recalled(np.concatenate([rows[4:6], np.zeros((6, 2))]), rows)) is not None
    key = live(STEP, "exp_avg", "a")
    mine, theirs = flat(key, 0, 0, A_DUE[3:], (6,)), flat(key, 1, 3, A_DUE[3:], (6,))
    given = met({key: value(A_DUE)}, [mine, theirs], key)
    alone = shares.share_of_another_rank(*given)
    assert alone is not None, "of the only tensor that there is"
    assert alone.evidence["ranks"] == [0]


def test_shares_are_those_of_when_the_state_was_taken() -> None:
    _, given = recalled(TALL + 1)
    assert [piece.rank for piece in shares.shares(BACK, given)] == [0, 1, 2, 3]
    assert shares.shares(BACK._replace(where=WRITTEN), given) == []
    assert shares.shares(BACK._replace(op=3), given) == []
    assert shares.shares(live(1, "exp_avg", "w"), given) == []
    assert shares._kind(2, given) == "keep"
    assert shares._kind(9, given) == ""
    empty = [piece._replace(data=b"", size=(0, 1)) if piece.rank == 1 else piece for piece in given.records]
    assert [piece.rank for piece in shares.shares(BACK, replace(given, records=empty))] == [0, 2, 3]
    saved = replace(context_of({}, {}, FOUR), records=given.records)
    assert [piece.rank for piece in shares.shares(BACK, saved)] == [0, 1, 2, 3]
    before = Scenario(mesh=Mesh(1, 4, 1), program="build save step load")
    first = [piece._replace(op=1) for piece in given.records]
    assert [p.rank for p in shares.shares(live(3, "exp_avg", "w"), replace(context_of({}, {}, before), records=first))]
    again = replace(context_of({}, {}, replace(before, program="build keep recall keep recall")), records=first)
    assert {p.rank for p in shares.shares(live(2, "exp_avg", "w"), again)} == {0, 1, 2, 3}, "not what is kept later"
    written = [piece._replace(op=2, where=WRITTEN) for piece in given.records]
    stored = replace(context_of({}, {}, FOUR), records=written)
    assert shares.shares(BACK._replace(where=WRITTEN), stored) == []


def restored(got: dict[str, np.ndarray], owners: dict[str, tuple[int, ...]]) -> Finding | None:
    """What is said of `w` where a recall made these of tensors of four rows, which ranks owned row by row."""
    due = {name: numbers(4, 1 + 10 * index) for index, name in enumerate(owners)}
    expected, held = {}, []
    for name, ranks in owners.items():
        back = BACK._replace(fqn=name)
        expected |= {KEPT._replace(fqn=name): value(due[name]), back: value(due[name])}
        step = 4 // len(ranks)
        for place, rank in enumerate(ranks):
            held.append(flat(KEPT._replace(fqn=name), rank, place * step, due[name][place * step :][:step], (4,)))
        held.append(flat(back, 0, 0, got.get(name, due[name]), (4,)))
    return pieces.empty_part_kept(*met(expected, held, BACK, RECALLED))


def test_an_empty_share_was_kept_in_memory() -> None:
    owners = {"w": (0, 1), "v": (0, 1, 2, 3)}
    lost = np.array([1, 2, 0, 0])
    assert restored({"w": lost}, owners) == Finding(
        "likely",
        "2 of 4 elements of exp_avg of w, of which ranks [2, 3] own nothing, are zero after operation 4 (recall)",
        {"name": "w", "empty_on": [2, 3]},
    )
    assert restored({"w": np.array([1, 2, 0, 5])}, owners) is None, "not all are zero"
    assert restored({"w": np.array([0, 2, 0, 0])}, owners) is None, "not the last share"
    assert restored({"w": np.array([0, 0, 3, 4])}, owners) is None, "the first share"
    assert restored({"w": lost, "v": np.array([11, 12, 13, 0])}, owners) is None, "and one that all own some of"
    assert restored({"w": lost}, owners | {"u": (0,)}) is None, "and not one of which three own nothing"
    both = restored({"w": lost, "u": np.zeros(4)}, owners | {"u": (0,)})
    assert both is not None
    assert restored({"w": np.array([1, 2, 3, 0])}, {"w": (0, 1, 2, 3), "v": (0, 1, 2, 3)}) is None, "all own some"


# --- a share of a whole role -------------------------------------------------------------------------


SHARED = {name: numbers(8, first) for name, first in (("a", 1), ("b", 11))}


def of_rank(rank: int) -> np.ndarray:
    """What a rank owns: two elements of each of two tensors."""
    return np.concatenate([whole[rank * 2 : rank * 2 + 2] for whole in SHARED.values()])


def owned(ranks: dict[int, np.ndarray]) -> tuple[Difference, Context]:
    """What is said where these ranks hold this of the two tensors, and the others what they own."""
    keys = [live(STEP, "exp_avg", name) for name in SHARED]
    held = [
        flat(key, rank, rank * 2, ranks.get(rank, of_rank(rank))[n * 2 : n * 2 + 2], (8,))
        for rank in range(4)
        for n, key in enumerate(keys)
    ]
    return met(dict(zip(keys, map(value, SHARED.values()), strict=True)), held, keys[0])


def test_a_share_of_another_rank() -> None:
    found = shares.share_of_another_rank(*owned({1: of_rank(3)}))
    assert found == Finding(
        "certain", "of all exp_avg that a rank owns, rank 1 has rank 3's, after operation 1 (step)",
        {"name": "a", "role": "exp_avg", "ranks": [1]},
    )  # fmt: skip
    both = shares.share_of_another_rank(*owned({0: of_rank(2), 1: of_rank(3)}))
    assert both is not None
    assert "rank 0 has rank 2's, rank 1 has rank 3's" in both.clause
    for other in (
        {1: np.array([7, 8, 17, 99])},  # one element is nobody's
        {1: np.array([7, 8, 18, 17])},  # in another order
        {1: np.array([7, 8, 13, 14])},  # one of two tensors is right
        {0: of_rank(2), 1: np.array([1, 1, 1, 1])},  # one of two ranks only
        {1: of_rank(3), 3: of_rank(1)},  # the other one has not its own
    ):
        assert shares.share_of_another_rank(*owned(other)) is None
    difference, given = owned({1: of_rank(3)})
    at = difference.key._replace(where=WRITTEN)
    everywhere = {at: given.expected[difference.key]}
    assert (
        shares.share_of_another_rank(
            replace(difference, key=at),
            replace(given, expected=given.expected | everywhere, observed={at: value(numbers(8, 5))}),
        )
        is None
    )
    assert shares.share_of_another_rank(difference, replace(given, observed={})) is None


def test_elements_follow_each_other_across_pieces() -> None:
    sizes = [2, 3]
    assert shares._next((0, 0), (0, 1), sizes)
    assert shares._next((0, 1), (1, 0), sizes)
    assert shares._next((1, 2), (0, 0), sizes)
    assert not shares._next((0, 0), (1, 0), sizes)
    assert not shares._next((0, 1), (1, 1), sizes)
    assert not shares._next((0, 0), (0, 2), sizes)
    assert not shares._next((0, 2), (0, 0), [3]), "an end is followed by the beginning of another piece"
    assert not shares._next(None, (0, 0), sizes)
    assert not shares._next((0, 0), None, sizes)


def test_a_piece_of_another_dtype_is_not_right() -> None:
    _, given = owned({1: of_rank(3)})
    right = given.records[0]
    assert shares._right(right, given)
    assert not shares._right(given.records[2], given)
    assert not shares._right(right._replace(dtype="int32"), given)
    assert [p.rank for p in shares._held_by(live(STEP, "exp_avg", "a"), given)[1]] == [1, 1]
    assert shares._held_by(live(STEP, "exp_avg_sq", "a"), given) == {}
    alone = flat(live(STEP, "exp_avg", "a"), 0, 0, numbers(1), (8,))
    assert not shares._right(alone._replace(dtype="int32"), given)


def test_only_what_is_lost_of_the_role_then_and_there_counts() -> None:
    key, other = live(STEP, "exp_avg", "a"), live(SAVE, "exp_avg", "b")
    due = {key: value(A_DUE), other: value(B_DUE)}
    got = {key: value(np.array([*A_DUE[:4], 8, 9])), other: value(A_DUE)}
    lost = shares._lost(key, context_of(due, got, FOUR))
    assert {fqn: at.tolist() for fqn, at in lost.items()} == {"a": [4, 5]}
    assert shares._with_empty_shares(key._replace(op=99), context_of(due, got, FOUR)) == {}
