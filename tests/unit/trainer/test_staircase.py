"""Learning rates that go up by one factor from group to group, but for one."""

from __future__ import annotations

import pytest
from shardproof.observe.logical import Value
from shardproof.trainer.values.rounding import At
from shardproof.trainer.values.staircase import staircase


def groups(*rates: float) -> At:
    found: At = {}
    for number, rate in enumerate(rates):
        for name, text in (("lr", f"float {rate!r}"), ("params", f"layers.{number}.weight\nlayers.{number}.bias")):
            found = {**found, ("setting", f"group{number}.{name}"): Value("utf8", (len(text),), text.encode())}
    return found


def test_a_step_that_is_twice_as_wide_is_told() -> None:
    assert staircase(groups(*(0.01 * 0.8**power for power in (5, 4, 3, 2, 0)))) == (
        "the learning rates of param groups go up by a factor of 1.25 from one to the next, but from group 3 "
        "(layers.3.weight, …) at 0.0064 to group 4 (layers.4.weight, …) at 0.01 by 1.5625, as of 2 steps at once: "
        "unless one is left out on purpose, look at how layers are counted"
    )


@pytest.mark.parametrize(
    "rates",
    [
        [0.01 * 0.8**power for power in (4, 4, 3, 3, 2, 1, 0)],
        [0.01, 0.02, 0.05, 0.07, 0.1],
        [0.01 * 0.8**power for power in (4, 3, 0)],
        [0.01, 0.01, 0.01, 0.01],
        [0.0, 0.0],
        [],
    ],
)
def test_other_rates_are_no_such_case(rates: list[float]) -> None:
    assert staircase(groups(*rates)) == ""
