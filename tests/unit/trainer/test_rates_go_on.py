"""A schedule that a load builds anew, whose counts begin again while its rates go on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from shardproof.diff import Difference
from shardproof.observe.logical import Key, Value
from shardproof.trainer.judge.after_load import AGAIN
from shardproof.trainer.judge.saved_and_loaded import with_rates
from shardproof.trainer.values.rounding import At

COUNT = Difference(Key(5, "live", "scheduler", "schedule.last_epoch"), "bits")
WEIGHT = Difference(Key(5, "live", "param", "w"), "bits")


def at(rate: str) -> At:
    text = f"float {rate}".encode()
    return {("setting", "group0.lr"): Value("utf8", (len(text),), text)}


def told(rates: dict[int, str], found: list[Difference]) -> str:
    """What is said of a run whose rates at the save, at step 2 and step 3 are 3, 2 and 1, and of one with others."""
    whole = [SimpleNamespace(kind="step", iteration=step, index=step) for step in (2, 3)]
    resumed = [SimpleNamespace(kind="step", iteration=step, index=step + 4) for step in (2, 3)]
    moments = {1: at("3"), 2: at("2"), 3: at("1")} | {op: at(rate) for op, rate in rates.items()}
    judging: Any = SimpleNamespace(
        whole=SimpleNamespace(ops=whole), saved=1, at=moments.__getitem__, loaded=lambda session: 5
    )
    session: Any = SimpleNamespace(ops=resumed)
    return with_rates(f"{AGAIN}: {found[0].key.fqn}.", judging, session, found)


def test_rates_that_go_on_are_told() -> None:
    said = told({5: "3", 6: "2", 7: "1"}, [COUNT])
    assert said.startswith("What the learning-rate schedule counts starts again, and its rates go on: ")
    assert said.endswith("2 steps behind it: where a load builds the schedule anew out of the steps that are done, "
                         "leave schedule out of `state()`.")  # fmt: skip


@pytest.mark.parametrize(
    ("rates", "found"),
    [
        ({5: "3", 6: "3", 7: "2"}, [COUNT]),
        ({5: "9", 6: "2", 7: "1"}, [COUNT]),
        ({5: "3", 6: "2", 7: "1"}, [COUNT, WEIGHT]),
    ],
)
def test_a_schedule_that_begins_again_is_no_such_case(rates: dict[int, str], found: list[Difference]) -> None:
    assert told(rates, found) == f"{AGAIN}: {found[0].key.fqn}."
