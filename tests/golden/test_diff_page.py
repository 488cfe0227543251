"""The example of docs/diff.md is run: its program, its command, and what that prints.

SHARDPROOF_ACCEPT=1 rewrites what the page shows.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.paths import PYTHONPATH

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "diff.md"
_PROGRAM = re.compile(r"```python\n(.*?)```", re.DOTALL)
_SHOWN = re.compile(r"```console\n\$ shardproof (diff before after\.pt)\n(.*?)```", re.DOTALL)


def test_the_example_prints_what_the_page_shows(tmp_path: Path) -> None:
    page = PAGE.read_text("utf-8")
    program, shown = _PROGRAM.search(page), _SHOWN.search(page)
    assert program is not None
    assert shown is not None
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH, "PYTHONWARNINGS": "ignore"}
    subprocess.run([sys.executable, "-c", program[1]], cwd=tmp_path, env=environment, check=True)
    done = subprocess.run(
        [sys.executable, "-m", "shardproof", *shown[1].split()],
        cwd=tmp_path, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (1, "")
    if os.environ.get("SHARDPROOF_ACCEPT"):
        page = page[: shown.start(2)] + done.stdout + page[shown.end(2) :]
        PAGE.write_text(page, "utf-8")
    found = _SHOWN.search(page)
    assert found is not None
    assert done.stdout == found[2]
