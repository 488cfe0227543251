"""Real Megatron-FSDP on real gloo ranks against the twin, bit for bit; and that observing changes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.models import zoo
from harness.scenario import Scenario
from harness.systems.accepts import Limit
from harness.systems.megatron_fsdp import SYSTEM
from harness.world.server import ForkServer
from tests.conformance.megatron_fsdp import RELEASE
from tests.conformance.sessions import (
    assert_equals_the_twin,
    assert_raises_what_the_limit_says,
    blobs,
    observed,
    run,
    server_of,
)

pytestmark = pytest.mark.real

BASE = Scenario(system=SYSTEM.name, version=RELEASE, options=("neutral_start",)).with_axes({"mesh": "1x2x1"})
LIMITS = SYSTEM.accepts.limits

REFUSED: dict[str, dict[str, str]] = {
    "meta-replicate": {"sharding": "replicate", "options": "meta+neutral_start", "program": "build"},
    "outer-optim": {"mesh": "2x2x1", "sharding": "zero1", "options": "neutral_start+outer_optim", "program": "build"},
}
"""Limit → a scenario that the library refuses, too."""


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    """A warm server that also knows `megatron-fsdp-quiet`: the system without any observation before operation 5."""
    with server_of(SYSTEM, RELEASE, plugins=("tests.conformance.megatron_fsdp.quiet",)) as running:
        yield running


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
    assert SYSTEM.refusal(scenario) is None
    assert_equals_the_twin(server, scenario, tmp_path)


def test_observing_changes_nothing(server: ForkServer, tmp_path: Path) -> None:
    """The same program with an observation after every operation, and with one after the last only."""
    axes = {"model": "short", "dtype": "bf16/master=fp32", "sharding": "zero2"}
    final: list[list[bytes]] = []
    for system in ("megatron-fsdp", "megatron-fsdp-quiet"):
        scenario = BASE.with_axes({**axes, "system": system, "program": "build step save step load step"})
        (tmp_path / system).mkdir()
        outcomes = run(server, scenario, tmp_path / system)
        assert all(outcome.ok for outcome in outcomes), outcomes
        final.append([list(blobs(path))[5] for path in observed(outcomes)])
    assert final[0] == final[1]


@pytest.mark.nightly
@pytest.mark.parametrize("limit", [limit for limit in LIMITS if limit.error], ids=lambda limit: limit.id)
def test_the_library_raises_what_the_limit_says(server: ForkServer, tmp_path: Path, limit: Limit) -> None:
    scenario = BASE.with_axes(REFUSED[limit.id])
    assert SYSTEM.refusal(scenario) == limit.reason
    (outcome,) = run(server, scenario, tmp_path)
    assert_raises_what_the_limit_says(outcome, limit)


def test_every_limit_has_a_reason_and_every_model_a_verdict() -> None:
    assert len({limit.id for limit in LIMITS}) == len(LIMITS)
    assert all(limit.reason for limit in LIMITS)
    refused = {model for model in zoo() if SYSTEM.refusal(BASE.with_axes({"model": model}))}
    assert refused == {"gpt", "moe"}
    for option in SYSTEM.accepts.options:
        assert SYSTEM.refusal(BASE.with_axes({"options": option, "optimizer": "adamw/impl=multi_tensor"})) is None
