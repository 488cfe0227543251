"""What a load can break in the param groups and states of an optimizer, and what a comparison then says of it: for
tests of observers, with an optimizer of torch's in the place of a library's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from shardproof.diff import diff
from shardproof.observe.logical import Logical
from shardproof.oracle.settings import kept_settings
from shardproof.program import expand
from shardproof.scenario import Scenario

Break = Callable[[torch.optim.Optimizer], object]
Found = set[tuple[str, str, str]]
"""Role, what stands in a record's name behind the parameter's, and kind of a difference."""

BUILD, STEP = expand(Scenario(program="build step"))


def adam_of(parameters: list[torch.nn.Parameter], **settings: Any) -> torch.optim.AdamW:
    """An optimizer of one group that has taken one step."""
    adam = torch.optim.AdamW([{"params": parameters, "initial_lr": 0.5, **settings}], lr=0.5)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    adam.step()
    return adam


def nothing(optimizer: torch.optim.Optimizer) -> object:
    return None


def group_with(**values: Any) -> Break:
    return lambda optimizer: optimizer.param_groups[0].update(values)


def group_without(*keys: str) -> Break:
    return lambda optimizer: [optimizer.param_groups[0].pop(key) for key in keys]


def states_with(**values: Any) -> Break:
    return lambda optimizer: [state.update(values) for state in optimizer.state.values()]


def no_states(optimizer: torch.optim.Optimizer) -> object:
    return optimizer.state.clear()


def no_groups(optimizer: torch.optim.Optimizer) -> object:
    return optimizer.param_groups.clear()


def missing(role: str, *names: str) -> Found:
    return {(role, name, "missing") for name in names}


def another_type(name: str) -> Found:
    return {("setting", name, "bits")}


NUMBERS = ("lr", "weight_decay", "eps", "beta1", "beta2")

BROKEN: list[tuple[Break, Found]] = [
    (nothing, set()),
    (group_without("lr"), missing("setting", "lr") | missing("hyperparameter", "lr")),
    (group_with(lr=None), another_type("lr") | missing("hyperparameter", "lr")),
    (group_with(lr=[0.5]), another_type("lr") | missing("hyperparameter", "lr")),
    (group_with(lr=torch.tensor(0.5)), another_type("lr")),
    (group_with(weight_decay="0.01"), another_type("weight_decay") | missing("hyperparameter", "weight_decay")),
    (group_with(betas=0.9), another_type("betas") | missing("hyperparameter", "beta1", "beta2")),
    (group_with(maximize=0), another_type("maximize")),
    (group_without("initial_lr"), missing("setting", "initial_lr")),
    (group_with(bias_correction=True), {("setting", "bias_correction", "extra")}),
    (states_with(exp_avg=None), missing("exp_avg", "")),
    (states_with(exp_avg="gone"), missing("exp_avg", "")),
    (states_with(step="two"), missing("step", "")),
    (no_states, missing("step", "") | missing("exp_avg", "") | missing("exp_avg_sq", "")),
]
"""What is broken, and all that must differ for it, of each parameter."""


def differences(before: Logical, after: Logical, watched: str) -> Found:
    """What a comparison says of the step `STEP`, where it must leave all as it was after `BUILD`."""
    must = {key._replace(op=STEP.index): value for key, value in before.items() if key.role != "setting"}
    settings = kept_settings(before | after, (BUILD, STEP))
    must |= {key: value for key, value in settings.items() if key.op == STEP.index}
    return {
        (each.key.role, each.key.fqn.removeprefix(watched).removeprefix("."), each.kind)
        for each in diff(must, after)
        if each.key.fqn.startswith(watched)
    }
