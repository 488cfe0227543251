"""Schedules: the reference's arithmetic is torch's, float for float, beyond what any program steps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from shardproof.entry import resolve
from shardproof.mechanisms import param_scheduler
from shardproof.reference.kernels import Hyper
from shardproof.reference.schedule import Group, advanced, begin, lines
from shardproof.scenario import TORCH_SCHEDULES
from shardproof.schedules import CYCLE_STEPS, lines_of_schedule
from shardproof.systems.deepspeed import schedule as deepspeed
from shardproof.systems.deepspeed.contract import OWN_SCHEDULES, SHARE
from shardproof.torch_schedules import go_on_at_own_rates, shared_schedule, torch_schedule

RATES = (0.03125, 0.1, 0.0078125)


def both(name: str, kind: str) -> tuple[Any, list[Group]]:
    parameters = [torch.nn.Parameter(torch.ones(1)) for _ in RATES]
    groups = [{"params": [p], "lr": lr, "weight_decay": lr} for p, lr in zip(parameters, RATES, strict=True)]
    optimizer = torch.optim.SGD(groups, momentum=0.9) if kind == "sgd" else torch.optim.AdamW(groups, betas=(0.9, 0.95))
    own = [Group(Hyper(kind, "foreach", lr, lr, 0.9, 0.95, momentum=0.9), (), lr) for lr in RATES]
    return optimizer, own


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
@pytest.mark.parametrize("name", [name for name in TORCH_SCHEDULES if name != "none"])
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
            ours = advanced(ours, groups)


def test_megatrons_linear_schedule_starts_from_what_its_group_holds() -> None:
    groups = [Group(Hyper("adamw", "multi_tensor", 0.5), (), 0.5)]
    schedule = begin("linear", groups)
    groups[0].peak_lr = 0.25
    assert advanced(schedule, groups, share=param_scheduler.SHARE).last_lr == (0.25 * 7 / 8,)
    assert advanced(schedule, groups).last_lr == (0.5 * 7 / 8,)


def test_rates_that_are_tensors_are_recorded_as_numbers() -> None:
    assert dict(lines_of_schedule({"base_lrs": [torch.tensor(0.5)]})) == {"base_lrs": "(float 0.5)"}


def test_an_unknown_schedule_is_nobodys() -> None:
    with pytest.raises(ValueError, match="torch has no schedule 'sawtooth'"):
        torch_schedule("sawtooth", torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]))
    groups: list[Any] = [SimpleNamespace(hyper=Hyper("sgd", "foreach", 0.5))]
    with pytest.raises(ValueError, match="the reference has no schedule 'sawtooth'"):
        advanced(begin("sawtooth", groups), groups)


@pytest.mark.parametrize(
    ("entry", "name"),
    [
        *((param_scheduler.SHARE, name) for name in param_scheduler.OWN_SCHEDULES),
        *((SHARE, name) for name in OWN_SCHEDULES),
    ],
)
def test_a_librarys_own_schedules_are_the_twins(entry: str, name: str) -> None:
    optimizer, groups = both(name, "adamw")
    theirs, ours = shared_schedule(resolve(entry), name, optimizer), begin(name, groups, entry)
    assert theirs is not None
    for epoch in range(12):
        assert list(ours.last_lr) == [group["lr"] for group in optimizer.param_groups], epoch
        assert [g.hyper.weight_decay for g in groups] == [g["weight_decay"] for g in optimizer.param_groups], epoch
        optimizer.step()
        theirs.step()
        ours = advanced(ours, groups, entry)


def test_megatrons_warm_up_rises_and_falls_as_its_constructor_says() -> None:
    """OptimizerParamScheduler with lr_warmup_steps=2, lr_decay_steps=8 and lr_decay_style=cosine, down to 0."""
    shares = [param_scheduler.share("warmup", steps).rate for steps in range(10)]
    assert shares[:3] == [0.0, 0.5, 1.0]
    assert shares[5] == pytest.approx(0.5)
    assert shares[8:] == [0.0, 0.0]
    level = [param_scheduler.share("wsd", steps).rate for steps in range(10)]
    assert level[:3] == [0.0, 1.0, 1.0]
    assert level[5] == pytest.approx(2 * 0.5**0.5 - 1)
    assert level[8:] == [0.0, 0.0]
    assert [param_scheduler.share("growing_decay", n) for n in (0, 2, 8, 9)] == [(1, 0), (1, 0.25), (1, 1), (1, 1)]
    with pytest.raises(ValueError, match="not asked for the schedule 'halve'"):
        param_scheduler.share("halve", 1)


@pytest.mark.parametrize("at_once", [True, False])
def test_a_schedule_that_was_loaded_goes_on_at_the_runs_own_rates(at_once: bool) -> None:
    saved, _ = both("linear", "adamw")
    before = shared_schedule(param_scheduler.share, "linear", saved)
    assert before is not None
    for _ in range(3):
        saved.step()
        before.step()
    optimizer, _ = both("linear", "adamw")
    for group in optimizer.param_groups:
        group["lr"] *= 2
    schedule = shared_schedule(param_scheduler.share, "linear", optimizer)
    assert schedule is not None
    schedule.load_state_dict(before.state_dict())
    loaded = [group["lr"] for group in optimizer.param_groups]
    go_on_at_own_rates(schedule, at_once=at_once)
    assert [group["lr"] for group in optimizer.param_groups] == (
        [2 * rate * (1 - 3 / 8) for rate in RATES] if at_once else loaded
    )
    optimizer.step()
    schedule.step()
    assert [group["lr"] for group in optimizer.param_groups] == [2 * rate * (1 - 4 / 8) for rate in RATES]


def test_deepspeeds_schedules_are_what_its_classes_say() -> None:
    """Written down from the formulas of deepspeed/runtime/lr_schedules.py, 0.19.8."""
    assert [deepspeed.share("linear", steps).rate for steps in range(11)] == [
        0.0, 0.0, 0.5, 1.0, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6, 0.0, 0.0
    ]  # fmt: skip
    assert [deepspeed.share("cosine", steps).rate for steps in (0, 1, 2, 8, 9)] == [0.0, 0.25, 0.625, 0.0625, 0.0625]
    assert [deepspeed.share("warmup", steps).rate for steps in (0, 1, 2, 5, 6)] == [0.0, 0.0, 0.5, 1.0, 1.0]
    for default in (False, True):
        linear = deepspeed.asked_schedule("linear", [0.5, 0.25], rates_are_default=default)
        assert linear["params"]["warmup_max_lr"] == [0.5, 0.25]
    warmup = deepspeed.asked_schedule("warmup", [0.5, 0.25], rates_are_default=False)
    assert warmup["params"]["warmup_max_lr"] == [0.5, 0.25]
    warmup = deepspeed.asked_schedule("warmup", [0.5, 0.25], rates_are_default=True)
    assert "warmup_max_lr" not in warmup["params"]
    with pytest.raises(ValueError, match="no schedule 'halve' of its own"):
        deepspeed.share("halve", 1)
