"""Canaries of the differ: pairs that a tolerant comparison calls equal, and that must be reported here."""

from __future__ import annotations

import pytest
from shardproof.diff import diff
from shardproof.faults.comparisons import KEY, PAIRS, found_kind, fp32
from shardproof.observe.logical import Key, Value


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("swapped", [False, True], ids=["", "swapped"])
def test_pair_differs(name: str, swapped: bool) -> None:
    a, b, kind = PAIRS[name]
    assert found_kind(b if swapped else a, a if swapped else b) == kind


@pytest.mark.parametrize(
    ("expected", "observed"),
    [
        ({}, {}),
        ({}, {KEY: fp32(1.0)}),
        ({KEY: fp32()}, {KEY: fp32()}),
    ],
)
def test_comparing_nothing_is_never_a_pass(expected: dict[Key, Value], observed: dict[Key, Value]) -> None:
    found = diff(expected, observed)
    assert found[0].kind == "missing"
    assert found[0].fails
    assert found[0].detail.startswith("nothing to compare")


@pytest.mark.parametrize("role", ["param", "exp_avg", "step", "hyperparameter", "buffer", "scaler"])
def test_missing_and_extra_of_every_role(role: str) -> None:
    key, other = KEY._replace(role=role), KEY._replace(role="param", fqn="b")
    (found,) = diff({other: fp32(1.0), key: fp32(0.0)}, {other: fp32(1.0)})
    assert (found.kind, found.key) == ("missing", key)
    (found,) = diff({other: fp32(1.0)}, {other: fp32(1.0), key: fp32(0.0)})
    assert (found.kind, found.key) == ("extra", key)
