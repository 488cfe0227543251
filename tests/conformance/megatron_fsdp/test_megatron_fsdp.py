"""Real Megatron-FSDP on real gloo ranks against the twin, bit for bit; and that observing changes nothing."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from harness.models import ZOO
from harness.program import expand, sessions
from harness.scenario import Scenario
from harness.systems.megatron_fsdp import INFO, LIMITS, OPTIONS, Limit, unsupported
from harness.world.environments import Environments
from harness.world.job import Job, JobOutcome
from harness.world.server import ForkServer

RELEASE = "0.6.1"
LENGTH = struct.Struct("<Q")

pytestmark = pytest.mark.real

BASE = Scenario(system="megatron-fsdp", version=RELEASE, options=("neutral_start",)).with_axes({"mesh": "1x2x1"})

REFUSED: dict[str, dict[str, str]] = {
    "meta-replicate": {"sharding": "replicate", "options": "meta+neutral_start", "program": "build"},
    "outer-optim": {"mesh": "2x2x1", "sharding": "zero1", "options": "neutral_start+outer_optim", "program": "build"},
}
"""Limit → a scenario that the library refuses, too."""

QUIET = """
from dataclasses import replace
from harness.systems.registry import register
from harness.systems.megatron_fsdp import INFO
from harness.systems.megatron_fsdp_rank import MegatronFsdpRank

class Quiet(MegatronFsdpRank):
    def observe(self, op):
        return super().observe(op) if op.index == 5 else ()

register(replace(INFO, name="quiet", entry="quiet:Quiet"))
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    """A warm server that also knows `quiet`: the system without any observation before operation 5."""
    plugins = tmp_path_factory.mktemp("plugins")
    (plugins / "quiet.py").write_text(QUIET)
    overlay = Environments(None, ()).overlay(INFO, RELEASE)
    prefix = (*overlay.paths, plugins)
    with ForkServer(
        path_prefix=prefix, warm_up=(INFO.warm_up,), plugins=("quiet",), env=overlay.environment
    ) as running:
        yield running


def run(server: ForkServer, scenario: Scenario, folder: Path) -> list[JobOutcome]:
    """The outcome of every session of the scenario, up to the first that fails."""
    outcomes: list[JobOutcome] = []
    for session in range(len(sessions(expand(scenario)))):
        outcomes.append(server.submit(Job(scenario, session, folder, 60.0)).result())
        if not outcomes[-1].ok:
            break
    return outcomes


def judged(server: ForkServer, scenario: Scenario, folder: Path, outcomes: Sequence[JobOutcome]) -> dict[str, Any]:
    """What differs from the twin, live and written. The server's numeric environment decides torch's kernels."""
    saves = [op.checkpoint for op in expand(scenario) if op.kind == "save"]
    request = {
        "scenario": scenario.axis_values(only_changed=True),
        "observations": [str(path) for outcome in outcomes for path in outcome.observations],
        "checkpoints": {number: str(folder / f"checkpoint{number}") for number in saves},
        "complete": True,
    }
    judgement: dict[str, Any] = json.loads(server.call("harness.judge:serve", json.dumps(request).encode(), 60.0))
    return judgement


FUSED = {"optimizer": "adamw/impl=multi_tensor", "options": "decoupled_grad+neutral_start"}
AWARE = {**FUSED, "options": "neutral_start+precision_aware"}

