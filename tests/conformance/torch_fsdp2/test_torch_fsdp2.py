"""Real FSDP2 and DCP on real gloo ranks against the twin, bit for bit; and each limit against the real library."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.observe.record import pack, unpack
from harness.scenario import Scenario
from harness.systems.accepts import Limit
from harness.systems.torch_fsdp2 import SYSTEM
from harness.world.server import ForkServer
from tests.conformance.sessions import (
    DEADLINE_S,
    LENGTH,
    assert_equals_the_twin,
    assert_raises_what_the_limit_says,
    blobs,
    judged,
    observed,
    run,
    server_of,
)

pytestmark = pytest.mark.real

BASE = Scenario(system="torch-fsdp2")
RAISED = [limit for limit in SYSTEM.accepts.limits if limit.error]

REFUSED: dict[str, dict[str, str]] = {
    "mixed-storage-group": {"model": "mixed_unit", "dtype": "mixed", "mesh": "1x2x1", "program": "train"},
    "reshard-divisor": {"mesh": "1x2x1", "reshard_after_forward": "3", "program": "train"},
    "reshard-divisor-tp": {"mesh": "1x4x2", "reshard_after_forward": "2", "program": "train"},
    "fused-sgd": {"optimizer": "sgd/impl=fused", "mesh": "1x2x1", "program": "train"},
    "scaler-fp16-gradients": {"dtype": "fp16", "optimizer": "adamw/loss_scale=1024.0", "program": "train"},
}
"""Limit → a scenario that it refuses."""

HANGS, ATTEMPTS, HANG_S = "reshard-divisor-tp", 3, 8.0
"""The limit before which torch often hangs, how often its scenario is tried, and when it counts as hanging."""


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    """A warm server that also knows `torch-fsdp2-quiet`: FSDP2 without any observation before operation 5."""
    with server_of(SYSTEM, plugins=("tests.conformance.torch_fsdp2.quiet",)) as running:
        yield running


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
    assert SYSTEM.refusal(scenario) is None
    assert_equals_the_twin(server, scenario, tmp_path)


@pytest.mark.parametrize("limit", RAISED, ids=lambda limit: limit.id)
def test_the_library_raises_what_the_limit_says(server: ForkServer, tmp_path: Path, limit: Limit) -> None:
    scenario = BASE.with_axes(REFUSED[limit.id])
    assert SYSTEM.refusal(scenario) == limit.reason
    hangs = limit.id == HANGS
    for attempt in range(ATTEMPTS if hangs else 1):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        (outcome,) = run(server, scenario, folder, HANG_S if hangs else DEADLINE_S)
        if not outcome.timed_out:
            break
    if hangs and outcome.timed_out:
        pytest.skip("before torch refuses this it builds meshes on which its ranks may wait for each other for ever")
    assert_raises_what_the_limit_says(outcome, limit)


def test_one_changed_bit_is_a_difference(server: ForkServer, tmp_path: Path) -> None:
    scenario = BASE.with_axes({"mesh": "1x2x1", "program": "build step"})
    outcomes = run(server, scenario, tmp_path)
    file = observed(outcomes)[1]
    build, step = (list(unpack(blob)) for blob in blobs(file))
    at = next(i for i, r in enumerate(step) if r.role == "exp_avg_sq" and r.data)
    step[at] = step[at]._replace(data=bytes([step[at].data[0] ^ 1]) + step[at].data[1:])
    file.write_bytes(b"".join(LENGTH.pack(len(b)) + b for b in (pack(build), pack(step))))
    (difference,) = judged(server, scenario, tmp_path, outcomes)["differences"]
    assert "exp_avg_sq" in json.dumps(difference)


def test_observing_changes_nothing(server: ForkServer, tmp_path: Path) -> None:
    """The same program with an observation after every operation, and with one after the last only."""
    axes = {"mesh": "1x2x1", "model": "frozen_tower", "optimizer": "adamw/schedule=halve/loss_scale=64.0/clip=1.0"}
    final: list[list[bytes]] = []
    for system in ("torch-fsdp2", "torch-fsdp2-quiet"):
        scenario = BASE.with_axes({**axes, "system": system, "program": "build step save step load step"})
        (tmp_path / system).mkdir()
        outcomes = run(server, scenario, tmp_path / system)
        assert all(outcome.ok for outcome in outcomes), outcomes
        final.append([list(blobs(path))[5] for path in observed(outcomes)])
    assert final[0] == final[1]
