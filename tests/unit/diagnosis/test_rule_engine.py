"""How explanations are ranked and worded, what their nouns say, and the arithmetic that several rules share.
Each test is here because a change of the code went unnoticed without it (`docs/mutation.md`)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from shardproof.diagnosis import Context, Explanation, Finding, Rule, explain_refusal
from shardproof.diagnosis.arrangement import DISTINCT, FARTHEST, exchanged_dims, moved_along, order_name, slice_order
from shardproof.diagnosis.explanation import Pair, moment, tensor
from shardproof.diagnosis.rules import engine
from shardproof.diff import Difference, diff
from shardproof.observe.logical import Key, Logical, Value
from shardproof.observe.record import LIVE, WRITTEN, Record
from shardproof.scenario import Mesh, Optimizer, Scenario

from tests.unit.diagnosis.test_diagnosis import context_of, live

SCENARIO = Scenario(mesh=Mesh(1, 2, 1), program="build step save step build load step")
STEP, SAVE, LATER, BUILD, LOAD, LAST = 1, 2, 3, 4, 5, 6


def fp32(*numbers: float) -> Value:
    return Value("fp32", (len(numbers),), np.array(numbers, np.float32).tobytes())


def context(expected: Logical | None = None, observed: Logical | None = None, **parts: object) -> Context:
    return replace(context_of(expected or {}, observed or {}, SCENARIO), **parts)


# --- arrangement --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("order", "counts", "name"),
    [
        ((1, 0), (), "the 2 chunks in reverse"),
        ((2, 3, 0, 1), (), "the 2 chunks in reverse"),
        ((3, 2, 1, 0), (), "the 4 chunks in reverse"),
        ((4, 2, 3, 0, 1), (), "the 3 chunks in reverse"),
        ((0, 1, 10, *range(2, 10)), (), "the 11 chunks sorted as text"),
        ((0, 1, 10, 11, *range(2, 10)), (), "the 12 chunks sorted as text"),
        ((0, 2, 1, 3), (1, 2), "2 × 2 chunks with the two levels of sharding exchanged"),
        ((0, 3, 1, 4, 2, 5), (2, 3), "2 × 3 chunks with the two levels of sharding exchanged"),
        ((0, 2, 4, 1, 3, 5), (3, 2), "3 × 2 chunks with the two levels of sharding exchanged"),
        ((0, 1, 4, 5, 2, 3, 6, 7), (2,), "2 × 2 chunks with the two levels of sharding exchanged"),
        ((0, 2, 1, 3), (), ""),
        ((0, 2, 1), (2,), ""),
        ((0, 1), (1, 2), ""),
        ((0, 1, 2), (1, 3), ""),
        ((1, 0, 2), (2,), ""),
        ((0, 1, *range(2, 10)), (), ""),
    ],
)
def test_names_of_orders(order: tuple[int, ...], counts: tuple[int, ...], name: str) -> None:
    assert order_name(order, counts) == name


def test_the_order_of_slices_is_told_where_they_are_the_same_ones() -> None:
    wanted = np.arange(6, dtype=np.uint32).reshape(3, 2)
    assert slice_order(wanted, wanted[[2, 0, 1]]) == (2, 0, 1)
    assert slice_order(wanted, wanted[[2, 0, 0]]) is None
    assert slice_order(wanted, wanted + np.uint32(9)) is None
    assert slice_order(wanted[[0, 0, 1]], wanted[[0, 1, 0]]) is None
    assert slice_order(wanted, np.vstack([wanted[:2], wanted[:1] + np.uint32(9)])) is None


def test_neighbouring_dims_that_were_exchanged() -> None:
    wanted = np.arange(24, dtype=np.uint32).reshape(2, 3, 4)
    for dims in ((0, 1), (1, 2)):
        assert exchanged_dims(wanted, np.swapaxes(wanted, *dims).reshape(wanted.shape)) == dims
    assert exchanged_dims(wanted, np.swapaxes(wanted, 0, 2).reshape(wanted.shape)) is None


@pytest.mark.parametrize("by", [1, 2, FARTHEST - 1, FARTHEST])
@pytest.mark.parametrize("first", [0, 4])
def test_everything_moved_along(by: int, first: int) -> None:
    wanted = np.arange(40, dtype=np.uint32)
    earlier, later = wanted.copy(), wanted.copy()
    earlier[first:-by] = wanted[first + by :]
    later[first + by :] = wanted[first:-by]
    assert moved_along(wanted, earlier, first) == by
    assert moved_along(wanted, later, first) == -by


def test_what_moved_farther_or_is_too_little_is_not_told() -> None:
    wanted = np.arange(40, dtype=np.uint32)
    assert moved_along(wanted, np.roll(wanted, FARTHEST + 1), 0) is None
    few = np.arange(DISTINCT + 1, dtype=np.uint32)
    assert moved_along(few, np.append(few[1:], np.uint32(9)), 0) == 1
    assert moved_along(few, np.append(few[1:], np.uint32(9)), 1) is None
    alike = np.array([1, 2, 2, 2, 2, 2], np.uint32)
    assert moved_along(alike, np.array([7, 1, 2, 2, 2, 2], np.uint32), 0) is None
    assert moved_along(wanted, wanted, 0) is None


# --- refusals -----------------------------------------------------------------------------------------


def refused(message: str, *, sizes: tuple[Record, ...] = ()) -> list[Explanation]:
    return explain_refusal(message, LOAD, context(records=sizes))


def piece(fqn: str, size: tuple[int, ...], where: str = LIVE) -> Record:
    return Record(1, 0, where, "param", fqn, "fp32", size, (0,) * len(size), size, b"")


def test_an_error_that_names_a_parameter_and_the_size_of_another() -> None:
    (found,) = refused("state of 'up.weight' has 60 elements where its shard has 112")
    assert (found.mechanism, found.confidence, found.bug_ids) == ("size_of_another", "likely", ("PT-54736",))
    assert found.text == (
        "What was refused for one parameter has the size of another: operation 5 (load) was given 60 elements for "
        "up.weight, as many as embed.weight has."
    )
    assert found.evidence == ({"name": "up.weight", "elements": 60, "as_many_as": ["embed.weight"]},)


def test_an_error_that_names_a_size_that_two_parameters_have() -> None:
    shapes = (piece("down.bias", (30,)), piece("embed.bias", (5, 6)), piece("up.weight", (9,), WRITTEN))
    (found,) = refused("up.weight is of [112] and not of (30,)", sizes=shapes)
    assert (found.confidence, found.evidence[0]["as_many_as"]) == ("possible", ["embed.bias", "down.bias"])
    assert "as many as embed.bias or down.bias has." in found.text
    assert refused("up.weight is of [9] and not of (30,)", sizes=shapes) == []


@pytest.mark.parametrize(
    "message",
    [
        "up.weight has 60 elements",
        "up.weight has 112 elements",
        "up.weight has 112 and 60 and 7",
        "up.weight has 112 and 61",
        "up.weight is up.bias: 112 and 60",
        "fp32.60 of up.weight: 112",
    ],
)
def test_an_error_that_does_not_say_enough(message: str) -> None:
    assert refused(message) == []


def test_a_name_within_a_longer_one_is_none() -> None:
    (found,) = refused("more.up.weight and up.weight2 have 112 and 60")
    assert "name" not in found.evidence[0]


def test_sizes_in_an_error_are_shapes_or_numbers() -> None:
    (found,) = refused("up.weight: ( 12, 5 ) against [16,7]")
    assert found.evidence[0]["elements"] == 60
    assert refused("up.weight: 12 , 5 against [16,7]") == []


def test_an_error_that_names_two_sizes_and_no_parameter() -> None:
    shapes = (piece("down.bias", (30,)), piece("embed.bias", (5, 6)))
    (found,) = refused("could not broadcast (30,) into shape (16, 7), at 0", sizes=shapes)
    assert (found.mechanism, found.confidence, found.bug_ids) == ("size_of_another", "possible", ("PT-54736",))
    assert found.text == (
        "What was refused for one parameter has the size of another: operation 5 (load) met 30 elements, as many as "
        "embed.bias or down.bias, and 112 elements, as many as up.weight or down.weight."
    )
    assert found.evidence == (
        {"elements": [30, 112], "as_many_as": [["embed.bias", "down.bias"], ["up.weight", "down.weight"]]},
    )
    assert refused("(30,) into (1,)", sizes=shapes) == []
    assert refused("(30,) into (112,) of (1,)", sizes=shapes) == []


# --- nouns --------------------------------------------------------------------------------------------


def test_names_of_operations_values_and_moments() -> None:
    given = context()
    assert [given.op_name(index) for index in (0, LOAD, 7, -1)] == [
        "operation 0 (build)", "operation 5 (load)", "operation 7 ()", "operation -1 ()",
    ]  # fmt: skip
    assert [given.op_kind(index) for index in (0, LOAD, 7, -1)] == ["build", "load", "", ""]
    assert given.op(7) is given.op(-1) is None
    assert tensor(live(1, "param", "w")) == "param of w"
    assert tensor(Key(1, WRITTEN, "param", "w")) == "written param of w"
    assert moment(BUILD, given) == "its initialisation by operation 4 (build)"
    assert moment(LOAD, given) == "its value of operation 5 (load)"


def test_what_a_save_writes_is_of_when_it_was_taken() -> None:
    program = "build step begin_save step finish_save build load"
    given = context_of({}, {}, Scenario(mesh=Mesh(1, 2, 1), program=program))
    written = Key(4, WRITTEN, "param", "w")
    assert given.taken(written) == 2
    assert given.taken(written._replace(where=LIVE)) == 4
    assert given.taken(written._replace(op=6)) == 6, "no save"
    assert given.taken(written._replace(op=7)) == 7, "no operation"


def test_settings_are_those_of_the_groups_or_of_the_scenario() -> None:
    held = {
        live(STEP, "hyperparameter", "group0.lr"): fp32(0.5),
        live(STEP, "hyperparameter", "a.b.lr"): fp32(0.25),
        live(STEP, "hyperparameter", "group0.eps"): fp32(8),
        live(SAVE, "hyperparameter", "group0.lr"): fp32(3),
        live(STEP, "param", "group0.lr"): fp32(4),
        Key(STEP, WRITTEN, "hyperparameter", "group0.lr"): fp32(5),
    }
    assert context(held).settings("lr", STEP) == {0.5, 0.25}
    asked = replace(context(held), scenario=replace(SCENARIO, optimizer=Optimizer.parse("adamw/lr=0.125")))
    assert asked.settings("lr", LATER) == {0.125}


def test_values_of_earlier_and_later_moments_and_of_siblings() -> None:
    numbers = {live(op, "param", "w"): fp32(op) for op in range(7)}
    others = {
        live(LATER, "param", "v"): fp32(9),
        live(LATER, "master", "w"): fp32(8),
        Key(LATER, WRITTEN, "param", "u"): fp32(7),
    }
    given = context(numbers | others)
    at = live(LATER, "param", "w")
    assert [op for op, _ in given.earlier(at)] == [2, 1, 0]
    assert [value for _, value in given.earlier(live(1, "param", "w"))] == [fp32(0)]
    assert [key.fqn for key, _ in given.siblings(at)] == ["v"]
    assert list(given.later(at)) == []
    assert [op for op, _ in given.later(live(STEP, "param", "w"))] == [2, 3]
    assert [value for _, value in given.later(live(LOAD, "param", "w"))] == [fp32(6)]
    resumed = replace(context_of(numbers, {}, Scenario(mesh=Mesh(1, 2, 1))))
    sessions = {op.index: op.session for op in resumed.ops}
    last_of_first = max(index for index, session in sessions.items() if session == sessions[0])
    assert list(resumed.later(live(last_of_first, "param", "w"))) == []


def test_a_pair_knows_where_it_differs_and_how_strong_a_match_is() -> None:
    wanted, got = fp32(1, 2, 3, 4, 5), fp32(1, 7, 8, 9, 5)
    pair = Pair(wanted, got, np.array([1, 2, 3]))
    assert (pair.strength, pair.is_float) == ("certain", True)
    assert replace(pair, at=np.array([1, 2])).strength == "likely"
    assert replace(pair, at=np.array([1])).strength == "possible"
    assert pair.explained_by(fp32(0, 7, 8, 9, 0))
    assert not pair.explained_by(fp32(1, 7, 8, 0, 5))
    assert not pair.explained_by(fp32(1, 7, 8, 9))
    assert not pair.explained_by(Value("int32", (5,), got.data))
    key = live(STEP, "param", "w")
    given = context({key: wanted}, {key: got})
    found = given.pair(diff({key: wanted}, {key: got})[0])
    assert found is not None
    assert found.at.tolist() == [1, 2, 3]
    (odd,) = diff({key: wanted}, {key: fp32(1, 2)})
    assert context({key: wanted}, {key: fp32(1, 2)}).pair(odd) is None
    assert context({}, {key: got}).pair(odd) is None
    assert context({key: wanted}, {key: wanted}).pair(odd) is None


# --- the engine ---------------------------------------------------------------------------------------

NAMES = ("b", "c", "d", "e", "f")


def differing(*keys: Key) -> list[Difference]:
    return diff(dict.fromkeys(keys, fp32(1)), dict.fromkeys(keys, fp32(2)))


def rule(mechanism: str, *confidences: str, only: tuple[str, ...] = ()) -> Rule:
    """A rule that finds the differences with these names, with these confidences in turn."""
    told = iter(confidences)

    def find(difference: Difference, context: Context) -> Finding | None:
        if only and difference.key.fqn not in only and difference.key.role not in only:
            return None
        return Finding(next(told), f"{difference.key.fqn} is", {"name": difference.key.fqn})  # type: ignore[arg-type]

    return Rule(mechanism, "Lead", find, ("BUG-1",))


def told(differences: list[Difference], *own: Rule) -> list[Explanation]:
    return [e for e in engine.explain(differences, context(), own) if e.mechanism.startswith("own")]


def test_an_explanation_begins_with_what_is_surest_and_names_three() -> None:
    found = told(
        differing(*(live(SAVE, "mine", name) for name in NAMES)),
        rule("own", "possible", "likely", "certain", "likely", "possible"),
    )
    assert found == [
        Explanation(
            "own", "certain", "Lead: d is; c is; e is; and more.",
            tuple({"name": name} for name in ("d", "c", "e", "b")), ("BUG-1",),
        )
    ], "of five that look alike, four"  # fmt: skip
    three = told(differing(*(live(SAVE, "mine", name) for name in "bcd")), rule("own", *["likely"] * 3))
    assert three[0].text == "Lead: b is; c is; d is."


def test_explanations_are_ranked_by_confidence_cause_number_and_order() -> None:
    keys = [
        live(STEP, role, name) for role, name in zip(("param", "grad", "param", "mine", "norm"), "pgqxn", strict=True)
    ]
    everywhere = ["likely"] * 5
    found = told(
        differing(*keys),
        rule("own_possible", *["possible"] * 5),
        rule("own_norm", *everywhere, only=("norm",)),
        rule("own_one_param", *everywhere, only=("p",)),
        rule("own_both_params", *everywhere, only=("p", "q")),
        rule("own_again", *everywhere, only=("p", "q")),
        rule("own_gradient", *everywhere, only=("grad",)),
        rule("own_odd_role", *everywhere, only=("mine",)),
        rule("own_certain", *["certain"] * 4, only=("p",)),
        rule("own_silent", only=("nothing",)),
    )
    assert [e.mechanism for e in found] == [
        "own_certain", "own_odd_role", "own_norm", "own_gradient", "own_both_params", "own_again", "own_one_param",
        "own_possible",
    ]  # fmt: skip
    elsewhere = [key._replace(op=SAVE) for key in keys]
    ranked = told(
        differing(*elsewhere),
        rule("own_param", *everywhere, only=("p",)),
        rule("own_grad", *everywhere, only=("grad",)),
    )
    assert [e.mechanism for e in ranked] == ["own_param", "own_grad"]


def test_a_later_operation_is_explained_only_where_nothing_explains_the_first() -> None:
    keys = [live(STEP, "mine", "first"), live(LATER, "mine", "later"), live(LAST, "mine", "last")]
    late = rule("own", "certain", only=("later",))
    (found,) = told(differing(*keys), late)
    assert (found.confidence, found.bug_ids) == ("possible", ("BUG-1",))
    assert found.text == "Nothing explains operation 1 (step), which differs first. Lead: later is."
    (alone,) = told(differing(*keys[1:]), rule("own", "certain", only=("later",)))
    assert (alone.confidence, alone.text) == ("certain", "Lead: later is.")
    assert told([replace(d, kind="equivalent") for d in differing(*keys)], rule("own", "certain")) == []


def test_rules_are_the_built_in_ones_then_those_registered() -> None:
    mine = rule("own", "likely")
    before = engine.rules()
    try:
        assert engine.register(mine) is mine
        assert engine.rules() == (*before, mine)
    finally:
        engine._RULES.remove(mine)
    assert engine.rules() == before
