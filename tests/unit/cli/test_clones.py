"""`--clone NAME=DIR` in every command that takes a version, and the plan of a head, with the fake library."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from shardproof.cli.main import cli, entry
from shardproof.errors import UsageError
from shardproof.verdict import ExitStatus
from shardproof.world import preflight

from tests.unit.overlay_system import FAKE, isolate, write_library

PLUGIN = ("--plugin", "tests.unit.overlay_system")
VARIABLE = "SHARDPROOF_CLONE_FAKE_LIB"


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        yield isolate(patch, tmp_path_factory.mktemp("overlays"))


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A bare repository of the fake library with two commits, `good` and `main`."""
    work = tmp_path / "work"

    def git(*words: str) -> None:
        command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *words]
        subprocess.run(command, check=True, capture_output=True, cwd=work)

    write_library(work, "1.4", "right")
    git("init", "-q", "-b", "main")
    git("add", "-A")
    git("commit", "-qm", "it works")
    git("tag", "good")
    write_library(work / "again", "1.4", "wrong")
    (work / "again/fakelib/core/__init__.py").rename(work / "fakelib/core/__init__.py")
    git("commit", "-qam", "a regression")
    git("clone", "-q", "--bare", ".", str(tmp_path / "bare"))
    monkeypatch.setenv(VARIABLE, "")  # so that what a command names is gone with the test
    monkeypatch.chdir(tmp_path)
    return tmp_path / "bare"


@pytest.mark.parametrize("name", ["fake", "fake-lib"])
def test_a_clone_is_named_by_the_system_or_by_its_package(name: str, bare: Path) -> None:
    preflight.use_clones([f"{name}={bare}"])
    assert os.environ[VARIABLE] == str(bare)


def test_a_clone_of_nothing_that_is_known_is_refused(bare: Path) -> None:
    with pytest.raises(UsageError, match=r"allowed: deepspeed, fake-lib"):
        preflight.use_clones([f"nothing={bare}"])


def test_every_command_that_takes_a_version_takes_a_clone() -> None:
    taking = {name for name, command in cli.commands.items() if _has(command, "--clone")}
    assert taking >= {"run", "plan", "replay", "sweep", "bisect", "shrink", "explore", "export", "conformance", "cures"}


def _has(command: click.Command, option: str) -> bool:
    return any(option in parameter.opts for parameter in command.params)


@pytest.mark.nightly
@pytest.mark.real
def test_a_bisection_over_the_commits_of_a_bare_repository(bare: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("fake.toml").write_text(FAKE.to_toml())
    words = ["bisect", "fake.toml", "--good", "git:good", "--bad", "git:main", "--clone", f"fake={bare}", *PLUGIN]
    assert entry(words) == ExitStatus.OK
    assert "a regression" in capsys.readouterr().out


def test_a_plan_of_a_head_says_what_it_calls_itself_and_what_that_refuses(
    bare: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("fake.toml").write_text(FAKE.to_toml())
    words = ["plan", "fake.toml", "--system", "fake@git:main", "--set", "model=short,dense"]
    assert entry([*words, "--clone", f"fake-lib={bare}", *PLUGIN]) == ExitStatus.OK
    out = capsys.readouterr().out
    assert "fake@git:main: it calls itself 1.4+git." in out
    assert "its version refuses 1 of 2 scenarios; ready in" in out
    assert "        1  dense models came with 1.5" in out
    assert "        1  fake: dense models came with 1.5" in out
    monkeypatch.setenv(VARIABLE, "")
    assert entry([*words, *PLUGIN]) == ExitStatus.USAGE
    assert "--clone fake-lib=DIR" in capsys.readouterr().err


def test_a_plan_of_releases_looks_at_nothing(capsys: pytest.CaptureFixture[str], bare: Path) -> None:
    Path("fake.toml").write_text(FAKE.to_toml())
    assert entry(["plan", "fake.toml", "--system", "fake@9.9", *PLUGIN]) == ExitStatus.OK
    assert "calls itself" not in capsys.readouterr().out
