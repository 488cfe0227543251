"""Allow-lists: what a system has not declared, it refuses, with the reason that it has not declared it.

Every registered system is asked, so that an axis, a part of one or a value that comes later is refused everywhere until
a system says that it understands it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any

import pytest
from packaging.version import Version
from shardproof.faults.plain_scenario import plain_scenario
from shardproof.protocol import accepts
from shardproof.protocol.accepts import Accepts, Anything, Limit, Only, Parts
from shardproof.protocol.releases import package
from shardproof.protocol.system import System
from shardproof.scenario import AXES, DTypePolicy, Mesh, Offload, Optimizer, Scenario

from tests.conformance.built_in import BUILT_IN

SYSTEMS = [pytest.param(system, id=system.name) for system in BUILT_IN]
NEW = "brand_new"
OPEN = {
    "system", "version", "model", "mesh", "load", "load_dtype", "load_model", "load_optimizer", "load_version",
    "expert_parallel", "microbatches",
    "seed", "reshard_after_forward",
}  # fmt: skip
"""Axes of numbers, meshes and names of models, which have no list of values. What a system cannot have of them, a limit
says."""

CHECKED_WHEN_READ = {"program", "faults"}
"""Axes whose words must be operations and faults that exist."""

PARTED = {"dtype": DTypePolicy, "optimizer": Optimizer, "offload": Offload}


def with_value(scenario: Scenario, axis: str, value: object) -> Scenario:
    """A copy in which an axis, or a part `axis.part`, has a value that the axis itself does not know yet."""
    copy = replace(scenario)
    if "." in axis:
        axis, part = axis.split(".")
        whole = replace(getattr(scenario, axis))
        object.__setattr__(whole, part, value)
        value = whole
    object.__setattr__(copy, axis, value)
    return copy


def refused(limits: tuple[Limit, ...], scenario: Scenario) -> list[str]:
    """The reasons of the allow-list's part of the limits, without those of the library."""
    return [limit.reason for limit in limits if limit.refuses(scenario)]


def listed(system: System) -> tuple[Limit, ...]:
    """The limits that come of the allow-list."""
    return system.accepts.limits[: len(system.accepts.limits) - len(system.accepts.own_limits)]


def test_every_plain_scenario_is_accepted() -> None:
    assert [system.name for system in BUILT_IN if system.refusal(plain_scenario(system))] == []


WORDS = [axis for axis in AXES if axis not in {*OPEN, *CHECKED_WHEN_READ, *PARTED}]
PARTS = [
    f"{axis}.{f.name}" for axis, whole in PARTED.items() for f in fields(whole) if isinstance(f.default, str | None)
]


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("axis", [*WORDS, *PARTS])
def test_a_new_value_is_refused_everywhere_with_one_reason_that_names_the_axis(axis: str, system: System) -> None:
    scenario = with_value(plain_scenario(system), axis, (NEW,) if axis == "options" else NEW)
    (reason,) = refused(listed(system), scenario)
    assert reason.startswith(f"{system.name} has these values of {axis.replace('.', ' ')}: ")
    assert NEW not in reason


@dataclass(frozen=True)
class Wider(Scenario):
    """Scenarios as they are once pipeline parallelism is an axis."""

    pipeline: int = 1


@dataclass(frozen=True, order=True)
class WiderDType(DTypePolicy):
    """The dtype policy once activations have one of their own."""

    activation: str | None = None


@dataclass(frozen=True)
class Policied(Scenario):
    dtype: WiderDType = field(default_factory=WiderDType)


def again(system: System) -> Accepts:
    """A system's declaration, read once more."""
    own = system.accepts
    return Accepts(own.name, limits=own.own_limits, constraints=own.constraints, **own.axes)


