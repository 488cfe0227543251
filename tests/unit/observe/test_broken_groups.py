"""Param groups and states that a load has broken are observed: what is gone shows as missing, and nothing raises."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from shardproof.diff import diff
from shardproof.observe.logical import Key, Logical, Value
from shardproof.observe.numbers import number_of, numbers_of
from shardproof.observe.record import LIVE
from shardproof.observe.settings import SETTING, settings_of
from shardproof.oracle.settings import kept_settings
from shardproof.program import expand
from shardproof.scenario import Scenario
from shardproof.torch_loop.loop import TorchRank, as_state

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


def test_state_that_nobody_expects_is_observed_as_such() -> None:
    rank: Any = SimpleNamespace(context=SimpleNamespace(rank=1))
    rank.unknown = partial(TorchRank.unknown, rank)
    op = expand(Scenario(program="build step"))[1]
    (record,) = TorchRank.state_records(rank, op, "a.weight", torch.nn.Parameter(torch.ones(2)), {"stray": [1, None]})
    assert (record.role, record.fqn, record.data) == ("unknown", "a.weight.stray", b"(int 1, NoneType)")


# --- keys and types ----------------------------------------------------------------------------------------


def test_every_key_of_a_group_is_a_line_with_its_type() -> None:
    group = {**ADAM, "lr": torch.tensor(0.5), "initial_lr": 0.25, "capturable": False, "foreach": None, "note": "a"}
    lines = dict(settings_of(group))
    assert lines.keys() == group.keys() - {"params"}
    assert lines["lr"] == "tensor float32 ()"
    assert lines["initial_lr"] == "float 0.25"
    assert lines["capturable"] == "bool False"
    assert lines["foreach"] == "NoneType"
    assert lines["note"] == "str 'a'"
    assert lines["weight_decay"] == "float"  # its number is a record of its own
    assert lines["betas"] == "(float, float)" == dict(settings_of({"betas": [0.5, 0.5]}))["betas"]


def test_a_flag_that_turns_into_a_number_is_another_line() -> None:
    assert dict(settings_of({"maximize": False})) != dict(settings_of({"maximize": 0}))


BUILT, ANEW = {"lr": "float", "initial_lr": "float 0.5"}, {"lr": "float", "initial_lr": "float 0.1"}


def observed_settings(*after: dict[str, str]) -> Logical:
    return {
        Key(index, LIVE, SETTING, name): Value("utf8", (len(line),), line.encode())
        for index, lines in enumerate(after)
        for name, line in lines.items()
    }


PROGRAM = expand(Scenario(program="build step save build load step"))


@pytest.mark.parametrize(
    ("after_load", "kind"),
    [
        (BUILT, None),
        (ANEW, "bits"),  # what a load that does nothing leaves
        ({**BUILT, "lr": "tensor float32 ()"}, "bits"),
        ({"lr": "float"}, "missing"),
        ({}, "missing"),  # all of them gone: nothing is left that could be compared
        ({**BUILT, "step": "int 2"}, "extra"),
    ],
)
def test_a_load_gives_back_the_settings_that_were_saved(after_load: dict[str, str], kind: str | None) -> None:
    observed = observed_settings(BUILT, BUILT, BUILT, ANEW, after_load, after_load)
    found = diff(kept_settings(observed, PROGRAM), observed)
    assert {(d.key.op, d.kind) for d in found} == ({(4, kind), (5, kind)} if kind else set())


def test_what_the_run_keeps_is_that_of_its_own_build() -> None:
    """A load that is to leave `initial_lr` to the run, and gives it the checkpoint's, is a difference."""
    for after_load, kinds in ((ANEW, set()), (BUILT, {"bits"})):
        observed = observed_settings(BUILT, BUILT, BUILT, ANEW, after_load, after_load)
        found = diff(kept_settings(observed, PROGRAM, ("initial_lr",)), observed)
        assert {d.kind for d in found} == kinds


def test_a_step_that_adds_a_key_is_a_difference() -> None:
    observed = observed_settings(BUILT, {**BUILT, "step": "int 1"})
    (found,) = diff(kept_settings(observed, PROGRAM[:2]), observed)
    assert (found.key.op, found.key.fqn, found.kind) == (1, "step", "extra")
