"""Parameters whose gradient is zero but for rounding, under `alike = "rounding"`."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
from shardproof.diff import diff
from shardproof.observe.logical import Key, Value
from shardproof.observe.record import LIVE
from shardproof.trainer.rounding import beyond_rounding

Values = dict[tuple[str, str], Value]


def values(numbers: Mapping[str, float], dtype: str = "fp32") -> Values:
    """A parameter or a moment of two elements for each `role name`."""
    kind = {"fp32": np.float32, "fp64": np.float64}[dtype]
    return {
        (name.split()[0], name.split()[1]): Value(dtype, (2,), np.array([number, -number], kind).tobytes())
        for name, number in numbers.items()
    }


def beyond(one: Values, other: Values) -> list[str]:
    start = values({"param key": 0.5, "param value": 0.5})
    found = diff(*({Key(1, LIVE, *name): value for name, value in way.items()} for way in (one, other)), ())
    wrong, _ = beyond_rounding(found, start, one, other)
    return [f"{each.key.role} {each.key.fqn}" for each in wrong]


RIGHT = {"param value": 0.4, "exp_avg value": 0.1}


@pytest.mark.parametrize(
    ("one", "other", "wrong"),
    [
        pytest.param((0.501, 1e-9), (0.499, -3e-9), [], id="noise in both ways"),
        pytest.param((0.501, 1e-9), (0.499, 3e-3), ["exp_avg key", "param key"], id="a gradient in one way"),
        pytest.param((0.501, 1e-3), (0.499, 3e-3), ["exp_avg key", "param key"], id="a gradient in both ways"),
    ],
)
def test_what_adam_makes_of_noise_is_no_difference(
    one: tuple[float, float], other: tuple[float, float], wrong: list[str]
) -> None:
    ways = [values({"param key": param, "exp_avg key": moment, **RIGHT}) for param, moment in (one, other)]
    assert sorted(beyond(*ways)) == wrong


def test_without_moments_the_changes_tell() -> None:
    ways = [values({"param key": 0.5 + noise, "param value": 0.4}, "fp64") for noise in (1e-16, -1e-16)]
    assert beyond(*ways) == []
    ways = [values({"param key": 0.5 + change, "param value": 0.4}, "fp64") for change in (1e-9, -1e-9)]
    assert beyond(*ways) == ["param key"]
