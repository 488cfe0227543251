"""A scenario as the ranks see it that load: from the first `reshard` or `restart` on some axes have another value.

`load` names the mesh of those ranks, which every operation carries (`harness.program.expand`). What else may change is
here: `load_dtype`, their dtype policy, and `load_version`, their release of the library. For example, a checkpoint of
an `fp32` run from which a `bf16` run goes on is `dtype=fp32 load_dtype=bf16`: the ranks of the first session build fp32
parameters, those of the second bf16 ones, and the load has to round what it reads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from harness.noting import Noting
from harness.program import Op, changes
from harness.scenario import Scenario
from harness.versions import split_cures, with_cures

T = TypeVar("T")

LOAD_AXES = ("load_dtype", "load_version")
"""The axes that are those of the ranks that load."""


def at(scenario: Scenario, op: Op) -> Scenario:
    """The scenario as the ranks of an operation see it: its program and its sessions are those of the whole."""
    return as_loaded(scenario) if op.session else scenario


def as_loaded(scenario: Scenario) -> Scenario:
    """The scenario as the ranks see it that load, with the same cures. Its program, and how it falls into sessions, are
    the same."""
    if isinstance(scenario, Noting):

        def fact(axis: str, of: Callable[[object], T]) -> T:
            if axis == "dtype" and scenario.load_dtype is not None:
                return scenario.fact("load_dtype", of)
            return of(_version(scenario)) if axis == "version" else scenario.fact(axis, of)

        return Noting(lambda axis: fact(axis, lambda value: value), fact)
    if not changes(scenario):
        return scenario
    return replace(scenario, dtype=scenario.load_dtype or scenario.dtype, version=_version(scenario))


def _version(scenario: Scenario) -> str:
    release, wanted = split_cures(scenario.version)
    loads = {"same": release, "newest": ""}.get(scenario.load_version, scenario.load_version)
    return with_cures(loads, wanted)
