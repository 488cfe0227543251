"""Rules about the order of elements, on values made by hand: what each says, whole, and at which boundary it is silent.
Each test is here because a change of the code went unnoticed without it (`docs/mutation.md`)."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from shardproof.diagnosis import Context, Finding
from shardproof.diagnosis.rules import order
from shardproof.diff import Difference, diff
from shardproof.observe.logical import Key, Logical, Value
from shardproof.observe.record import WRITTEN, Record
from shardproof.scenario import Mesh, Scenario

from tests.unit.diagnosis.test_diagnosis import context_of, live
from tests.unit.diagnosis.test_dtype_and_rank_rules import one
from tests.unit.diagnosis.test_piece_rules import met, numbers, stretches, turned, value
from tests.unit.diagnosis.test_rule_engine import SCENARIO

W = live(1, "exp_avg", "w")


def given(due: np.ndarray, got: np.ndarray, key: Key = W, scenario: Scenario = SCENARIO) -> tuple[Difference, Context]:
    return one({key: value(due)}, {key: value(got)}, key, scenario)


def certain(clause: str, **evidence: object) -> Finding:
    return Finding("certain", clause, {"name": "w", **evidence})


# --- slices in another order --------------------------------------------------------------------------

GRID = numbers(24).reshape(4, 6)


def test_slices_in_another_order() -> None:
    clause = "exp_avg of w has its slices along dim 0 in the order [2, 3, 0, 1] after operation 1 (step)"
    assert order.permuted(*given(GRID, GRID[[2, 3, 0, 1]])) == certain(
        f"{clause}: the 2 chunks in reverse", dim=0, order=[2, 3, 0, 1], pattern="the 2 chunks in reverse"
    )
    assert order.permuted(*given(GRID, GRID[:, [0, 2, 1, 3, 4, 5]])) == certain(
        "exp_avg of w has its slices along dim 1 in the order [0, 2, 1, 3, 4, 5] after operation 1 (step)",
        dim=1, order=[0, 2, 1, 3, 4, 5], pattern="",
    )  # fmt: skip
    assert order.permuted(*given(GRID, GRID + 1)) is None
    assert order.permuted(*one({W: value(GRID)}, {}, W)) is None
    assert order.permuted(*given(np.array(1), np.array(2))) is None


def test_each_of_two_tensors_has_its_own_order() -> None:
    other = W._replace(fqn="v")
    due = {W: value(GRID), other: value(GRID)}
    got = {W: value(GRID[[2, 3, 0, 1]]), other: value(GRID[[1, 0, 2, 3]])}
    context = context_of(due, got, SCENARIO)
    found = {d.key.fqn: order.permuted(d, context) for d in diff(due, got)}
    orders = {fqn: finding.evidence["order"] for fqn, finding in found.items() if finding is not None}
    assert orders == {"w": [2, 3, 0, 1], "v": [1, 0, 2, 3]}


def test_the_order_of_two_slices_has_a_name() -> None:
    found = order.permuted(*given(GRID[:2], GRID[[1, 0]]))
    assert found is not None
    assert (found.confidence, found.evidence["pattern"]) == ("certain", "the 2 chunks in reverse")


def test_numbers_of_chunks_are_those_of_the_meshes() -> None:
    scenario = Scenario(mesh=Mesh(2, 3, 1), program="build step")
    context = context_of({}, {}, scenario)
    assert order._counts(context, 1) == {3, 1, 6, 2}
    assert order._counts(context, 9) == {3, 1, 6, 2}
    assert order._counts(context_of({}, {}, replace(scenario, mesh=Mesh(1, 2, 5))), 1) == {2, 5}
    reshard = Scenario(mesh=Mesh(1, 4, 1), program="build step save reshard build load", load="grow")
    counts = {
        op.mesh.dp: order._counts(context_of({}, {}, reshard), op.index) for op in context_of({}, {}, reshard).ops
    }
    assert counts == {4: {4, 1, 2}, 8: {4, 8, 1, 2}}
    rows = numbers(6).reshape(6, 1)
    found = order.permuted(*given(rows, rows[[0, 3, 1, 4, 2, 5]], scenario=scenario))
    assert found is not None
    assert found.evidence["pattern"] == "2 × 3 chunks with the two levels of sharding exchanged"


def test_long_orders_are_shortened() -> None:
    assert order._shorten(range(3)) == "[0, 1, 2]"
    assert order._shorten(range(16)).endswith("14, 15]")
    assert order._shorten(range(17)).endswith("14, 15, …]")


# --- slices from elsewhere ----------------------------------------------------------------------------


def test_slices_from_elsewhere() -> None:
    got = GRID.copy()
    got[[0, 1, 2]] = GRID[[1, 0, 0]]
    assert order.misplaced(*given(GRID, got)) == Finding(
        "likely",
        "in exp_avg of w after operation 1 (step), slice 0 holds 1, 1 holds 0, 2 holds 0",
        {"name": "w", "slices": [0, 1, 2], "sources": [1, 0, 0]},
    )
    got[3] = GRID[2]
    four = order.misplaced(*given(GRID, got))
    assert four is not None
    assert four.confidence == "certain"
    got[2] = 0
    zeros = order.misplaced(*given(GRID, got))
    assert zeros is not None
    assert zeros.clause.endswith("slice 0 holds 1, 1 holds 0, 2 holds zeros, 3 holds 2")
    assert zeros.evidence["sources"] == [1, 0, -1, 2]


def test_slices_that_are_not_from_elsewhere() -> None:
    foreign = GRID.copy()
    foreign[[0, 1]] = GRID[[2, 2]]
    foreign[1, 0] = 99
    assert order._slices_misplaced(*given(GRID, foreign)) is None
    emptied = GRID.copy()
    emptied[1:] = 0
    assert order._slices_misplaced(*given(GRID, emptied)) is None
    assert order._slices_misplaced(*given(GRID, GRID[[1, 0, 2, 3]])) is None, "another rule's"
    twice = GRID[[0, 0, 1, 2]]
    assert order._slices_misplaced(*given(twice, twice[[2, 0, 2, 3]])) is None
    first_is_empty = np.array([[0, 0], [1, 2], [3, 4], [5, 6]], np.float32)
    once_more = order._slices_misplaced(*given(first_is_empty, first_is_empty[[0, 0, 2, 3]]))
    assert once_more is not None, "zeros that are those of a slice"
    assert order._slices_misplaced(*given(np.array(1), np.array(2))) is None
    assert order._slices_misplaced(*one({W: value(GRID)}, {}, W)) is None


def test_many_slices_from_elsewhere_are_shortened() -> None:
    rows = numbers(16).reshape(8, 2)
    for count, more in ((6, False), (7, True)):
        got = rows.copy()
        got[:count] = rows[7]
        found = order._slices_misplaced(*given(rows, got))
        assert found is not None
        assert found.clause.endswith("5 holds 7, …" if more else "5 holds 7")


def test_stretches_from_elsewhere() -> None:
    eight = numbers(8)
    moved = stretches(eight[:4], np.array([5, 1, 2, 3]))
    assert order._stretches_misplaced(*moved) == Finding(
        "certain",
        "of exp_avg of w after operation 1 (step), flattened, rank 1 has elements 5 to 7 from 0 on",
        {"name": "w", "ranks": {"1": [5, 7, 0]}},
    )
    both = order._stretches_misplaced(*stretches(eight[4:], eight[:4]))
    assert both is not None
    assert both.clause.endswith("rank 0 has elements 0 to 3 from 4 on; rank 1 has elements 4 to 7 from 0 on")
    assert order._stretches_misplaced(*given(GRID, GRID + 1)) is None


def runs(got: list[float], due: np.ndarray | None = None, dtype: str = "fp32") -> Finding | None:
    due = numbers(24) if due is None else due
    wrong = np.concatenate([np.array(got), due[len(got) :]])
    sides = [Value(dtype, side.shape, side.astype(np.float32).tobytes()) for side in (due, wrong)]
    return order._runs_misplaced(*one({W: sides[0]}, {W: sides[1]}, W))


def test_runs_by_different_distances() -> None:
    assert runs([5, 6, 7, 0, 0, 1, 2, 3]) == Finding(
        "certain",
        "of exp_avg of w after operation 1 (step), in elements, 3 from 0 on are those from 4 on; 3 from 5 on are those "
        "from 0 on",
        {"name": "w", "runs": [[0, 4, 3], [5, 0, 3]]},
    )
    assert runs([5, 6, 7, 0, 0, 10, 11, 12]) is None, "by one distance"
    assert runs([5, 6, 7, 0, 0, 1, 2, 99]) is None, "not all is of a run"
    assert runs([5, 6, 0, 0, 0, 1, 2, 3]) is None, "two elements are no run"
    assert runs([5, 6, 7, 0, 0, 1, 2, 3], dtype="int32") is None
    five = runs([5, 6, 7, 1, 2, 3, 9, 10, 11, 15, 16, 17, 4, 5, 6])
    assert five is not None
    assert five.clause.endswith("3 from 9 on are those from 14 on; …")
    four = runs([5, 6, 7, 1, 2, 3, 9, 10, 11, 15, 16, 17])
    assert four is not None
    assert four.clause.endswith("3 from 9 on are those from 14 on")
    assert runs([2, 1, *range(3, 25)]) is None
    alike = np.array([1, 1, *range(1, 23)], np.float32)
    of_one_number = [1, 1, 1, 2, 1, 1, 1, 0, 10, 11, 12, 0]
    assert runs(of_one_number, alike) is None, "a stretch of one number may be from anywhere"
    apart = np.concatenate([[5, 6, 7, 0, 0, 1, 2, 3], numbers(24)[8:]]).reshape(GRID.shape)
    told = order.misplaced(*given(GRID, apart))
    assert told is not None
    assert "runs" in told.evidence


# --- dims and distances -------------------------------------------------------------------------------


def test_dims_that_were_exchanged() -> None:
    assert order.transposed(*given(GRID, turned(GRID))) == certain(
        "exp_avg of w has dims 0 and 1 exchanged after operation 1 (step)", dims=[0, 1]
    )
    few = np.array([[1, 1], [2, 2]])
    found = order.transposed(*given(few, turned(few)))
    assert found is not None
    assert found.confidence == "likely"
    assert order.transposed(*given(GRID, GRID + 1)) is None
    assert order.transposed(*given(numbers(4), numbers(4)[::-1])) is None
    assert order.transposed(*one({W: value(GRID)}, {}, W)) is None
    square = numbers(16).reshape(4, 4)
    parts = np.concatenate([square[:2], turned(square[2:])])
    held = [
        Record(1, rank, "live", "exp_avg", "w", "fp32", (4, 4), (rank * 2, 0), (2, 4),
               parts[rank * 2 :][:2].astype(np.float32).tobytes())
        for rank in range(2)
    ]  # fmt: skip
    assert order.transposed(*met({W: value(square)}, held, W)) == certain(
        "exp_avg of w has dims 0 and 1 exchanged in each rank's part after operation 1 (step)", dims=[0, 1]
    )


@pytest.mark.parametrize(
    ("by", "how"), [(1, "1 elements too early"), (2, "2 elements too early"), (-3, "3 elements too late")]
)
def test_everything_from_an_element_on_is_elsewhere(by: int, how: str) -> None:
    due = numbers(20)
    got = due.copy()
    if by > 0:
        got[4:-by] = due[4 + by :]
    else:
        got[4 - by :] = due[4:by]
        got[4:7] = 99
    told = certain(f"exp_avg of w is {how} from element 4 on after operation 1 (step)", **{"from": 4}, elements=by)
    assert order.shifted(*given(due, got)) == told
    assert order.shifted(*given(due, due + 100)) is None
    assert order.shifted(*one({W: value(due)}, {}, W)) is None


# --- a stretch of another tensor ----------------------------------------------------------------------

STORED = Key(2, WRITTEN, "exp_avg", "w")
OTHER = STORED._replace(fqn="v")
MINE, THEIRS = numbers(30), numbers(30, 101)


def cut(got: np.ndarray, key: Key = STORED, more: Logical | None = None, theirs: Value | None = None) -> Finding | None:
    due = {key: value(MINE), OTHER: theirs or value(THEIRS), **(more or {})}
    return order.from_neighbours(*one(due, due | {key: value(got)}, key))


def test_a_stretch_of_another_tensor() -> None:
    got = np.concatenate([MINE[:20], THEIRS[:10]])
    assert cut(got) == Finding(
        "certain",
        "10 of 30 elements of written exp_avg of w are those of v from element 0 on, after operation 2 (save)",
        {"name": "w", "from": "v", "at": 0, "elements": 10},
    )
    inner = cut(np.concatenate([MINE[:4], THEIRS[10:22], MINE[16:]]))
    assert inner is not None
    assert (inner.evidence["at"], inner.evidence["elements"]) == (10, 12)


def test_what_is_no_stretch_of_another_tensor() -> None:
    assert cut(np.concatenate([MINE[:24], THEIRS[:6]])) is not None
    assert cut(np.concatenate([MINE[:25], THEIRS[:5]])) is None, "five elements"
    assert cut(np.concatenate([MINE[:20], THEIRS[20:30]])) is None, "at its own place"
    assert cut(np.concatenate([MINE[:20], THEIRS[:10]]), STORED._replace(where="live")) is None
    alike = value(np.repeat([101.0, 102.0], 15))
    assert cut(np.concatenate([MINE[:20], np.repeat(101.0, 10)]), theirs=alike) is None
    other_dtype = Value("int32", (30,), value(THEIRS).data)
    assert cut(np.concatenate([MINE[:20], THEIRS[:10]]), theirs=other_dtype) is None
    assert cut(MINE + 1000) is None
    assert order.from_neighbours(*one({STORED: value(MINE)}, {}, STORED)) is None


def test_windows_are_looked_for_one_after_the_other_and_in_one_tensor_after_the_other() -> None:
    second = cut(np.concatenate([MINE[:20], [999], THEIRS[:6], MINE[27:]]))
    assert second is not None, "behind an element of no tensor"
    assert (second.evidence["at"], second.evidence["elements"]) == (0, 6)
    assert cut(np.concatenate([MINE[:14], np.zeros(6), THEIRS[:10]])) is not None, "behind zeros"
    of_another = cut(
        np.concatenate([MINE[:20], numbers(10, 501)]), more={STORED._replace(fqn="u"): value(numbers(30, 501))}
    )
    assert of_another is not None
    assert of_another.evidence["from"] == "u"
    three = np.tile([101.0, 102.0, 103.0], 10)
    assert cut(np.concatenate([MINE[:20], three[:10]]), theirs=value(three)) is not None, "three different elements"


def test_windows_are_looked_for_in_tensors_up_to_a_size() -> None:
    for count, looked in ((order.LARGEST // 4, True), (order.LARGEST // 4 + 1, False)):
        due = {STORED: value(numbers(count)), OTHER: value(numbers(count, 100_001))}
        got = due[STORED]._replace(data=due[STORED].data[:-40] + due[OTHER].data[:40])
        found = order.from_neighbours(*one(due, due | {STORED: got}, STORED))
        assert (found is not None) is looked


def test_stretches_agree_from_their_beginnings_on() -> None:
    bits = np.array([1, 2, 3], np.uint32)
    assert order._common(bits, bits) == 3
    assert order._common(bits, bits[:2]) == 2
    assert order._common(bits, np.array([1, 9, 3], np.uint32)) == 1
    assert order._common(bits, np.array([9], np.uint32)) == 0


# --- padding ------------------------------------------------------------------------------------------

PADDED = Scenario(mesh=Mesh(1, 4, 1), program="build step")


def gathered(spoilt: dict[str, int], scenario: Scenario = PADDED, role: str = "compute_param", **changes: object
             ) -> tuple[dict[str, Difference], Context]:  # fmt: skip
    """What two ranks gathered of each parameter for their forwards, of which so many first elements are wrong."""
    due: Logical = {}
    held = []
    for index, param in enumerate(context_of({}, {}, scenario).model.unique_params):
        key = live(1, role, param.fqn)
        right = numbers(param.spec.numel, 1 + 100 * index).reshape(param.spec.shape)
        due[key] = value(right)
        wrong = right.reshape(-1).copy()
        wrong[: spoilt.get(param.fqn, 0)] += 1000
        for rank in range(2):
            raw = wrong.astype(np.float32).tobytes()
            shape = param.spec.shape
            held.append(Record(1, rank, "live", role, param.fqn, "fp32", shape, (0,) * len(shape), shape, raw))
    held = [r._replace(**changes) if r.fqn == changes.get("fqn") else r for r in held]
    observed = {live(1, role, r.fqn): Value("fp32", r.shape, r.data) for r in held}
    context = replace(context_of(due, observed, scenario), records=held)
    return {d.key.fqn: d for d in diff(due, observed)}, context


def paddings(scenario: Scenario = PADDED) -> dict[str, int]:
    """Parameter → padding before it, from its model's shapes: rows of the one before, filled up to the ranks'."""
    params = context_of({}, {}, scenario).model.unique_params
    before: dict[str, int] = {params[0].fqn: 0}
    for one_before, param in pairwise(params):
        rows = one_before.spec.shape[0] if one_before.spec.shape else 1
        before[param.fqn] = -rows % scenario.mesh.dp_shard * (one_before.spec.numel // rows)
    return before


def test_as_many_elements_as_there_is_padding() -> None:
    padding = paddings()
    assert sum(map(bool, padding.values())) > 1
    differences, context = gathered(padding)
    assert set(differences) == {fqn for fqn, n in padding.items() if n}
    for fqn, difference in differences.items():
        found = order.padding_counted(difference, context)
        assert found == Finding(
            "likely",
            f"compute_param of {fqn} deviates after operation 1 (step) in its first elements on every rank, as many as "
            f"there is padding before it, {padding[fqn]}",
            {"name": fqn, "padding": padding[fqn]},
        )
        assert order.padding_counted(replace(difference, kind="replica_conflict"), context) is not None
        assert order.padding_counted(replace(difference, kind="gap"), context) is None
    sizes = {param.fqn: param.spec.numel for param in context.model.unique_params}
    for fqn, count in padding.items():
        for other in {count - 1, count + 1} & {*range(1, sizes[fqn] + 1)}:
            odd, context = gathered(padding | {fqn: other})
            assert [order.padding_counted(d, context) for d in odd.values()] == [None] * len(odd)


def padded(model: str, dp: int) -> list[Finding | None]:
    """What is said of each parameter whose first elements deviate, as many as there is padding before them."""
    scenario = replace(PADDED, model=model, mesh=Mesh(1, dp, 1))
    differences, context = gathered(paddings(scenario), scenario)
    return [order.padding_counted(difference, context) for difference in differences.values()]


def test_padding_says_little_of_a_tensor_that_deviates_whole_and_of_one_element() -> None:
    assert padded("twins", 8) == [None] * 3, "each is exactly as long as the padding before it"
    assert padded("norms", 2) == [None], "one element may be chance"
    (found,) = padded("norms", 6)
    assert found is not None
    assert (found.confidence, found.evidence["padding"]) == ("possible", 3)


def test_of_a_tensor_without_padding_before_it_none_is_said() -> None:
    differences, context = gathered(paddings())
    (any_one, *_) = differences.values()
    (first, *_) = context.model.unique_params
    assert order.padding_counted(replace(any_one, key=any_one.key._replace(fqn=first.fqn)), context) is None


def test_padding_is_of_what_ranks_gathered() -> None:
    differences, context = gathered(paddings(), role="param")
    assert {order.padding_counted(d, context) for d in differences.values()} == {None}
    differences, context = gathered(paddings())
    lost = replace(context, records=[r._replace(dtype="fp16") for r in context.records])
    assert {order.padding_counted(d, lost) for d in differences.values()} == {None}
    (any_one, *_) = differences.values()
    assert order._padding_before(any_one.key._replace(op=99), context) == {}
    assert order._padding_before(any_one.key, replace(context, records=())) == {}
    assert order._is_beginning(live(1, "compute_param", "nobody"), {}, context) is False


def test_padding_is_what_fills_rows_up() -> None:
    mesh = Mesh(1, 4, 1)
    assert [order._padding(size, mesh) for size in ((3, 2), (4, 2), (), (0, 2), (2, 0))] == [2, 0, 3, 0, 0]
    differences, context = gathered(paddings())
    (any_one, *_) = differences.values()
    due = order._padding_before(any_one.key, context)
    assert {fqn: max(own.values()) for fqn, own in due.items()} == paddings()
    ranges = [r._replace(flat=True, start=(0,), size=(len(r.data) // 4,)) for r in context.records]
    unpadded = order._padding_before(any_one.key, replace(context, records=ranges))
    assert unpadded == {fqn: dict.fromkeys(own, 0) for fqn, own in due.items()}, "of ranges nothing is known"


def test_an_infinity_to_which_something_is_added_stays() -> None:
    padding = paddings()
    differences, context = gathered(padding)
    fqn = next(fqn for fqn, count in padding.items() if count > 1)
    key = live(1, "compute_param", fqn)
    numbers_of = np.frombuffer(context.expected[key].data, np.float32).copy()
    numbers_of[0] = np.inf
    due = context.expected | {key: context.expected[key]._replace(data=numbers_of.tobytes())}
    held = [r._replace(data=numbers_of[:1].tobytes() + r.data[4:]) if r.fqn == fqn else r for r in context.records]
    assert order.padding_counted(differences[fqn], replace(context, expected=due, records=held)) is not None
    assert order.padding_counted(differences[fqn], replace(context, expected=due)) is None


@pytest.mark.parametrize(
    ("tp", "split", "padding"),
    [(1, None, 6), (2, None, 6), (1, 0, 6), (2, 0, 1)],
    ids=["", "tp", "split", "split by tp"],
)
def test_a_parameter_that_no_forward_uses_lies_between(
    monkeypatch: pytest.MonkeyPatch, tp: int, split: int | None, padding: int
) -> None:
    """Before `partly.weight` lies `dead.weight` of 4 × 3, unless tensor parallelism splits it, and before that
    `used.bias` of 5: rows are filled up to a multiple of 3 ranks."""
    scenario = replace(PADDED, model="unused", mesh=Mesh(1, 3, tp))
    params = [
        param if param.spec.used else replace(param, spec=replace(param.spec, tp_dim=split))
        for param in context_of({}, {}, scenario).model.unique_params
    ]
    monkeypatch.setattr(
        "shardproof.diagnosis.explanation.model_spec", lambda name: SimpleNamespace(unique_params=tuple(params))
    )
    held = [
        Record(1, rank, "live", "compute_param", p.fqn, "fp32", p.spec.shape, (0,) * len(p.spec.shape), p.spec.shape,
               bytes(4 * p.spec.numel))
        for p in params
        if p.spec.used
        for rank in range(2)
    ]  # fmt: skip
    key = live(1, "compute_param", params[0].fqn)
    found = order._padding_before(key, replace(context_of({}, {}, scenario), records=held))
    assert found == {
        "used.weight": {0: 0, 1: 0}, "used.bias": {0: 3, 1: 3}, "partly.weight": {0: padding, 1: padding},
    }  # fmt: skip