SOUND: tuple[dict[str, str], ...] = (
    {"model": "short", "dtype": "bf16/reduce=fp32/master=fp32", "load": "grow"},
    {"mesh": "1x4x1", "model": "tied", "load": "indivisible"},
    {"mesh": "1x3x1", "model": "groups", "sharding": "zero1", "microbatches": "3", "optimizer": "sgd/momentum=0.9"},
    {"mesh": "2x2x1", "model": "many", "sharding": "zero2", "dtype": "bf16/master=fp32", "load": "shrink"},
    {"mesh": "1x2x2", "model": "twins", "load": "tp_change"},
    {"mesh": "1x4x1", "model": "frozen_tower", "load": "indivisible", "optimizer": "adam/impl=fused"},
    {"model": "mixed_unit", "dtype": "mixed/reduce=fp32/master=fp32", "program": "model_only"},
    {"sharding": "replicate", "model": "unused", "microbatches": "2", "program": "twice"},
    {"model": "experts", "microbatches": "2", "grad_sync": "every", "optimizer": "adamw/schedule=halve"},
    {"model": "swiglu", "optimizer": "adamw/loss_scale=1024.0", "options": "fine_grained_gather+neutral_start"},
    {"model": "frozen_tower", "mesh": "1x3x1", "optimizer": "adamw/clip=1.0", "load": "same"},
    {"model": "many", "mesh": "1x2x2", "load": "tp_change", "dtype": "bf16/master=fp32", **FUSED},
    {"model": "twins", "program": "model_only", "dtype": "bf16/master=fp32/exp_avg=bf16/exp_avg_sq=bf16", **AWARE},
    {"model": "mixed_unit", "dtype": "mixed/reduce=fp32/master=fp32", "options": "meta+neutral_start"},
)


@pytest.mark.parametrize(
    "axes", [SOUND[0], *(pytest.param(axes, marks=pytest.mark.nightly) for axes in SOUND[1:])], ids=str
)
def test_state_equals_the_twin_bit_for_bit(server: ForkServer, tmp_path: Path, axes: dict[str, str]) -> None:
    scenario = BASE.with_axes(axes)
    assert unsupported(scenario) is None
    outcomes = run(server, scenario, tmp_path)
    assert all(outcome.ok for outcome in outcomes), outcomes
    judgement = judged(server, scenario, tmp_path, outcomes)
    assert judgement["differences"] == []
    assert judgement["distrust"] == ""


def blobs(path: Path) -> Iterator[bytes]:
    """The packed observations of one rank's file, one an operation."""
    content, at = path.read_bytes(), 0
    while at < len(content):
        (length,) = LENGTH.unpack_from(content, at)
        yield content[at + LENGTH.size : at + LENGTH.size + length]
        at += LENGTH.size + length


def test_observing_changes_nothing(server: ForkServer, tmp_path: Path) -> None:
    """The same program with an observation after every operation, and with one after the last only."""
    axes = {"model": "short", "dtype": "bf16/master=fp32", "sharding": "zero2"}
    final: list[list[bytes]] = []
    for system in ("megatron-fsdp", "quiet"):
        scenario = BASE.with_axes({**axes, "system": system, "program": "build step save step load step"})
        (tmp_path / system).mkdir()
        outcomes = run(server, scenario, tmp_path / system)
        assert all(outcome.ok for outcome in outcomes), outcomes
        final.append([list(blobs(path))[5] for outcome in outcomes for path in outcome.observations])
    assert final[0] == final[1]


@pytest.mark.nightly
@pytest.mark.parametrize("limit", [limit for limit in LIMITS if limit.error], ids=lambda limit: limit.id)
def test_the_library_raises_what_the_limit_says(server: ForkServer, tmp_path: Path, limit: Limit) -> None:
    scenario = BASE.with_axes(REFUSED[limit.id])
    assert limit.error
    assert unsupported(scenario) == limit.reason
    (outcome,) = run(server, scenario, tmp_path)
    first = next(error for error in outcome.errors if error.rank == outcome.first_failed)
    assert (first.type, first.op, first.stage) == (limit.error.kind, limit.error.op, "op")
    assert limit.error.message in first.message


def test_every_limit_has_a_reason_and_every_model_a_verdict() -> None:
    assert len({limit.id for limit in LIMITS}) == len(LIMITS)
    assert all(limit.reason for limit in LIMITS)
    refused = {model for model in ZOO if unsupported(BASE.with_axes({"model": model}))}
    assert refused == {"gpt", "moe"}
    for option in OPTIONS:
        assert unsupported(BASE.with_axes({"options": option, "optimizer": "adamw/impl=multi_tensor"})) is None
