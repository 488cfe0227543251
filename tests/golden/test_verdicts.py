"""What runs of the whole say, against what they said when it was recorded: `verdicts/*.json`.

*Verifies*: that the smoke scenarios, all regressions and the canaries come to the same verdicts, the same differences
in the same elements (as digests), the same explanations in the same order. SHARDPROOF_ACCEPT=1 records them anew; then
read the diff, and explain every line of it in the commit.
*Does not verify*: that a verdict is right. Regressions of a commit, which need a clone of its library, are left out.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from shardproof.space.files import load_space, space_names

from tests.golden.verdicts import FOLDER, record, text

pytestmark = pytest.mark.real

ROOT = Path(__file__).parents[2]
ACCEPT = bool(os.environ.get("SHARDPROOF_ACCEPT"))
PASS, FAILURES = 0, 1
"""Exit statuses: everything passed or is known; some scenario failed."""


def shardproof(status: int, *words: str) -> None:
    """Run a command, which must end with that status."""
    command = [sys.executable, "-m", "shardproof", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == status, done.stdout[-4000:] + done.stderr[-4000:]


def assert_as_recorded(name: str, document: Mapping[str, Any]) -> None:
    """Every scenario of a run comes to what is recorded of it, and none is missing or new."""
    path, found = FOLDER / f"{name}.json", json.loads(text(record(document)))
    if ACCEPT:
        path.write_text(text(found), "utf-8")
    recorded = json.loads(path.read_text("utf-8"))
    different = {key: (recorded.get(key), found.get(key)) for key in recorded.keys() | found.keys()}
    assert {key: pair for key, pair in different.items() if pair[0] != pair[1]} == {}


def test_smoke(smoke: dict[str, Any]) -> None:
    assert_as_recorded("smoke", smoke)


@pytest.mark.nightly
def test_regressions(tmp_path: Path) -> None:
    kept = [name for name in space_names() if name.startswith("regressions/")]
    named = [name for name in kept if not any(s.version.startswith("git:") for s in load_space(name).scenarios)]
    file = tmp_path / "run.json"
    shardproof(FAILURES, "run", *named, "--out", str(tmp_path), "--json", str(file))
    assert_as_recorded("regressions", json.loads(file.read_text("utf-8")))


@pytest.mark.nightly
def test_canaries(tmp_path: Path) -> None:
    file, recorded = tmp_path / "canaries.json", FOLDER / "canaries.json"
    shardproof(PASS, "faults", "--out", str(tmp_path), "--json", str(file))
    if ACCEPT:
        recorded.write_text(file.read_text("utf-8"), "utf-8")
    found, expected = (json.loads(path.read_text("utf-8")) for path in (file, recorded))
    for kind in ("faults", "boundary"):
        told, kept = (
            {(entry["id"], entry.get("system"), entry.get("scenario")): entry for entry in each[kind]}
            for each in (found, expected)
        )
        assert told == kept
