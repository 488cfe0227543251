"""Real FSDP2 and DCP on real gloo ranks against the twin, bit for bit; and each limit against the real library."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from harness.observe.record import pack, unpack
from harness.program import expand, sessions
from harness.scenario import Scenario
from harness.systems.protocol import Limit
from harness.systems.torch_fsdp2 import INFO, LIMITS, unsupported
from harness.world.job import Job, JobOutcome
from harness.world.server import ForkServer

LENGTH = struct.Struct("<Q")

pytestmark = pytest.mark.real

BASE = Scenario(system="torch-fsdp2")

REFUSED: dict[str, dict[str, str]] = {
    "mixed-storage-group": {"model": "mixed_unit", "dtype": "mixed", "mesh": "1x2x1", "program": "train"},
    "reshard-divisor": {"mesh": "1x2x1", "reshard_after_forward": "3", "program": "train"},
    "reshard-divisor-tp": {"mesh": "1x4x2", "reshard_after_forward": "2", "program": "train"},
    "fused-sgd": {"optimizer": "sgd/impl=fused", "mesh": "1x2x1", "program": "train"},
    "scaler-fp16-gradients": {"dtype": "fp16", "optimizer": "adamw/loss_scale=1024.0", "program": "train"},
}


QUIET = """
from dataclasses import replace
from harness.systems.registry import register
from harness.systems.torch_fsdp2 import INFO
from harness.systems.torch_fsdp2_rank import Fsdp2Rank

class Quiet(Fsdp2Rank):
    def observe(self, op):
        return super().observe(op) if op.index == 5 else ()

register(replace(INFO, name="quiet", entry="quiet:Quiet"))
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    """A warm server that also knows `quiet`: FSDP2 without any observation before operation 5."""
    plugins = tmp_path_factory.mktemp("plugins")
    (plugins / "quiet.py").write_text(QUIET)
    with ForkServer(warm_up=(INFO.warm_up,), path_prefix=(plugins,), plugins=("quiet",)) as running:
        yield running


def run(server: ForkServer, scenario: Scenario, folder: Path) -> list[JobOutcome]:
    """The outcome of every session of the scenario, up to the first that fails."""
    outcomes: list[JobOutcome] = []
    for session in range(len(sessions(expand(scenario)))):
        outcomes.append(server.submit(Job(scenario, session, folder, 60.0)).result())
        if not outcomes[-1].ok:
            break
    return outcomes


def observed(outcomes: Sequence[JobOutcome]) -> list[Path]:
    return [path for outcome in outcomes for path in outcome.observations]


def blobs(path: Path) -> Iterator[bytes]:
    """The packed observations of one rank's file, one an operation."""
    content, at = path.read_bytes(), 0
    while at < len(content):
        (length,) = LENGTH.unpack_from(content, at)
        yield content[at + LENGTH.size : at + LENGTH.size + length]
        at += LENGTH.size + length


def judged(server: ForkServer, scenario: Scenario, folder: Path, observations: Sequence[Path]) -> dict[str, Any]:
    """What differs from the twin, live and written. The server's numeric environment decides torch's kernels."""
    saves = [op.checkpoint for op in expand(scenario) if op.kind == "save"]
    request = {
        "scenario": scenario.axis_values(only_changed=True),
        "observations": [str(path) for path in observations],
        "checkpoints": {number: str(folder / f"checkpoint{number}") for number in saves},
        "complete": True,
    }
    judgement: dict[str, Any] = json.loads(server.call("harness.judge:serve", json.dumps(request).encode(), 60.0))
    return judgement


@pytest.mark.parametrize(
    "axes",
    [
        {"mesh": "1x2x1"},
        {"mesh": "1x3x1", "model": "short", "load": "indivisible"},
        {"mesh": "2x1x1", "model": "frozen_tower", "checkpoint": "full+cpu_offload+broadcast_from_rank0"},
        {"mesh": "1x2x2", "model": "tied", "dtype": "fp32/param=bf16/reduce=fp32", "load": "1x4x1"},
        {"mesh": "1x2x1", "model": "groups", "optimizer": "sgd/clip=0.5/schedule=halve/loss_scale=256.0",
         "microbatches": "3", "grad_sync": "every", "checkpoint": "dcp-stateful"},
        {"mesh": "1x2x1", "model": "twins", "dtype": "mixed", "offload": "cpu", "checkpoint": "dcp-async"},
    ],
    ids=str,
)  # fmt: skip
def test_state_equals_the_twin_bit_for_bit(server: ForkServer, tmp_path: Path, axes: dict[str, str]) -> None:
    scenario = BASE.with_axes(axes)
    outcomes = run(server, scenario, tmp_path)
    assert all(outcome.ok for outcome in outcomes), outcomes
    judgement = judged(server, scenario, tmp_path, observed(outcomes))
    assert judgement["differences"] == []
    assert judgement["distrust"] == ""


@pytest.mark.parametrize("limit", [limit for limit in LIMITS if limit.error], ids=lambda limit: limit.id)
def test_the_library_raises_what_the_limit_says(server: ForkServer, tmp_path: Path, limit: Limit) -> None:
    scenario = BASE.with_axes(REFUSED[limit.id])
    assert limit.error
    assert unsupported(scenario) == limit.reason
    (outcome,) = run(server, scenario, tmp_path)
    if limit.id == "reshard-divisor-tp" and outcome.timed_out:
        pytest.skip("torch refuses this only after building meshes on which its ranks may wait for each other for ever")
    first = next(error for error in outcome.errors if error.rank == outcome.first_failed)
    assert (first.type, first.op, first.stage) == (limit.error.kind, limit.error.op, "op")
    assert limit.error.message in first.message


def test_one_changed_bit_is_a_difference(server: ForkServer, tmp_path: Path) -> None:
    scenario = BASE.with_axes({"mesh": "1x2x1", "program": "build step"})
    files = observed(run(server, scenario, tmp_path))
    build, step = (list(unpack(blob)) for blob in blobs(files[1]))
    at = next(i for i, r in enumerate(step) if r.role == "exp_avg_sq" and r.data)
    step[at] = step[at]._replace(data=bytes([step[at].data[0] ^ 1]) + step[at].data[1:])
    files[1].write_bytes(b"".join(LENGTH.pack(len(b)) + b for b in (pack(build), pack(step))))
    (difference,) = judged(server, scenario, tmp_path, files)["differences"]
    assert "exp_avg_sq" in json.dumps(difference)


def test_observing_changes_nothing(server: ForkServer, tmp_path: Path) -> None:
    """The same program with an observation after every operation, and with one after the last only."""
    axes = {"mesh": "1x2x1", "model": "frozen_tower", "optimizer": "adamw/schedule=halve/loss_scale=64.0/clip=1.0"}
    final: list[list[bytes]] = []
    for system in ("torch-fsdp2", "quiet"):
        scenario = BASE.with_axes({**axes, "system": system, "program": "build step save step load step"})
        (tmp_path / system).mkdir()
        outcomes = run(server, scenario, tmp_path / system)
        assert all(outcome.ok for outcome in outcomes), outcomes
        final.append([list(blobs(path))[5] for path in observed(outcomes)])
    assert final[0] == final[1]
