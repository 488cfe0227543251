"""`shardproof.trainer.values.arranged`: elements that two ways hold at other places."""

from __future__ import annotations

import numpy as np
import pytest
from shardproof.diff import diff
from shardproof.observe.logical import Key, Value
from shardproof.trainer.values.arranged import arranged

WAYS = "seq=40", "seq=12"
TOKENS = np.array([102, 83, 7, 7, 91, 15, 64, 30, 2, 55, 18, 77])
ROWS = np.arange(40).reshape(10, 4)


def value(array: np.ndarray) -> Value:
    return Value("int64", array.shape, array.astype(np.int64).tobytes())


def said(one: np.ndarray, other: np.ndarray) -> str:
    sides = [{Key(0, "live", "state", "tokens"): value(each)} for each in (one, other)]
    named = [{("state", "tokens"): value(each)} for each in (one, other)]
    return arranged(diff(*sides), *named, WAYS)


@pytest.mark.parametrize(
    ("one", "other", "what"),
    [
        (TOKENS[:-5], TOKENS[5:], ""),  # two elements of seven face each other, which may be chance
        (TOKENS[:-2], TOKENS[2:], "has the same elements 2 places earlier with seq=12 than with seq=40."),
        (TOKENS[1:], TOKENS[:-1], "has the same elements 1 place later with seq=12 than with seq=40."),
        (TOKENS, TOKENS[::-1], "has the same elements with seq=40 and with seq=12, in another order."),
        (ROWS[:-3], ROWS[3:], "has the same rows 3 places earlier with seq=12 than with seq=40."),
        (
            ROWS,
            ROWS[[3, 1, 0, 2, 9, 8, 7, 6, 5, 4]],
            "has the same rows with seq=40 and with seq=12, in another order.",
        ),
        (TOKENS, TOKENS + 1, ""),
        (TOKENS, np.zeros(12), ""),
    ],
)
def test_what_is_at_other_places_is_said(one: np.ndarray, other: np.ndarray, what: str) -> None:
    assert said(one, other) == (f"tokens {what}" if what else "")


def test_two_values_at_other_places_are_chance() -> None:
    """As of weights of a norm after Adam's first step, which are 1 and a learning rate more or less."""
    weights = np.array([0.997, 1.003, 0.9970001, 1.0030001, 1.0029999, 0.9969999, 0.9970002, 1.0030002], np.float32)
    rows = {
        way: {("state", "tokens"): Value("fp32", each.shape, each.tobytes())}
        for way, each in zip(WAYS, (weights, weights[::-1].copy()), strict=True)
    }
    sides = [{Key(0, "live", "state", "tokens"): each["state", "tokens"]} for each in rows.values()]
    assert arranged(diff(*sides), *rows.values(), WAYS) == ""
