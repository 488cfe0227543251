"""A run's folder in memory goes with the run, also when everything that could remove it was killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from shardproof.scratch import HeldFolder, sweep

HOLDS = """
import sys, time
from pathlib import Path
from shardproof.scratch import HeldFolder
print(HeldFolder(Path(sys.argv[1]), sweeps=False).path, flush=True)
time.sleep(600)
"""


def test_what_a_killed_process_held_is_swept_by_the_next_and_what_a_living_one_holds_is_not(tmp_path: Path) -> None:
    living = HeldFolder(tmp_path, sweeps=True)
    command = [sys.executable, "-c", HOLDS, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        left = Path(other.stdout.readline().strip())
        (left / "checkpoint").mkdir()
        (left / "checkpoint" / "data").write_text("kept in memory")
        assert sweep(tmp_path) == []
        os.kill(other.pid, signal.SIGKILL)
    next_one = HeldFolder(tmp_path, sweeps=True)
    assert sorted(tmp_path.iterdir()) == sorted([living.path, next_one.path])
    for held in (living, next_one):
        held.remove()
    assert list(tmp_path.iterdir()) == []


def test_what_has_another_name_or_is_a_link_stays(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "shardproof-held-link").symlink_to(tmp_path / "mine")
    (tmp_path / "shardproof-held-file").write_text("a file")
    assert sweep(tmp_path) == []
    assert len(list(tmp_path.iterdir())) == 3
