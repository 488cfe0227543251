"""`shardproof init trainer` writes a file that is a trainer, and writes over nothing."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from shardproof.cli.main import entry
from shardproof.protocol import registry
from shardproof.trainer.described import described
from shardproof.verdict import ExitStatus

from tests.paths import ROOT


def test_the_skeleton_is_a_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert entry(["init", "trainer"]) == 0
    found = described("my_trainer.py")
    assert found.system == "my_trainer:Mine"
    assert found.axes == {"mesh": ("2", "4"), "optimizer": ("adamw", "sgd")}


def test_the_skeleton_leads_to_ways_that_compute_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert entry(["init", "trainer"]) == 0
    file = tmp_path / "my_trainer.py"
    line = '    # alike = {"offload": "bits", "chunks": "rounding"}'
    assert line in file.read_text().splitlines()
    file.write_text(file.read_text().replace(line, '    alike = {"optimizer": "bits"}'))
    assert described("my_trainer.py").alike == {"optimizer": "bits"}


@pytest.mark.parametrize("quiet", [False, True])
def test_a_run_ends_with_a_hint_at_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *, quiet: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    report = SimpleNamespace(results=[], place="", again="")
    ended = SimpleNamespace(report=report, page="index.html", interrupted=False, status=ExitStatus.OK)
    monkeypatch.setattr("shardproof.run.run", lambda _: ended)
    registry.all_systems()
    monkeypatch.setattr(registry, "_SYSTEMS", dict(registry._SYSTEMS))  # as they were, once the test has ended
    assert entry(["init", "trainer"]) == 0
    file = tmp_path / "my_trainer.py"
    file.write_text(file.read_text().replace('"optimizer": [', '"offload": ["no", "yes"], "optimizer": ['))
    assert entry(["trainer", "my_trainer.py", *["-q"] * quiet]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith(
        "report: " if quiet else "mesh, offload: the values of each are not compared with each other; "
    )


def test_nothing_is_written_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text("kept")
    assert entry(["init", "trainer", str(mine)]) == 2
    assert mine.read_text() == "kept"
    assert "not there yet" in capsys.readouterr().err


def test_the_page_begins_with_a_trainer(tmp_path: Path) -> None:
    example = re.search(r"```python\n(.*?)```", (ROOT / "docs/trainer.md").read_text("utf-8"), re.DOTALL)
    assert example
    file = tmp_path / "my_trainer.py"
    file.write_text(example[1])
    assert described(str(file)).name == "Mine"
