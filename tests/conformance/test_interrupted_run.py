"""A run of Megatron-Core that is ended in the middle of a distributed checkpoint leaves no process and no scratch.

*Verifies*: with SIGTERM, the exit status of an interrupt; with SIGTERM and SIGKILL, that the servers, supervisors,
ranks and the manager processes that dist_checkpointing spawned are gone, and the scratch folder too.
*Does not verify*: a server that is killed itself (tests/unit/world/test_world.py), nor what of the run was stored.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conformance.processes import descendants
from tests.paths import PYTHONPATH

pytestmark = pytest.mark.real

ROOT = Path(__file__).parents[2]
SCENARIO = """
schema = 1
title = "saves"
[scenario]
system = "megatron-core"
sharding = "zero1"
checkpoint = "dp_reshardable+fully_parallel"
dtype = "bf16/reduce=fp32/master=fp32"
optimizer = "adamw/impl=multi_tensor"
program = "build step save save save save save save"
mesh = "1x2x1"
"""
GONE_S = 15.0


@pytest.fixture
def saving(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], dict[int, list[str]]]]:
    """A run whose ranks have managers, and every process below it."""
    (tmp_path / "saves.toml").write_text(SCENARIO)
    command = [sys.executable, "-m", "shardproof", "run", str(tmp_path / "saves.toml"), "-j", "1", "--out", "out"]
    environment = {**os.environ, "SHARDPROOF_REAL_SPAWN": "1", "PYTHONPATH": PYTHONPATH}
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE) as run:
        give_up = time.monotonic() + 120.0
        below: dict[int, list[str]] = {}
        while not any("--multiprocessing-fork" in line for line in below.values()):
            assert run.poll() is None, run.stderr and run.stderr.read()
            assert time.monotonic() < give_up
            time.sleep(0.01)
            below = descendants(run.pid)
        yield run, below
        run.kill()


@pytest.mark.parametrize("how", [pytest.param(signal.SIGTERM, marks=pytest.mark.nightly), signal.SIGKILL])
def test_nothing_is_left(saving: tuple[subprocess.Popen[bytes], dict[int, list[str]]], how: signal.Signals) -> None:
    run, below = saving
    scratch = {json.loads(word)[2] for line in below.values() for word in line if word.startswith("[[")}
    (folder,) = map(Path, scratch)
    assert folder.is_dir()
    run.send_signal(how)
    run.wait(GONE_S)
    give_up = time.monotonic() + GONE_S
    while time.monotonic() < give_up and (folder.exists() or any(Path(f"/proc/{pid}").exists() for pid in below)):
        time.sleep(0.05)
    assert not {pid: line for pid, line in below.items() if Path(f"/proc/{pid}").exists()}
    assert not folder.exists()
    assert run.returncode == (130 if how is signal.SIGTERM else -how)
