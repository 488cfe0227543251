"""Param groups that were given no parameter, or vectors of one kind with two weight decays."""

from __future__ import annotations

import pytest
from shardproof.observe.logical import Value
from shardproof.trainer.values.chosen import strangely_chosen
from shardproof.trainer.values.every_mesh import Name


def text(of: str) -> Value:
    return Value("utf8", (len(of),), of.encode())


def values(*groups: tuple[str, list[str]]) -> dict[Name, Value]:
    found: dict[Name, Value] = {}
    for number, (decay, names) in enumerate(groups):
        found["setting", f"optimizer.group{number}.params"] = text("\n".join(names))
        found["setting", f"optimizer.group{number}.weight_decay"] = text(f"float {decay}")
        shape = {name: (4,) if name.endswith(("bias", "norm.weight")) else (4, 4) for name in names}
        found |= {("param", name): Value("fp32", own, bytes(16)) for name, own in shape.items()}
    return found


def test_a_group_without_a_parameter_is_told() -> None:
    (told,) = strangely_chosen(values(("0.01", ["a.weight", "a.bias"]), ("0.0", [])))
    assert told == (
        "param group 1, whose weight decay is 0.0, has no parameter: look at what chooses the parameters of each "
        "group, such as a test of their names"
    )


def test_vectors_of_one_kind_with_two_decays_are_told() -> None:
    many = ["layer.0.norm.weight", "layer.1.norm.weight"]
    (told,) = strangely_chosen(values(("0.01", ["layer.0.weight", *many]), ("0.0", ["norm.weight"])))
    assert told.startswith(
        "the weight decay of norm.weight is 0.0, and it is 0.01 for 2 others, such as layer.0.norm.weight, though the "
        "names are of the same kind: "
    )


@pytest.mark.parametrize(
    "groups",
    [
        pytest.param([("0.01", ["a.weight", "b.weight"]), ("0.0", ["a.bias", "b.bias"])], id="vectors without decay"),
        pytest.param([("0.01", ["a.weight"]), ("0.1", ["b.weight"])], id="matrices, each with its own"),
        pytest.param([("0.01", [])], id="the only group"),
        pytest.param([], id="none"),
    ],
)
def test_what_is_often_meant_is_not_told(groups: list[tuple[str, list[str]]]) -> None:
    assert [*strangely_chosen(values(*groups))] == []
