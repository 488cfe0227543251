"""`shardproof init trainer` writes a file that is a trainer, and writes over nothing."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from shardproof.cli.main import entry
from shardproof.trainer.described import described

from tests.paths import ROOT


def test_the_skeleton_is_a_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert entry(["init", "trainer"]) == 0
    found = described("my_trainer.py")
    assert found.system == "my_trainer:Mine"
    assert found.axes == {"mesh": ("2", "4"), "optimizer": ("adamw", "sgd")}


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
