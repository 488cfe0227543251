"""A learning rate that a schedule holds and the optimizer has not, and what is no such thing."""

from __future__ import annotations

import pytest
from shardproof.diff import Difference
from shardproof.observe.logical import Key, Value
from shardproof.trainer.rates import ZERO, of_rates, rates_in


def line(text: str) -> Value:
    return Value("utf8", (len(text),), text.encode())


OBSERVED = {
    ("setting", "group0.lr"): line("float 1.0"), ("setting", "group1.lr"): line("float 0.0"),
    ("scheduler", "scheduler._last_lr.0"): line("float 0.1"), ("scheduler", "scheduler.last_epoch"): line("int 3"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("role", "name", "expected", "told"),
    [
        ("setting", "group0.lr", "'float 0.1'", True),
        ("setting", "optimizer.group0.lr", "'float 0.1'", True),
        ("setting", "group0.lr", "'float 0.2'", False),
        ("setting", "group1.lr", "'float 0.1'", False),
        ("setting", "group0.weight_decay", "'float 0.1'", False),
        ("scheduler", "scheduler._last_lr.0", "'float 0.1'", False),
    ],
)
def test_a_rate_that_only_the_schedule_holds(role: str, name: str, expected: str, told: bool) -> None:
    difference = Difference(Key(3, "live", role, name), "bits", expected_first=expected, observed_first="'float 1.0'")
    assert ("holds the right rate, 0.1," in of_rates([difference], OBSERVED)) is told


def test_rates_are_those_of_groups() -> None:
    assert rates_in(OBSERVED) == {b"float 1.0", b"float 0.0"}
    assert not rates_in({("buffer", "group0.lr"): line("int 0")})
    assert rates_in(OBSERVED) & ZERO
