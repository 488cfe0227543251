"""Gradients that a line multiplies while the loss scale is in them."""

from __future__ import annotations

import pytest
from shardproof.observe.logical import Value
from shardproof.trainer.lines.statements import Touch
from shardproof.trainer.step.measured import Gradient, OfStep
from shardproof.trainer.step.while_scaled import changed_while_scaled

SCALE = "float 65536.0"
BEFORE = {("scaler", "scaler.scale"): Value("utf8", (len(SCALE),), SCALE.encode())}


def ranks(factor: float) -> dict[int, OfStep]:
    return {0: OfStep(1, {"SGD": 1}, {"w": Gradient((4.0, 1.0), (4.0 * factor**2, factor), False, 1)}, ())}


def line(number: int, *factors: float) -> Touch:
    return Touch(f"mine.py:{number} (`clip()`)", {"changed": ["w"]}, (), factors)


@pytest.mark.parametrize("later", [[], [line(9, 1 / 65536)]], ids=["in the scaler's step", "by a line"])
def test_a_clip_before_the_scale_is_out_is_told(later: list[Touch]) -> None:
    assert changed_while_scaled(ranks(0.25 / 65536), BEFORE, [line(7), line(8, 0.25), *later], 2) == (
        "in step 2 mine.py:8 (`clip()`) multiplies gradients by 0.25 while they still have the factor of the loss "
        "scale, 65536, by which they are divided only behind it: a limit on them counts it in; call the scaler's "
        "`unscale_` before it"
    )


@pytest.mark.parametrize(
    ("total", "lines"),
    [
        pytest.param(0.25 / 65536, [line(7, 1 / 65536), line(8, 0.25)], id="behind unscale_"),
        pytest.param(1 / 65536, [], id="no line"),
        pytest.param(0.25, [line(8, 0.25)], id="nothing takes the scale out"),
        pytest.param(0.25 / 65536, [line(8, 0.25, 0.5)], id="by several numbers"),
    ],
)
def test_nothing_is_told_of_gradients_without_the_scale(total: float, lines: list[Touch]) -> None:
    assert changed_while_scaled(ranks(total), BEFORE, lines, 0) == ""


def test_without_a_scaler_nothing_is_told() -> None:
    assert changed_while_scaled(ranks(0.25 / 65536), {}, [line(8, 0.25)], 0) == ""
