"""The scripts of what trials of checkpoints found: each still shows it, in an interpreter that has none of our code.

*Verifies*: with the releases that the stacks of the scorecard use.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from shardproof.export.trial import run
from shardproof.resilience.run import _libraries
from shardproof.resilience.stacks import all_stacks

SCRIPTS = Path(__file__).parents[3] / "docs" / "resilience-scripts"
SHOWS = {
    "dcp-failed-rank-mixes-steps.py": "and what it gave is of two steps",
    "dcp-killed-save-mixes-steps.py": "and what it gave is of two steps",
    "deepspeed-mixes-files.py": "the weights are off their own masters by up to",
}
"""Script → what it says where it shows what was found."""


@pytest.mark.nightly
@pytest.mark.parametrize("name", sorted(path.name for path in SCRIPTS.glob("*.py")))
def test_a_script_shows_what_was_found(name: str) -> None:
    stack = all_stacks()["deepspeed" if name.startswith("deepspeed") else "dcp"]
    ended = run(SCRIPTS / name, sys.executable, _libraries(stack))
    assert SHOWS[name] in ended.said + ended.errors, ended.ending
