"""A script's param groups and its schedule, where a failure is about a group's own setting: Megatron-Core's config
overrides and its scheduler, which writes learning rate and weight decay into the groups. Lines of the script. No torch.

For example, two groups that differ in their learning rate are one override, and the scheduler then gives the group of
`a.bias` and `b.weight` a quarter of the others' rate:

    lower = {ParamKey(name=("*a.bias", "*b.weight")): {"max_lr": 0.0078125}}
"""

from __future__ import annotations

from shardproof.export.case import SETTING, FailureCase
from shardproof.mechanisms.megatron.switches import NEW_DECAY, OVERRIDE
from shardproof.mechanisms.param_scheduler import asked
from shardproof.models import GroupSpec
from shardproof.scenario import Optimizer

STATE = "model, optimizer, scheduler"
"""What a build of such a script returns."""


def scheduled(case: FailureCase) -> bool:
    """Whether a script needs the scheduler: it compares a setting, or takes steps under a schedule."""
    return case.focus.role == SETTING or case.scenario.optimizer.schedule != "none"


def own_groups(case: FailureCase) -> bool:
    """Whether the model asks for param groups of its own."""
    return len(case.spec.groups) > 1 and case.scenario.optimizer.groups == "model"


def overrides(case: FailureCase) -> str:
    """What the optimizer is told of its groups, as an expression: without one the library takes the weight decay off
    biases and vectors."""
    if not own_groups(case):
        return "{}"
    ask, told = case.scenario.optimizer, []
    for index, group in enumerate(case.spec.groups):
        own = _override(group, ask)
        names = tuple(f"*{p.fqn}" for p in case.spec.unique_params if p.spec.group == index)
        if own:
            told.append(f"ParamKey(name={names!r}): {own!r}".replace("'", '"'))
    return f"{{{', '.join(told)}}}"


def _override(group: GroupSpec, ask: Optimizer) -> dict[str, float]:
    own = {"max_lr": ask.lr * group.lr_scale} if group.lr_scale != 1 else {}
    decay = group.weight_decay
    if decay is not None and decay != ask.weight_decay:
        own["wd_mult"] = decay / (ask.weight_decay or 1.0)
    return own


def weight_decay(case: FailureCase) -> str:
    """The weight decay that a build asks for, as an expression of its number where later builds ask for another."""
    return _by_build(case, "weight_decay", differs=NEW_DECAY in case.scenario.options)


def learning_rate(case: FailureCase) -> str:
    """The learning rate that a build asks for, likewise where the run's is to win over the checkpoint's."""
    return _by_build(case, "lr", differs=OVERRIDE in case.scenario.options)


def _by_build(case: FailureCase, name: str, *, differs: bool) -> str:
    """A hyperparameter, or the ones of every build of a program as a table that is read by the build's number."""
    ask = case.scenario.optimizer
    builds = sorted(op.init_seed for op in case.ops if op.kind == "build") if differs else []
    values = {number: getattr(ask.at_build(number), name) for number in builds}
    return f"{values!r}[$number]" if len(values) > 1 else repr(getattr(ask, name))


def scheduler(case: FailureCase) -> list[str]:
    """The call that makes the scheduler; its constructor sets every group's learning rate and weight decay."""
    ask, decay, rate = case.scenario.optimizer, weight_decay(case), learning_rate(case)
    overrides = OVERRIDE in case.scenario.options
    given = [
        f"{name}={value if value in (rate, decay) else repr(value)}"
        for name, value in asked(ask.schedule, rate, decay).items()
    ]
    return [
        "scheduler = OptimizerParamScheduler(",
        f"    optimizer, {', '.join(given[:6])},",
        f"    {', '.join(given[6:])},",
        *["    use_checkpoint_opt_param_scheduler=False, override_opt_param_scheduler=True,"] * overrides,
        ")",
    ]
