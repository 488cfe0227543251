"""What is said of a release that cannot be had: where it was asked for, which there are, and then what pip says."""

from __future__ import annotations

from pathlib import Path

import pytest
from shardproof.cli.main import entry
from shardproof.verdict import ExitStatus
from shardproof.world import overlay
from shardproof.world.overlay import OverlayError


@pytest.fixture(autouse=True)
def _without_an_index(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(package: object, version: str, python: object) -> None:
        raise OverlayError(f"{version} cannot be installed:\nwhat pip said")

    monkeypatch.setattr(overlay, "build", refuse)
    monkeypatch.chdir(tmp_path)


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert entry(["run", *words]) == ExitStatus.USAGE
    return capsys.readouterr().err


def written(*lines: str) -> str:
    Path("f.toml").write_text("\n".join(("schema = 1", "[scenario]", *lines)))
    return "f.toml"


def test_the_known_releases_come_before_what_pip_says(capsys: pytest.CaptureFixture[str]) -> None:
    first, *said = refusal(capsys, "--system", "megatron-core@9.9.9").splitlines()
    assert first.startswith("shardproof: --system: given 'megatron-core@9.9.9'; allowed: 0.13.0 to 0.16.1, or another")
    assert first.endswith("; for example: --system megatron-core@0.16.1")
    assert said == ["9.9.9 cannot be installed:", "what pip said"]


def test_a_declared_release_that_does_not_import_is_not_told_its_own_range(capsys: pytest.CaptureFixture[str]) -> None:
    assert "0.13.0 to" not in refusal(capsys, "--system", "megatron-core@0.15.3")


def test_a_release_in_a_file_is_blamed_on_the_file(capsys: pytest.CaptureFixture[str]) -> None:
    said = refusal(capsys, written('system = "megatron-core"', 'version = "9.9.9"'))
    assert said.startswith("shardproof: f.toml: scenario 1: version: given '9.9.9'; allowed: 0.13.0 to 0.16.1, or")
    assert 'for example: version = "0.16.1"' in said
    assert "--system" not in said


def test_a_release_of_the_loading_ranks_is_checked_before_anything_runs(capsys: pytest.CaptureFixture[str]) -> None:
    said = refusal(capsys, written('system = "torch-fsdp2"', 'load_version = "2.9.0"', 'program = "restart"'))
    assert said.startswith("shardproof: f.toml: scenario 1: load_version: given '2.9.0'; allowed: a release of torch")


def test_a_release_given_with_system_takes_the_place_of_the_files(capsys: pytest.CaptureFixture[str]) -> None:
    name = written('system = "megatron-core"', 'version = "0.16.1"')
    assert refusal(capsys, name, "--system", "megatron-core@9.9.8").startswith("shardproof: --system: given")
