"""Parameters whose gradient is zero but for rounding, under `alike = "rounding"`."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
from shardproof.diff import diff
from shardproof.observe.logical import Key, Value
from shardproof.observe.record import LIVE
from shardproof.trainer.values.notes import of_noise
from shardproof.trainer.values.rounding import beyond_rounding

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
    return [f"{each.key.role} {each.key.fqn}" for each in beyond_rounding(found, start, one, other).wrong]


RIGHT = {"param value": 0.4, "exp_avg value": 0.1}


@pytest.mark.parametrize(
    ("one", "other", "wrong"),
    [
        pytest.param((0.501, 1e-9), (0.499, -3e-9), [], id="noise in both ways"),
        pytest.param((0.501, 1e-9), (0.499, 3e-3), ["exp_avg key", "param key"], id="a gradient in one way"),
        pytest.param((0.501, 1e-3), (0.499, 3e-3), ["exp_avg key", "param key"], id="a gradient in both ways"),
        pytest.param((0.501, 1e-6), (0.499, 3e-6), ["exp_avg key", "param key"], id="a small one"),
        pytest.param((0.501, 0.0), (0.499, 0.0), ["param key"], id="none, and another change"),
        pytest.param((0.501, 1e-9), (np.nan, -3e-9), ["param key"], id="NaN in a parameter"),
        pytest.param((0.501, 1e-9), (0.499, np.nan), ["exp_avg key", "param key"], id="NaN in a moment"),
    ],
)
def test_what_adam_makes_of_noise_is_no_difference(
    one: tuple[float, float], other: tuple[float, float], wrong: list[str]
) -> None:
    ways = [values({"param key": param, "exp_avg key": moment, **RIGHT}) for param, moment in (one, other)]
    assert sorted(beyond(*ways)) == wrong


def test_what_is_there_in_one_way_alone_is_never_noise() -> None:
    one, other = (values({"param key": 0.5 + change, "exp_avg key": 1e-9, **RIGHT}) for change in (1e-3, -1e-3))
    del other["param", "key"]
    assert beyond(one, other) == ["param key"]
    wide = other | values({"param key": 0.499}, "fp64")
    assert "param key" in beyond(one, wide)


def test_without_moments_the_changes_tell() -> None:
    ways = [values({"param key": 0.5 + noise, "param value": 0.4}, "fp64") for noise in (1e-16, -1e-16)]
    assert beyond(*ways) == []
    ways = [values({"param key": 0.5 + change, "param value": 0.4}, "fp64") for change in (1e-9, -1e-9)]
    assert beyond(*ways) == ["param key"]


def test_what_is_left_out_is_named() -> None:
    one, other = (values({"param key": 0.5 + noise, "exp_avg key": noise, **RIGHT}) for noise in (1e-8, -2e-8))
    found = diff(*({Key(1, LIVE, *name): value for name, value in way.items()} for way in (one, other)), ())
    assert beyond_rounding(found, values({"param key": 0.5, "param value": 0.5}), one, other).noise == {"key"}
    assert of_noise({"key"}).endswith("what an optimizer makes of that is noise: param of key")
