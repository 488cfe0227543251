"""Scenario: text forms, ids, load relations."""

from __future__ import annotations

import math

import pytest
from shardproof.errors import UsageError
from shardproof.program import load_mesh
from shardproof.scenario import AXES, DTypePolicy, Mesh, Offload, Optimizer, Scenario, parse_axis

GOLDEN_IDS = {
    "{}": "7674a781fc38",
    "system=torch-fsdp2 mesh=2x2x1 dtype=fp32/param=bf16/reduce=fp32": "52017b3a89f9",
    "sharding=zero1 dtype=bf16/master=fp32 offload=cpu=0.5 optimizer=adamw/clip=1.0 program=twice": "2e900bf93219",
}


def scenario_of(text: str) -> Scenario:
    pairs = (word.split("=", 1) for word in text.split() if "=" in word)
    return Scenario().with_axes(dict(pairs))  # type: ignore[arg-type]


@pytest.mark.parametrize(("text", "expected"), GOLDEN_IDS.items())
def test_ids_never_change(text: str, expected: str) -> None:
    assert scenario_of(text).id == expected


def test_a_field_at_its_default_does_not_enter_the_id() -> None:
    assert Scenario().with_axes(Scenario().axis_values()).id == Scenario().id


@pytest.mark.parametrize(
    ("axis", "text"),
    [
        ("mesh", "2x2x1"),
        ("dtype", "fp32/param=bf16/reduce=fp32/output=fp32"),
        ("dtype", "mixed/master=fp32"),
        ("offload", "none"),
        ("offload", "cpu"),
        ("offload", "cpu=0.5"),
        ("optimizer", "sgd/momentum=0.0"),
        ("optimizer", "adamw/impl=fused/clip=1.0/loss_scale=1024.0"),
        ("microbatches", "3"),
        ("faults", "a,b"),
    ],
)
def test_canonical_texts_read_back(axis: str, text: str) -> None:
    assert Scenario().with_axes({axis: text}).axis_values()[axis] == text


def test_options_are_put_in_canonical_order() -> None:
    assert str(DTypePolicy.parse("fp32/reduce=fp32/param=bf16")) == "fp32/param=bf16/reduce=fp32"


@pytest.mark.parametrize(
    ("axis", "text"),
    [
        ("mesh", "2x2"),
        ("mesh", "0x1x1"),
        ("mesh", "-1x1x1"),
        ("dtype", "fp8"),
        ("dtype", "fp32/param=int8"),
        ("dtype", "fp32/param=bf16/param=fp16"),
        ("offload", "cpu=1.5"),
        ("offload", "gpu"),
        ("optimizer", "lion"),
        ("optimizer", "adamw/impl=magic"),
        ("optimizer", "adamw/lr=fast"),
        ("optimizer", "adamw/loss_scale=1000.0"),
        ("optimizer", "adamw/loss_scale=0.5"),
        ("optimizer", "sgd/nesterov=yes"),
        ("optimizer", "sgd/nesterov=true/momentum=0.0"),
        ("microbatches", "4"),
        ("microbatches", "two"),
        ("load", "bigger"),
        ("sharding", "zero3"),
        ("grad_sync", "never"),
        ("reshard_after_forward", "0"),
        ("colour", "red"),
    ],
)
def test_bad_values_say_given_allowed_and_correct_form(axis: str, text: str) -> None:
    with pytest.raises(UsageError, match=r"given .*; allowed: .*; for example: "):
        Scenario().with_axes({axis: text})


def test_every_axis_parses_its_own_default() -> None:
    for axis, text in Scenario().axis_values().items():
        assert parse_axis(axis, text) == getattr(Scenario(), axis)
    assert set(Scenario().axis_values()) == set(AXES)


@pytest.mark.parametrize(
    ("mesh", "relation", "target"),
    [
        ("2x2x1", "same", "2x2x1"),
        ("1x2x1", "grow", "1x4x1"),
        ("1x8x1", "grow", None),
        ("1x5x1", "shrink", "1x2x1"),
        ("1x1x1", "shrink", None),
        ("1x2x1", "indivisible", "1x3x1"),
        ("1x4x1", "indivisible", "1x3x1"),
        ("1x3x1", "indivisible", "1x2x1"),
        ("1x6x1", "indivisible", "1x4x1"),
        ("1x1x1", "indivisible", None),
        ("1x2x1", "tp_change", "1x2x2"),
        ("1x2x4", "tp_change", "1x2x1"),
        ("1x8x1", "tp_change", None),
        ("1x2x1", "1x3x2", "1x3x2"),
    ],
)
def test_load_relations(mesh: str, relation: str, target: str | None) -> None:
    found = load_mesh(Scenario(mesh=Mesh.parse(mesh), load=relation))
    assert found == (Mesh.parse(target) if target else None)


def test_ranks_and_coordinates() -> None:
    mesh = Mesh(2, 2, 2)
    assert mesh.world == 8
    assert mesh.dp == 4
    assert [mesh.coordinate(rank) for rank in (0, 1, 2, 5)] == [(0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 1)]
    assert [mesh.dp_index(rank) for rank in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]


def test_str_names_what_differs_from_the_defaults() -> None:
    assert str(Scenario()) == "defaults"
    changed = Scenario(offload=Offload(0.5), optimizer=Optimizer("sgd", nesterov=True))
    assert str(changed) == "offload=cpu=0.5 optimizer=sgd/nesterov=true"


def test_there_is_one_zero_among_hyperparameters() -> None:
    """Equal scenarios share what is worked out for them, and -0.0 equals 0.0."""
    minus, plus = (Scenario().with_axes({"optimizer": f"adamw/lr={zero}"}) for zero in ("-0.0", "0.0"))
    assert (minus.id, math.copysign(1, minus.optimizer.lr)) == (plus.id, 1.0)


def test_no_options_can_be_said() -> None:
    """`shardproof list` says `none` of them."""
    assert Scenario.from_axes({"options": "none"}) == Scenario.from_axes({"options": ""}) == Scenario()


@pytest.mark.parametrize(("text", "value"), [("same", None), ("none", ()), ("b+a", ("a", "b"))])
def test_options_of_the_load_are_the_same_or_none_or_words(text: str, value: tuple[str, ...] | None) -> None:
    """That ranks load without an option, and that they load with those that saved, are two things."""
    scenario = Scenario.from_axes({"load_options": text})
    assert scenario.load_options == value
    assert Scenario.from_axes(scenario.axis_values()) == scenario
