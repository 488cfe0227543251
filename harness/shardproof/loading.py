"""The scenario as seen by the ranks that load a checkpoint: from the first `reshard` or `restart` on, some axes have
other values.

`load` names the mesh of those ranks, which every operation carries (`shardproof.program.expand`). What else may change
is here: `load_dtype`, their dtype policy; `load_model`, their model, which has one module more or fewer;
`load_optimizer`, the kind of their optimizer, or whether its learning rate is a tensor; `load_options`, the switches
that they give the library; and `load_version`, their release of it. For example, a checkpoint of an `fp32` run from
which a `bf16` run goes on is `dtype=fp32 load_dtype=bf16`: the ranks of the first session build fp32 parameters, those
of the second bf16 ones, and the load has to round what it reads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from shardproof.axes_read import Noting
from shardproof.models import ONE_MORE
from shardproof.program import LOAD_AXES, Op, changes, is_other
from shardproof.scenario import Optimizer, Scenario
from shardproof.versions import with_cures

T = TypeVar("T")


_OTHERS = {axis.removeprefix("load_") for axis in LOAD_AXES}


def _itself(value: object) -> object:
    return value


def scenario_during(scenario: Scenario, op: Op) -> Scenario:
    """The scenario as the ranks of an operation see it: its program and its sessions are those of the whole."""
    return as_loaded(scenario) if op.session else scenario


def as_loaded(scenario: Scenario) -> Scenario:
    """The scenario as the ranks see it that load, with the same cures. Its program, and how it falls into sessions, are
    the same."""
    if isinstance(scenario, Noting):

        def fact(axis: str, of: Callable[[object], T]) -> T:
            if axis in ("dtype", "model", "options") and scenario.fact(f"load_{axis}", is_other):
                return scenario.fact(f"load_{axis}", of)
            if axis == "optimizer" and (other := scenario.load_optimizer) is not None:
                return scenario.fact("optimizer", lambda ask: of(with_other(ask, other)))
            return of(_version(scenario)) if axis == "version" else scenario.fact(axis, of)

        return Noting(lambda axis: fact(axis, _itself) if axis in _OTHERS else getattr(scenario, axis), fact)
    if not changes(scenario):
        return scenario
    return replace(
        scenario,
        dtype=scenario.load_dtype or scenario.dtype,
        model=scenario.load_model or scenario.model,
        optimizer=_optimizer(scenario),
        options=scenario.options if scenario.load_options is None else scenario.load_options,
        version=_version(scenario),
    )


def switches(scenario: Scenario, option: str) -> bool:
    """Whether an option is on for the ranks that save and off for those that load, or the other way round."""
    after = scenario.load_options
    return after is not None and (option in scenario.options) != (option in after)


def grows(scenario: Scenario) -> bool:
    """Whether the model of the ranks that load has a module that their checkpoint knows nothing of."""
    return scenario.load_model == f"{scenario.model}{ONE_MORE}"


def shrinks(scenario: Scenario) -> bool:
    """Whether the checkpoint has a module that the model of the ranks that load does not have."""
    return scenario.model == f"{scenario.load_model}{ONE_MORE}"


def widest_model(scenario: Scenario) -> str:
    """The name of the larger of two models: the model that is saved, or the model that is loaded into. Where they
    differ, one contains the parameters of the other."""
    return max(scenario.model, scenario.load_model or "", key=len)


def with_other(ask: Optimizer, other: str) -> Optimizer:
    """An optimizer as a value of the axis `load_optimizer` has it: of another kind, or with another option. For
    example, `adam` makes it Adam, and `tensor_lr=true` gives its learning rates as tensors."""
    _, is_option, value = other.partition("tensor_lr=")
    return replace(ask, tensor_lr=value == "true") if is_option else replace(ask, kind=other)


def _optimizer(scenario: Scenario) -> Optimizer:
    other = scenario.load_optimizer
    return scenario.optimizer if other is None else with_other(scenario.optimizer, other)


def _version(scenario: Scenario) -> str:
    loads = {"same": scenario.release, "newest": ""}.get(scenario.load_version, scenario.load_version)
    return with_cures(loads, scenario.cures)
