"""What a step made that ranks have differently: one gradient that each scales by its own number, or none of one."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
from shardproof.observe.logical import Key, Problem, Value
from shardproof.observe.record import LIVE, whole
from shardproof.observe.settings import SETTING
from shardproof.trainer.values.ranks_apart import Copies, alike_among, apart, copies_of, shared_out

START = np.arange(8, dtype=np.float32)
CHANGE = np.linspace(1, 3, 8, dtype=np.float32)


def value(numbers: np.ndarray) -> Value:
    return Value("fp32", numbers.shape, numbers.astype(np.float32).tobytes())


def copies(changes: Mapping[int, np.ndarray], role: str = "param") -> Copies:
    return {Key(4, LIVE, role, "w"): {rank: value(START + each) for rank, each in changes.items()}}


BEFORE = {("param", "w"): value(START)}


def test_one_gradient_that_each_rank_scales() -> None:
    found = apart(copies({0: CHANGE, 1: CHANGE * 0.25}), BEFORE, {})
    assert found is not None
    assert found.ranks == pytest.approx({0: 1.0, 1: 0.25})
    assert "against rank 0, 0.25 times on rank 1. So the ranks have one gradient" in found.told()


def test_a_rank_that_leaves_it_as_it_is() -> None:
    found = apart(copies({0: CHANGE, 1: CHANGE * 0}), BEFORE, {})
    assert found is not None
    assert "rank 1 alone leaves it as it is" in found.told()


def test_a_gradient_of_its_own() -> None:
    assert apart(copies({0: CHANGE, 1: CHANGE[::-1]}), BEFORE, {}) is None


def test_a_moment_tells_the_gradient_where_the_parameter_does_not() -> None:
    moment = copies({0: CHANGE, 1: CHANGE * 2}, "exp_avg")
    both = {**moment, **copies({0: np.sign(CHANGE), 1: np.sign(CHANGE) * 1.5})}
    settings = {
        ("setting", "group0.betas"): _text("tuple (float 0.5, float 0.9)"),
        ("setting", "group0.params"): _text("w"),
    }
    found = apart(both, BEFORE | {("exp_avg", "w"): value(START * 2)}, settings)
    assert found is not None
    assert found.ranks == pytest.approx({0: 1.0, 1: 2.0})


def _text(text: str) -> Value:
    return Value("utf8", (len(text),), text.encode())


def test_copies_are_kept_of_the_first_operation_where_ranks_part() -> None:
    keys = [Key(op, LIVE, "param", "w") for op in (4, 5)]
    records = [
        whole(key.op, rank, "param", "w", "fp32", (8,), (START + rank).tobytes()) for key in keys for rank in (0, 1)
    ]
    found = copies_of(records, [Problem(key, "replica_conflict", (1,), "") for key in keys])
    assert found == {keys[0]: {0: value(START), 1: value(START + 1)}}


def test_groups_of_ranks_that_have_the_same() -> None:
    one, other = value(START), value(CHANGE)
    assert alike_among({0: one, 1: other, 2: one, 3: other}) == (
        "It is the same among ranks 0, 2, and ranks 1, 3: gradients are reduced among those, and not between them."
    )
    assert alike_among({0: one, 1: one, 2: one, 3: other}) == alike_among({0: one, 1: other}) == ""


@pytest.mark.parametrize(
    ("lists", "shared"),
    [
        ({0: "a\nb", 1: "c"}, True),
        ({0: "a", 1: "b", 2: "a"}, False),
        ({0: "a\nb", 1: "b"}, False),
        ({0: "a", 1: ""}, True),
    ],
)
def test_parameters_that_ranks_share_out_by_hand_are_no_conflict(lists: dict[int, str], shared: bool) -> None:
    records = [
        whole(4, rank, SETTING, "group0.params", "utf8", (len(text),), text.encode()) for rank, text in lists.items()
    ]
    problem = Problem(Key(4, LIVE, SETTING, "group0.params"), "replica_conflict", (0, 1), "")
    other = Problem(Key(4, LIVE, SETTING, "group0.lr"), "replica_conflict", (0, 1), "")
    assert shared_out(records, [problem, other]) == ({problem.key} if shared else set())
