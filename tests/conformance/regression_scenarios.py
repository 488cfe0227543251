"""The scenarios that are kept beside a system: regressions, and those of defects that hide behind another."""

from __future__ import annotations

import os

import pytest
from shardproof.investigate.cure_table import scenario_of
from shardproof.protocol.system import System
from shardproof.scenario import Scenario
from shardproof.versions import split_cures
from shardproof.world.preflight import clone_variable_of

HANGS = {
    ("torch-fsdp2", "empty-tp-hang"), ("torch-fsdp2", "combined-broadcast"), ("megatron-fsdp", "clip-empty-rank"),
    ("transformer-engine", "fp8-empty-hang"),
}  # fmt: skip
"""(system, regression) of those that hang. They have a laboratory with less patience, the fixture `hasty`."""


def needs_clone(scenario: Scenario) -> None:
    """Skip a test of a commit where no clone of the library was named."""
    variable = clone_variable_of(scenario.system)
    if split_cures(scenario.version)[0].startswith("git:") and not os.environ.get(variable):
        pytest.skip(f"{scenario.version} of {scenario.system} needs a clone: {variable}")


def regression(system: System, name: str) -> Scenario:
    """The scenario of that name, by what follows `regressions/<system>-`."""
    return scenario_of(system, name)
