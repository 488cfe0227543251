"""What the guide selects by name is there: a selection of nothing would end with pytest's status 5."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.paths import ROOT

GUIDE = (ROOT / "docs/pytest.md").read_text("utf-8")
SELECTING = re.findall(r"^\$ pytest (--shardproof smoke -k .+?)\s+#", GUIDE, re.MULTILINE)


def test_the_guide_selects_by_name() -> None:
    assert SELECTING


@pytest.mark.parametrize("command", SELECTING)
def test_a_documented_selection_is_not_empty(command: str, tmp_path: Path) -> None:
    words = [sys.executable, "-m", "pytest", *shlex.split(command), "--collect-only", "-q"]
    ran = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout
    assert "shardproof::" in ran.stdout
