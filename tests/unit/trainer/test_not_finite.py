"""Where a NaN comes up first: a module's output, a gradient, the optimizer's state, a parameter."""

from __future__ import annotations

import numpy as np
import pytest
from shardproof.observe.logical import Value
from shardproof.trainer.values.not_finite import where_first

FINE, WILD = (Value("fp32", (2,), np.array(numbers, np.float32).tobytes()) for numbers in ([1, 2], [np.nan, 1]))
MOMENT, PARAM = ("exp_avg", "w"), ("param", "w")


@pytest.mark.parametrize(
    ("wild", "output", "seen", "told"),
    [
        ([PARAM, MOMENT], "0 (Linear)", {"w": "not finite"}, "the output of 0 (Linear) is the first to have one"),
        ([PARAM, MOMENT], "", {"w": "not finite"}, "the gradient of w has one"),
        ([PARAM, MOMENT], "", {"w": "gradient"}, "no gradient that the optimizer was given has one, and exp_avg of w"),
        ([PARAM], "", {}, "w has one, and no state of the optimizer has"),
        ([], "0 (Linear)", {"w": "not finite"}, ""),
    ],
)
def test_the_first_is_named(wild: list[tuple[str, str]], output: str, seen: dict[str, str], told: str) -> None:
    fine = {PARAM: FINE, MOMENT: FINE}
    found = where_first([PARAM, MOMENT], {**fine, **dict.fromkeys(wild, WILD)}, fine, output, seen)
    assert told in found if told else found == ""
