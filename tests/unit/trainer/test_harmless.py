"""What two sessions may have otherwise without any effect, with sessions made by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from shardproof.observe.logical import Value
from shardproof.trainer.judge import harmless as module
from shardproof.trainer.judge.harmless import beside_random_states, harmless, made_anew, of_loaders_elsewhere
from shardproof.trainer.judge.judging import Judging
from shardproof.trainer.values.every_mesh import Name

EPOCH, COUNT, PLACE = (
    ("extra_state", "loader.sampler.epoch"),
    ("scheduler", "schedule._step_count"),
    ("scheduler", "schedule.last_epoch"),
)
WRAPPED = ("rng", "rank0.loader.sampler.generator")


def value(text: str) -> Value:
    return Value("utf8", (len(text),), text.encode())


def judged(
    first: dict[Name, str], other: dict[Name, str], given: tuple[str, str] = ("a", "a")
) -> tuple[set[Name], int]:
    """What is left out of two sessions of one step, and how many notes there are."""
    at = {1: first, 2: other}
    judging = SimpleNamespace(
        loaded=lambda session: -1, saved=0, in_turn=lambda session, whole: [(1, 2)],
        at=lambda op: {name: value(text) for name, text in at[op].items()},
        given={op: {0: (told,)} for op, told in zip((1, 2), given, strict=True) if told},
    )  # fmt: skip
    session = cast(Any, None)
    found, notes = harmless(cast(Judging, judging), session, session)
    return found, len(notes)


@pytest.mark.parametrize("name", [EPOCH, WRAPPED])
def test_a_part_of_a_loader_that_one_run_has_alone(name: Name) -> None:
    assert judged({}, {name: "int 1"}) == ({name}, 1)
    assert judged({}, {name: "int 1"}, ("a", "b")) == (set(), 0), "the data differ"
    assert judged({}, {name: "int 1"}, ("", "")) == (set(), 0), "nobody knows what the data are"
    assert judged({name: "int 2"}, {name: "int 1"}) == (set(), 0), "both have it"


def test_the_count_of_a_schedules_calls_alone() -> None:
    one, other = {COUNT: "int 2", PLACE: "int 2"}, {COUNT: "int 3", PLACE: "int 2"}
    assert judged(one, other) == ({COUNT}, 1)
    assert judged(one, other | {PLACE: "int 3"}) == (set(), 0)


def test_what_of_a_loader_another_mesh_has_not() -> None:
    weight = ("param", "w")
    assert of_loaders_elsewhere({EPOCH: value("1"), weight: value("2")}, {}) == {EPOCH}


def test_data_that_differ_later_are_told_before_what_a_loader_says_of_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    def differs(role: str, fqn: str, op: int) -> Any:
        return SimpleNamespace(key=SimpleNamespace(role=role, fqn=fqn, op=op))

    first, later = differs("extra_state", "rank0.loader._num_yielded", 1), differs("param", "w", 2)
    judging: Any = SimpleNamespace(
        without_effect=set(), observed=[], between=None, looked_at=1,
        steps_differ=lambda *_, **__: [later],
    )  # fmt: skip
    monkeypatch.setattr(module, "data_of", lambda judging, session, found: "The data differ")
    session: Any = SimpleNamespace(ops=[SimpleNamespace(kind="step", index=index) for index in (2, 3)])
    found, notes = beside_random_states(judging, session, session, [first], ())
    assert (found, notes) == ([later], ["not alike before that already: rank0.loader._num_yielded"])
    monkeypatch.setattr(module, "data_of", lambda judging, session, found: "")
    assert beside_random_states(judging, session, session, [first], ()) == ([first], [])


def test_a_tensor_that_each_step_makes_anew_need_not_be_there_after_a_load() -> None:
    name, text = ("extra_state", "rank0.hidden"), ("extra_state", "rank0.count")
    tensor, other = Value("fp32", (1,), b"abcd"), Value("fp32", (1,), b"efgh")
    assert made_anew([({name: tensor}, {}), ({name: other}, {name: other})]) == {name}
    assert made_anew([({}, {name: tensor}), ({name: other}, {name: other})]) == {name}
    assert made_anew([({name: tensor}, {name: other}), ({name: other}, {name: other})]) == set(), "both have it"
    assert made_anew([({name: tensor}, {}), ({name: other}, {name: tensor})]) == set(), "a step depends on it"
    assert made_anew([({name: tensor}, {})]) == set(), "no step shows it"
    assert made_anew([({text: value("int 1")}, {}), ({text: value("int 2")}, {text: value("int 2")})]) == set()
