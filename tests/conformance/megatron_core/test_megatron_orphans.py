"""Nothing of a Megatron-Core session outlives it, with the manager process that dist_checkpointing really spawns.

*Verifies*: no process below the server, no open descriptor or working directory in the session's folder anywhere on the
machine, no more descriptors in the server, and temporary files (the manager's socket) inside that folder only.
*Does not verify*: what other libraries of the same rank may leave.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from benchmarks.soak import descendants
from harness.scenario import Scenario
from harness.systems.megatron_core import INFO
from harness.world.environments import VARIANT, Environments
from harness.world.job import Job, JobOutcome
from harness.world.server import ForkServer

pytestmark = pytest.mark.real

PLUGIN = """
import os
import signal
import time
from dataclasses import replace
from harness.systems.registry import register
from harness.systems.megatron_core import INFO
from harness.systems.megatron_core_rank import MegatronRank

class Raising(MegatronRank):
    def save(self, op):
        super().save(op)
        raise RuntimeError("after the save")

class Stuck(MegatronRank):
    def save(self, op):
        super().save(op)
        time.sleep(3600)

class Killed(MegatronRank):
    def save(self, op):
        super().save(op)
        os.kill(os.getpid(), signal.SIGKILL)

for system in (Raising, Stuck, Killed):
    name = system.__name__.lower()
    register(replace(INFO, name=name, entry=f"unlucky:{system.__name__}"))
"""

BASE = Scenario(sharding="zero1", checkpoint="fully_reshardable", program="build step save").with_axes(
    {"system": "megatron-core", "dtype": "bf16/master=fp32", "optimizer": "adamw/impl=multi_tensor", "mesh": "1x2x1"}
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    plugins = tmp_path_factory.mktemp("plugins")
    (plugins / "unlucky.py").write_text(PLUGIN)
    overlay = Environments(None, ()).overlay(INFO, "0.16.1")
    with ForkServer(
        path_prefix=(*overlay.paths, plugins),
        warm_up=(INFO.warm_up,),
        plugins=("unlucky",),
        env={**overlay.environment, VARIANT: "apex", "SHARDPROOF_REAL_SPAWN": "1"},
    ) as warm:
        yield warm


@pytest.fixture
def folder() -> Iterator[Path]:
    """A session's folder with a short path, as those of a run: the manager's socket lies in it."""
    with tempfile.TemporaryDirectory(prefix="shardproof-") as name:
        yield Path(name)


def run(server: ForkServer, folder: Path, deadline_s: float = 60.0, **axes: str) -> JobOutcome:
    return server.submit(Job(BASE.with_axes(axes), 0, folder, deadline_s)).result()


def descriptors(server: ForkServer) -> int:
    return len(list(Path(f"/proc/{server.pid}/fd").iterdir()))


def holders(folder: Path) -> list[str]:
    """Links of any process, to an open file or a working directory, that lead into the folder."""
    found = []
    for link in [*Path("/proc").glob("[0-9]*/fd/*"), *Path("/proc").glob("[0-9]*/cwd")]:
        with suppress(OSError):
            if link.readlink().is_relative_to(folder):
                found.append(f"{link} -> {link.readlink()}")
    return found


@pytest.mark.parametrize(
    ("case", "deadline_s", "axes"),
    [
        ("passes", 60.0, {}),
        ("passes", 60.0, {"checkpoint": "dp_reshardable+async"}),
        ("raises", 60.0, {"system": "raising"}),
        ("killed", 60.0, {"system": "killed"}),
        ("killed early", 60.0, {"faults": "boundary.kill-in-save"}),
        ("hangs", 20.0, {"system": "stuck"}),
    ],
    ids=str,
)
def test_nothing_outlives_a_session(
    server: ForkServer, folder: Path, tmp_path: Path, case: str, deadline_s: float, axes: dict[str, str]
) -> None:
    run(server, tmp_path, program="build")  # whatever the server opens once
    before = descriptors(server)
    outcome = run(server, folder, deadline_s, **axes)
    assert outcome.ok is (case == "passes")
    assert outcome.timed_out is (case == "hangs")
    assert bool(outcome.died) is case.startswith("killed")
    assert (outcome.errors[0].message if case == "raises" else "after the save") == "after the save"
    assert bool(outcome.strays) is (case != "killed early"), "the managers that had been started"
    assert any(folder.glob("pymp-*")) is (case != "killed early")
    assert server.pid
    assert descendants(server.pid) == []
    assert holders(folder) == []
    assert descriptors(server) == before
