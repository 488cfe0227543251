"""Worlds that no machine has are refused before anything is taken, and the error says how to go on."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from shardproof.cli.main import entry
from shardproof.errors import UsageError
from shardproof.laboratory.laboratory import Laboratory
from shardproof.scenario import Scenario
from shardproof.verdict import ExitStatus, Verdict
from shardproof.world import bounds, preflight

pytestmark = pytest.mark.usefixtures("shipped")


def ranks(mesh: str, system: str = "torch-fsdp2") -> Scenario:
    return Scenario(system=system).with_axes({"mesh": mesh})


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(bounds.VARIABLE, "")


@pytest.mark.parametrize(
    ("mesh", "system"), [("1x16x1", "torch-fsdp2"), ("4x2x2", "torch-fsdp2"), ("1x256x1", "reference")]
)
def test_the_bound_itself_is_allowed_and_is_that_of_the_whole_world(
    mesh: str, system: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ranks(mesh, system)
    bounds.require_world(asked)
    assert asked.mesh.world == bounds.max_world(lockstep=system == "reference")
    monkeypatch.setenv(bounds.VARIABLE, str(asked.mesh.world - 1))
    with pytest.raises(UsageError, match=f"worlds of up to {asked.mesh.world - 1}"):
        bounds.require_world(asked)


@pytest.mark.parametrize(
    ("mesh", "system", "bound", "proposed"),
    [
        ("1x17x1", "torch-fsdp2", 16, "--max-world 17"),
        ("1x64x1", "megatron-core", 16, "--max-world 64"),
        ("1x257x1", "reference", 256, "--max-world 257"),
        ("99999999999x1x1", "torch-fsdp2", 16, "--set mesh=1x2x1"),
        ("99999999999x1x1", "reference", 256, "--set mesh=1x2x1"),
    ],
)
def test_a_larger_world_is_refused_with_the_bound(mesh: str, system: str, bound: int, proposed: str) -> None:
    with pytest.raises(UsageError) as caught:
        bounds.require_world(ranks(mesh, system))
    assert f"up to {bound} " in str(caught.value)
    assert "--max-world raises the bound" in str(caught.value)
    assert str(caught.value).endswith(f"for example: {proposed}")


def test_the_mesh_of_a_load_counts() -> None:
    with pytest.raises(UsageError, match="1x64x1"):
        bounds.require_world(Scenario(system="torch-fsdp2", load="1x64x1"))
    bounds.require_world(Scenario(system="torch-fsdp2", load="1x64x1", program="train"))


@pytest.mark.parametrize("command", ["plan", "run"])
@pytest.mark.parametrize("mesh", ["99999999999x1x1", "1x64x1", "1x1024x1"])
def test_no_command_takes_anything_first(
    command: str, mesh: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.toml").write_text(f'schema = 1\n[scenario]\nsystem = "torch-fsdp2"\nmesh = "{mesh}"\n')
    assert entry([command, "mine.toml"]) == ExitStatus.USAGE
    assert "--max-world" in capsys.readouterr().err
    assert os.listdir() == ["mine.toml"]


def test_max_world_raises_the_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.toml").write_text('schema = 1\n[scenario]\nsystem = "torch-fsdp2"\nmesh = "1x32x1"\n')
    assert entry(["plan", "mine.toml", "--max-world", "32"]) == ExitStatus.OK
    assert entry(["plan", "mine.toml", "--max-world", "31"]) == ExitStatus.USAGE


def test_a_scenario_that_comes_another_way_is_refused_too() -> None:
    with Laboratory(jobs=1, deadline_s=5.0, systems=["reference"]) as laboratory:
        result = laboratory.examine_one(ranks("99999999999x1x1", "reference").with_axes({"checkpoint": "gathered"}))
    assert result.verdict is Verdict.UNKNOWN
    assert "--max-world" in result.reason


def test_memory_is_checked_before_it_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "free_bytes", lambda: 3 * bounds.RANK_BYTES)
    bounds.require_room([ranks("1x2x1"), ranks("1x1x1")], at_once=2)
    bounds.require_room([ranks("1x256x1", "reference")], at_once=2)
    with pytest.raises(UsageError, match="ranks at once: given 4; allowed: what 144 MiB of free memory hold"):
        bounds.require_room([ranks("1x2x1"), ranks("2x1x1"), ranks("1x1x1")], at_once=2)
    with pytest.raises(UsageError, match="-j 1"):
        preflight.require_machine([ranks("1x4x1")], None)


def test_processes_are_checked_before_they_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "free_bytes", lambda: None)
    monkeypatch.setattr(bounds, "free_processes", lambda: 6)
    bounds.require_room([ranks("1x3x1")], at_once=3)
    with pytest.raises(UsageError, match="what 6 more processes allow"):
        bounds.require_room([ranks("1x4x1")], at_once=1)


def test_a_container_s_limits_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 900 kB\nMemAvailable:   800 kB\n")
    monkeypatch.setattr(bounds, "_MEMINFO", meminfo)
    monkeypatch.setattr(bounds, "_CGROUP", tmp_path)
    monkeypatch.setattr("os.geteuid", lambda: 0)
    assert bounds.free_bytes() == 800 << 10
    assert bounds.free_processes() is None
    for name, text in {"memory.max": "max", "memory.current": "5", "pids.max": "max", "pids.current": "7"}.items():
        (tmp_path / name).write_text(text)
    assert bounds.free_bytes() == 800 << 10
    (tmp_path / "memory.max").write_text("105\n")
    (tmp_path / "memory.stat").write_text("anon 1\ninactive_file 20\n")
    (tmp_path / "pids.max").write_text("10")
    assert bounds.free_bytes() == 120
    assert bounds.free_processes() == 3
