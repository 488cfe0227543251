"""Real FSDP2 and DCP on real gloo ranks against the twin, bit for bit; and each limit against the real library."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from harness.observe.assemble import assemble
from harness.observe.logical import Key, Logical, Value
from harness.observe.record import Record, unpack
from harness.program import expand, sessions
from harness.scenario import Scenario
from harness.systems.torch_fsdp2 import INFO, LIMITS, Limit, unsupported
from harness.world.job import Job, JobOutcome
from harness.world.server import ForkServer

pytestmark = pytest.mark.real

BASE = Scenario(system="torch-fsdp2")

REFUSED: dict[str, dict[str, str]] = {
    "mixed-storage-group": {"model": "mixed_unit", "dtype": "mixed", "mesh": "1x2x1", "program": "train"},
    "reshard-divisor": {"mesh": "1x2x1", "reshard_after_forward": "3", "program": "train"},
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


def run(server: ForkServer, scenario: Scenario, folder: Path) -> tuple[list[Record], JobOutcome]:
    """Every session of the scenario, up to the first that fails: what its ranks recorded, and the last outcome."""
    records: list[Record] = []
    for session in range(len(sessions(expand(scenario)))):
        outcome = server.submit(Job(scenario, session, folder, 60.0)).result()
        for path in outcome.observations:
            records += read(path)
        if not outcome.ok:
            break
    return records, outcome


def read(path: Path) -> Iterator[Record]:
    content, at = path.read_bytes(), 0
    while at < len(content):
        (length,) = struct.unpack_from("<Q", content, at)
        yield from unpack(content[at + 8 : at + 8 + length])
        at += 8 + length


def expected(server: ForkServer, scenario: Scenario, observed: Logical) -> Logical:
    """The twin's answer, computed under the server's numeric environment: it decides which kernels torch takes."""
    norms = {k.op: float(np.frombuffer(v.data, np.float32)[0]) for k, v in observed.items() if k.role == "norm"}
    request = {"scenario": scenario.axis_values(only_changed=True), "norms": norms}
    header, _, body = server.call("harness.oracle.twin:serve", json.dumps(request).encode(), 60.0).partition(b"\n")
    truth, at = Logical(), 0
    for op, where, role, fqn, dtype, shape, length in json.loads(header):
        truth[Key(op, where, role, fqn)] = Value(dtype, tuple(shape), body[at : at + length])
        at += length
    return truth


def assert_bitwise(server: ForkServer, scenario: Scenario, records: Sequence[Record]) -> None:
    observed, problems = assemble(records)
    truth = expected(server, scenario, observed)
    assert problems == []
    assert observed.keys() == truth.keys()
    assert [key for key in truth if key.role != "norm" and observed[key] != truth[key]] == []


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
    records, outcome = run(server, scenario, tmp_path)
    assert outcome.ok, outcome.errors
    assert_bitwise(server, scenario, records)


@pytest.mark.parametrize("limit", [limit for limit in LIMITS if limit.error], ids=lambda limit: limit.id)
def test_the_library_raises_what_the_limit_says(server: ForkServer, tmp_path: Path, limit: Limit) -> None:
    scenario = BASE.with_axes(REFUSED[limit.id])
    assert limit.error
    assert unsupported(scenario) == limit.reason
    _, outcome = run(server, scenario, tmp_path)
    first = next(error for error in outcome.errors if error.rank == outcome.first_failed)
    assert (first.type, first.op, first.stage) == (limit.error.kind, limit.error.op, "op")
    assert limit.error.message in first.message


def test_the_comparison_sees_one_changed_bit(server: ForkServer, tmp_path: Path) -> None:
    scenario = BASE.with_axes({"mesh": "1x2x1", "program": "build step"})
    records, _ = run(server, scenario, tmp_path)
    at = next(i for i, r in enumerate(records) if r.role == "exp_avg_sq" and r.data)
    altered = bytes([records[at].data[0] ^ 1]) + records[at].data[1:]
    records[at] = records[at]._replace(data=altered)
    with pytest.raises(AssertionError):
        assert_bitwise(server, scenario, records)


def test_observing_changes_nothing(server: ForkServer, tmp_path: Path) -> None:
    """The same program with an observation after every operation, and with one after the last only."""
    axes = {"mesh": "1x2x1", "model": "frozen_tower", "optimizer": "adamw/schedule=halve/loss_scale=64.0/clip=1.0"}
    final: list[list[Record]] = []
    for system in ("torch-fsdp2", "quiet"):
        scenario = BASE.with_axes({**axes, "system": system, "program": "build step save step load step"})
        (tmp_path / system).mkdir()
        records, outcome = run(server, scenario, tmp_path / system)
        assert outcome.ok, outcome.errors
        final.append([record for record in records if record.op == 5])
    assert final[0] == final[1]