def widened(kind: type[Scenario], scenario: Scenario, **values: object) -> Any:
    return kind(**{**{f.name: getattr(scenario, f.name) for f in fields(Scenario)}, **values})


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_new_axis_must_keep_its_default_everywhere(system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accepts, "AXES", (*AXES, "pipeline"))
    monkeypatch.setattr(accepts, "Scenario", Wider)
    declared, plain = again(system), plain_scenario(system)
    assert declared.refusal(widened(Wider, plain)) is None
    limit = declared.refusal(widened(Wider, plain, pipeline=2))
    assert limit is not None
    assert (limit.id, limit.reason) == ("pipeline", f"{system.name} has these values of pipeline: 1")


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_new_part_of_an_axis_must_keep_its_default_everywhere(system: System) -> None:
    declared, plain = system.accepts, plain_scenario(system)
    if isinstance(declared.axes.get("dtype"), Parts):
        parts = declared.axes["dtype"].allowed
        declared = Accepts(
            declared.name, limits=declared.own_limits, **{**declared.axes, "dtype": Parts(WiderDType, **parts)}
        )
    policy = {f.name: getattr(plain.dtype, f.name) for f in fields(DTypePolicy)}
    assert declared.refusal(widened(Policied, plain, dtype=WiderDType(**policy))) is None
    limit = declared.refusal(widened(Policied, plain, dtype=WiderDType(**policy, activation="bf16")))
    assert limit is not None
    assert limit.reason == f"{system.name} has these values of dtype activation: unset"


def test_an_axis_of_words_never_takes_anything() -> None:
    open_axes = {
        axis for system in BUILT_IN for axis, allowed in system.accepts.axes.items() if isinstance(allowed, Anything)
    }
    assert open_axes <= OPEN


def test_an_axis_that_no_scenario_has_cannot_be_declared() -> None:
    with pytest.raises(TypeError, match="no axis pipeline"):
        Accepts("x", pipeline=Anything())
    with pytest.raises(TypeError, match="DTypePolicy has no activation"):
        Parts(DTypePolicy, activation=Anything())


def last_of_lines(system: System) -> list[tuple[str, str]]:
    """The newest declared release of each line, such as 0.4.0 of 0.4, with one of its line that is not declared."""
    versions = sorted(Version(release.version) for release in package(system.package).releases)
    last = {version.release[:2]: version for version in versions}
    return [(str(v), f"{v.major}.{v.minor}.{v.micro + 1}") for v in last.values()]


LINES = [(system, *line) for system in BUILT_IN if system.package for line in last_of_lines(system)]


@pytest.mark.parametrize(
    ("system", "declared", "undeclared"), LINES, ids=[f"{system.name}-{new}" for system, _, new in LINES]
)
def test_an_undeclared_release_has_the_limits_of_its_line(system: System, declared: str, undeclared: str) -> None:
    assert undeclared not in {release.version for release in package(system.package).releases}
    shown = [limit.error.axes for limit in system.accepts.own_limits if limit.error] or [{}]
    for axes in shown:
        known, new = (
            Scenario().with_axes({**axes, "system": system.name, "version": v}) for v in (declared, undeclared)
        )
        assert system.refusal(new) == system.refusal(known)


def test_automodels_patch_release_lacks_what_its_line_lacks() -> None:
    (automodel,) = (system for system in BUILT_IN if system.name == "automodel")
    plain = plain_scenario(automodel)
    resharding = {"reshard_after_forward": "true"}
    refusals = {
        v: automodel.refusal(plain.with_axes({**resharding, "version": v})) for v in ("0.4.0", "0.4.1", "0.5.0")
    }
    assert refusals["0.4.0"] == refusals["0.4.1"] is not None
    assert refusals["0.5.0"] is None


def test_what_is_allowed_of_the_mesh_binds_the_ranks_that_load() -> None:
    """A system of two ranks cannot be asked to load on four, be its meshes listed or its tensor parallelism."""
    open_axes = {axis: Anything() for axis in ("load", "program", "sharding", "optimizer")}
    two = Accepts("mine", mesh=Only(Mesh(1, 2, 1)), **open_axes)
    alone = Accepts("mine", mesh=Parts(Mesh, dp_shard=Anything()), **open_axes)
    there = Scenario(system="mine", mesh=Mesh(1, 2, 1), program="resume")
    for each in (two, alone):
        assert each.refusal(there) is None
    assert two.refusal(replace(there, load="grow")) is not None
    assert two.refusal(replace(there, load="grow", program="build step")) is None
    assert alone.refusal(replace(there, load="grow")) is None
    assert alone.refusal(replace(there, load="tp_change")) is not None
