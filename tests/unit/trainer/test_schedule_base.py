"""Rates that lie above those that a schedule goes out from."""

from __future__ import annotations

import pytest
from shardproof.observe.logical import Value
from shardproof.trainer.values.every_mesh import Name
from shardproof.trainer.values.schedule_base import above_the_base


def values(rates: list[float], base: list[float]) -> dict[Name, Value]:
    texts = {("setting", f"group{number}.lr"): f"float {rate}" for number, rate in enumerate(rates)}
    texts |= {("scheduler", f"schedule.base_lrs.{number}"): f"float {rate}" for number, rate in enumerate(base)}
    return {name: Value("utf8", (len(text),), text.encode()) for name, text in texts.items()}


def test_a_rate_that_was_multiplied_behind_the_schedule_is_told() -> None:
    assert above_the_base(values([0.4, 0.04], [0.1, 0.01])) == (
        "the run begins with a learning rate of 0.4, and schedule.base_lrs is 0.1: what multiplied the rate by 4 did "
        "not reach the schedule, which goes out from the smaller one when it next sets the rate"
    )


@pytest.mark.parametrize(
    ("rates", "base"),
    [
        pytest.param([0.1], [0.1], id="as it is"),
        pytest.param([0.01], [0.1], id="a warm-up"),
        pytest.param([0.4, 0.02], [0.1, 0.01], id="each by its own"),
        pytest.param([0.4], [0.1, 0.01], id="of another optimizer"),
        pytest.param([0.4], [], id="none"),
    ],
)
def test_other_rates_are_not_told(rates: list[float], base: list[float]) -> None:
    assert above_the_base(values(rates, base)) == ""
