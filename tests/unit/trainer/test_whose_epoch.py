"""Data that come again in the same order, beside a sampler that stays in its epoch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from line_cases import step
from shardproof.observe.logical import Value
from shardproof.trainer.judge.whose_data import data_repeat


def judging(epochs: list[int]) -> Any:
    """Make a run of four steps with two batches in turn, and the epoch that a sampler has after each."""
    texts = [f"int {epoch}".encode() for epoch in epochs]
    states = [
        {("extra_state", "rank0.loader.batch_sampler.epoch"): Value("utf8", (len(text),), text)} for text in texts
    ]
    given = {number: {0: f"batch {number % 2}"} for number in range(4)}
    return SimpleNamespace(given=given, at=lambda op: states[op])


RUN: Any = SimpleNamespace(ops=[step(number) for number in range(4)])


@pytest.mark.parametrize(
    ("epochs", "told"),
    [
        (
            [0, 0, 0, 0],
            "; loader.batch_sampler.epoch is 0 after every step, so look at what should tell the sampler its",
        ),
        ([0, 0, 1, 1], ""),
    ],
)
def test_a_sampler_that_stays_in_its_epoch_is_named(epochs: list[int], told: str) -> None:
    note = data_repeat(judging(epochs), RUN)
    assert note.startswith("step 2 was given the data of step 0 again")
    assert told in note
    assert ("set_epoch" in note) is bool(told)
