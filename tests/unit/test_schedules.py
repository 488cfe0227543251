"""Schedules: the reference's arithmetic is torch's, float for float, beyond what any program steps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from shardproof.reference.kernels import Hyper
from shardproof.reference.schedule import Group, advanced, begin, lines
from shardproof.scenario import SCHEDULES
from shardproof.schedules import CYCLE_STEPS, lines_of_schedule, megatron_share
from shardproof.torch_schedules import go_on_at_own_rates, megatron_schedule, torch_schedule

RATES = (0.03125, 0.1, 0.0078125)


def both(name: str, kind: str) -> tuple[Any, list[Group]]:
    parameters = [torch.nn.Parameter(torch.ones(1)) for _ in RATES]
    groups = [{"params": [p], "lr": lr} for p, lr in zip(parameters, RATES, strict=True)]
    optimizer = torch.optim.SGD(groups, momentum=0.9) if kind == "sgd" else torch.optim.AdamW(groups, betas=(0.9, 0.95))
    own = [Group(Hyper(kind, "foreach", lr, 0.0, 0.9, 0.95, momentum=0.9), (), lr) for lr in RATES]
    return optimizer, own


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
@pytest.mark.parametrize("name", [name for name in SCHEDULES if name != "none"])
def test_the_reference_has_torchs_rates_and_keeps_what_torch_keeps(name: str, kind: str) -> None:
    optimizer, groups = both(name, kind)
    theirs = torch_schedule(name, optimizer)
    assert theirs is not None
    ours = begin(name, groups)
    for epoch in range(CYCLE_STEPS):
        assert (ours.epoch, list(ours.last_lr)) == (epoch, theirs.get_last_lr())
        assert [group.hyper.lr for group in groups] == [group["lr"] for group in optimizer.param_groups]
        if kind == "sgd":
            assert [g.hyper.momentum for g in groups] == [g["momentum"] for g in optimizer.param_groups]
        else:
            assert [g.hyper.beta1 for g in groups] == [g["betas"][0] for g in optimizer.param_groups]
        assert dict(lines(ours)) == dict(lines_of_schedule(theirs.state_dict()))
        if epoch < CYCLE_STEPS - 1:
            optimizer.step()
            theirs.step()
            ours = advanced(ours, groups, of_torch=True)


def test_megatrons_linear_schedule_starts_from_what_its_group_holds() -> None:
    groups = [Group(Hyper("adamw", "multi_tensor", 0.5), (), 0.5)]
    schedule = begin("linear", groups)
    groups[0].peak_lr = 0.25
    assert advanced(schedule, groups, of_torch=False).last_lr == (0.25 * 7 / 8,)
    assert advanced(schedule, groups, of_torch=True).last_lr == (0.5 * 7 / 8,)


def test_rates_that_are_tensors_are_recorded_as_numbers() -> None:
    assert dict(lines_of_schedule({"base_lrs": [torch.tensor(0.5)]})) == {"base_lrs": "(float 0.5)"}


def test_an_unknown_schedule_is_nobodys() -> None:
    with pytest.raises(ValueError, match="torch has no schedule 'sawtooth'"):
        torch_schedule("sawtooth", torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]))
    groups: list[Any] = [SimpleNamespace(hyper=Hyper("sgd", "foreach", 0.5))]
    with pytest.raises(ValueError, match="the reference has no schedule 'sawtooth'"):
        advanced(begin("sawtooth", groups), groups, of_torch=True)


@pytest.mark.parametrize("name", ["linear", "cosine", "warmup"])
def test_megatrons_schedules_are_the_twins(name: str) -> None:
    optimizer, groups = both(name, "adamw")
    theirs, ours = megatron_schedule(name, optimizer), begin(name, groups, of_torch=False)
    assert theirs is not None
    for epoch in range(12):
        assert list(ours.last_lr) == [group["lr"] for group in optimizer.param_groups], epoch
        optimizer.step()
        theirs.step()
        ours = advanced(ours, groups, of_torch=False)


def test_megatrons_warm_up_rises_and_falls_as_its_constructor_says() -> None:
    """OptimizerParamScheduler with lr_warmup_steps=2, lr_decay_steps=8 and lr_decay_style=cosine, down to 0."""
    shares = [megatron_share("warmup", steps) for steps in range(10)]
    assert shares[:3] == [0.0, 0.5, 1.0]
    assert shares[5] == pytest.approx(0.5)
    assert shares[8:] == [0.0, 0.0]
    with pytest.raises(ValueError, match="not asked for the schedule 'halve'"):
        megatron_share("halve", 1)


def test_a_schedule_that_was_loaded_goes_on_at_the_runs_own_rates() -> None:
    saved, _ = both("linear", "adamw")
    before = megatron_schedule("linear", saved)
    assert before is not None
    for _ in range(3):
        saved.step()
        before.step()
    optimizer, _ = both("linear", "adamw")
    for group in optimizer.param_groups:
        group["lr"] *= 2
    schedule = megatron_schedule("linear", optimizer)
    assert schedule is not None
    schedule.load_state_dict(before.state_dict())
    go_on_at_own_rates(schedule, "linear")
    assert [group["lr"] for group in optimizer.param_groups] == [2 * rate * (1 - 3 / 8) for rate in RATES]
