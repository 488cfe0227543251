"""Param groups and states that a load has broken are observed: what is gone shows as missing, and nothing raises."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from harness.observe.numbers import number_of, numbers_of
from harness.systems.torch_loop import as_state

ADAM = {"lr": 0.5, "weight_decay": 0.25, "betas": (0.5, 0.75), "eps": 1e-8, "amsgrad": False, "params": []}
SGD = {"lr": 0.5, "weight_decay": 0.25, "momentum": 0.5, "nesterov": True, "dampening": 0.0}
WHOLE = {"lr": 0.5, "weight_decay": 0.25, "beta1": 0.5, "beta2": 0.75, "eps": 1e-8}


def test_a_whole_group_has_all_its_numbers() -> None:
    assert dict(numbers_of(ADAM)) == WHOLE
    assert dict(numbers_of(SGD)) == {"lr": 0.5, "weight_decay": 0.25, "momentum": 0.5, "nesterov": 1.0}
    assert dict(numbers_of({**ADAM, "lr": torch.tensor(0.5)})) == WHOLE


@pytest.mark.parametrize("key", ["lr", "weight_decay", "eps"])
@pytest.mark.parametrize("broken", [None, "0.5", [0.5], {}, torch.ones(2), object()])
def test_a_number_that_is_lost_or_no_number_is_missing(key: str, broken: Any) -> None:
    less = {name: number for name, number in WHOLE.items() if name != key}
    assert dict(numbers_of({**ADAM, key: broken})) == less
    assert dict(numbers_of({name: value for name, value in ADAM.items() if name != key})) == less


@pytest.mark.parametrize("betas", [None, 0.5, (), "ab", (None, 0.75)])
def test_broken_betas_take_nothing_else_along(betas: Any) -> None:
    found = dict(numbers_of({**ADAM, "betas": betas}))
    assert {name: number for name, number in found.items() if not name.startswith("beta")} == {
        name: number for name, number in WHOLE.items() if not name.startswith("beta")
    }


def test_state_of_another_type_is_missing() -> None:
    assert as_state("exp_avg") is None
    assert as_state({"a": 1}) is None
    kept = as_state(3)
    assert kept is not None
    assert kept.item() == 3
    assert number_of(None) is None
    assert number_of(torch.ones(2)) is None
