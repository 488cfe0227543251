"""A scenario file that says little runs, and what is said of one that cannot run is a line that can."""

from __future__ import annotations

import shlex
from itertools import combinations, islice
from pathlib import Path

import pytest
from shardproof.cli import arguments
from shardproof.cli.main import cli
from shardproof.errors import UsageError
from shardproof.scenario import Scenario
from shardproof.space.constraints import impossible
from shardproof.space.defaults import completed, is_accepted, nearest
from shardproof.space.files import load_space, space_names
from shardproof.space.plan import Plan

from tests.conformance.built_in import BUILT_IN

pytestmark = pytest.mark.usefixtures("shipped")

SYSTEMS = [system.name for system in BUILT_IN]

STATED = {
    "model": "gated",
    "dtype": "bf16",
    "mesh": "2x2x1",
    "sharding": "zero2",
    "offload": "cpu=0.5",
    "optimizer": "sgd",
    "checkpoint": "dcp",
    "load": "tp_change",
    "options": "no_overlap_reduce",
    "reshard_after_forward": "3",
    "program": "unfreeze",
}
"""Values of which every system refuses some."""


def planned(*words: str) -> Plan:
    """What the words of a `shardproof run` come to, parsed as the command line parses them."""
    context = cli.commands["plan"].make_context("plan", list(words))
    given = context.params
    return arguments.planned(
        given["names"], given["systems"], given["sets"], given["strength"], given["sample"], given["seed"],
        given["faults"], given["shard"],
    )  # fmt: skip


def written(folder: Path, **axes: str) -> str:
    path = folder / "mine.toml"
    path.write_text("schema = 1\n[scenario]\n" + "".join(f'{axis} = "{text}"\n' for axis, text in axes.items()))
    return str(path)


def refusal(*words: str) -> UsageError | None:
    """The error of a command line that cannot run; None of one that can."""
    try:
        planned(*words)
    except UsageError as error:
        return error
    return None


def proposal(error: UsageError) -> list[str]:
    """The words after `shardproof run` of the line that an error proposes."""
    words = shlex.split(str(error).rpartition("; for example: ")[2].partition("\n")[0])
    assert words[:2] == ["shardproof", "run"]
    return words[2:]


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_file_that_names_a_system_alone_runs(system: str, tmp_path: Path) -> None:
    (scenario,) = planned(written(tmp_path, system=system)).supported
    assert scenario.system == system


def test_a_file_that_names_a_model_alone_runs(tmp_path: Path) -> None:
    (scenario,) = planned(written(tmp_path, model="dense")).supported
    assert scenario.model == "dense"


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_walk_without_axes_runs(system: str, tmp_path: Path) -> None:
    path = tmp_path / "space.toml"
    path.write_text(f"schema = 1\n[space]\n[system.{system}]\n")
    assert len(planned(str(path)).supported) == 1


def test_what_runs_with_the_common_defaults_has_them_and_its_id() -> None:
    stated = [axes for name in space_names() for axes in load_space(name).stated]
    assert len(stated) > 100
    plain = [(axes, Scenario().with_axes(axes)) for axes in stated]
    changed = [str(scenario) for axes, scenario in plain if is_accepted(scenario) and completed(axes) != scenario]
    assert not changed


def test_no_kept_scenario_leaves_out_what_its_system_needs() -> None:
    """Their ids stand in reports and issues: they are those of what the files state."""
    stated = [axes for name in space_names() for axes in load_space(name).stated]
    assert [axes for axes in stated if completed(axes) != Scenario().with_axes(axes)] == []


@pytest.mark.parametrize("system", SYSTEMS)
def test_what_is_stated_is_never_changed(system: str) -> None:
    for axes in combinations(STATED, 2):
        stated = {"system": system, **{axis: STATED[axis] for axis in axes}}
        found = completed(stated)
        assert {axis: found.axis_text(axis) for axis in stated} == stated


@pytest.mark.parametrize("system", SYSTEMS)
def test_the_nearest_scenario_runs_and_is_of_the_same_system(system: str) -> None:
    for axes in ((), *combinations(STATED, 1), *islice(combinations(STATED, 4), 0, None, 37)):
        found = nearest({"system": system, **{axis: STATED[axis] for axis in axes}})
        assert is_accepted(found)
        assert found.system == system


@pytest.mark.parametrize("system", SYSTEMS)
def test_every_proposal_for_a_refused_file_is_a_line_that_runs(system: str, tmp_path: Path) -> None:
    refused = 0
    for axes in (*combinations(STATED, 1), *islice(combinations(STATED, 3), 0, None, 11)):
        name = written(tmp_path, system=system, **{axis: STATED[axis] for axis in axes})
        error = refusal(name)
        if error:
            refused += 1
            (scenario,) = planned(*proposal(error)).supported
            assert scenario.system == system
    assert refused


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("axis", ["sharding", "optimizer", "mesh"])
def test_every_proposal_for_refused_settings_is_a_line_that_runs(system: str, axis: str, tmp_path: Path) -> None:
    wrong = {"sharding": "replicate", "optimizer": "sgd/nesterov=true/impl=multi_tensor", "mesh": "3x5x1"}[axis]
    kept = {"reshard_after_forward": "none", axis: wrong}
    words = ["--system", system, *(word for key, text in kept.items() for word in ("--set", f"{key}={text}"))]
    for name in ("smoke", written(tmp_path, model="dense")):
        error = refusal(name, *words)
        if error:
            assert {scenario.system for scenario in planned(*proposal(error)).supported} == {system}


def test_a_proposal_keeps_what_can_be_kept(tmp_path: Path) -> None:
    name = written(tmp_path, system="torch-fsdp2", mesh="2x2x1", sharding="zero1", program="build step")
    with pytest.raises(UsageError) as caught:
        planned(name, "--set", "dtype=bf16")
    assert proposal(caught.value) == [name, "--set", "dtype=bf16", "--set", "sharding=fully_shard"]


def test_another_system_takes_its_own_defaults(tmp_path: Path) -> None:
    name = written(tmp_path, model="dense")
    found = planned(name, *(word for system in SYSTEMS for word in ("--system", system)))
    assert {scenario.system for scenario in found.supported} >= set(SYSTEMS) - {"automodel"}
    one = arguments.one_scenario(name, "deepspeed", None)
    assert impossible(one) is None
    assert one.checkpoint == "zero"


def test_a_refused_scenario_is_written_out_in_full(tmp_path: Path) -> None:
    refused = Scenario(system="megatron-core")
    path = tmp_path / "refused.toml"
    path.write_text(refused.to_toml(every_axis=True))
    assert load_space(str(path)).scenarios == (refused,)
