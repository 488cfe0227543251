"""Steps that leave all parameters about one number times what they were."""

from __future__ import annotations

import numpy as np
import pytest
from shardproof.observe.logical import Value
from shardproof.trainer.values.every_mesh import Name
from shardproof.trainer.values.multiplied import multiplied


def values(**numbers: np.ndarray) -> dict[Name, Value]:  # type: ignore[type-arg]
    return {("param", name): Value("fp32", each.shape, each.astype(np.float32).tobytes())
            for name, each in numbers.items()}  # fmt: skip


RANDOM = np.random.default_rng(3)
WEIGHT, BIAS = RANDOM.normal(size=(4, 4)), RANDOM.normal(size=(8,))
STEP = 0.01 * RANDOM.normal(size=(4, 4))


def test_a_sum_whose_weights_do_not_come_to_one_is_told_with_the_line() -> None:
    told = multiplied(values(w=WEIGHT, b=BIAS), values(w=0.5 * WEIGHT + STEP, b=0.5 * BIAS), 3, "mine.py:4")
    assert told == (
        "step 3 leaves all 2 parameters of 8 numbers and more about 0.5 times what they were before it, as a sum or an "
        "average does whose weights do not come to 1; parameters are written there by mine.py:4"
    )


@pytest.mark.parametrize(
    "after",
    [
        pytest.param(values(w=WEIGHT + STEP, b=BIAS), id="an update"),
        pytest.param(values(w=0.5 * WEIGHT, b=0.25 * BIAS), id="each its own number"),
        pytest.param(values(w=0.5 * WEIGHT, b=BIAS), id="one of them"),
        pytest.param(values(w=0.9 * WEIGHT, b=0.9 * BIAS), id="a weight decay"),
        pytest.param(values(w=0.5 * WEIGHT[::-1], b=0.5 * BIAS), id="no multiple"),
        pytest.param(values(w=0.5 * WEIGHT), id="one parameter"),
        pytest.param(values(w=WEIGHT * np.nan, b=BIAS * np.inf), id="no numbers"),
        pytest.param(values(w=0.0 * WEIGHT, b=0.0 * BIAS), id="zeros"),
    ],
)
def test_nothing_is_told_of_other_steps(after: dict[Name, Value]) -> None:
    assert multiplied(values(w=WEIGHT, b=BIAS), after, 0, "") == ""
