"""Real Megatron-Core on real gloo ranks and the emulated device against the twin, bit for bit; and each limit of it."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from harness.models import ZOO
from harness.program import expand, sessions
from harness.scenario import Scenario
from harness.systems.megatron_core import INFO, LIMITS, OPTIONS, Limit, not_exercised, unsupported, variant
from harness.world.environments import VARIANT, Environments
from harness.world.job import Job, JobOutcome
from harness.world.server import ForkServer

RELEASE = "0.16.1"
LENGTH = struct.Struct("<Q")

BASE = Scenario(system="megatron-core", version=RELEASE, sharding="zero1", checkpoint="dp_zero").with_axes(
    {"dtype": "bf16/master=fp32", "optimizer": "adamw/impl=multi_tensor", "program": "train", "mesh": "1x2x1"}
)

REFUSED: dict[str, dict[str, str]] = {
    "precision-aware-replicate": {"options": "precision_aware", "sharding": "replicate", "checkpoint": "plain"},
    "precision-aware-sgd": {"options": "precision_aware", "optimizer": "sgd/impl=multi_tensor"},
    "dtypes-without-precision-aware": {"dtype": "bf16/master=fp32/exp_avg=bf16"},
    "distributed-sgd": {"optimizer": "sgd/impl=multi_tensor"},
    "offload-l2": {"optimizer": "adam/impl=multi_tensor", "offload": "cpu"},
    "overlap-unused": {"model": "unused", "options": "overlap_grad_reduce"},
    "checkpoint-fsdp": {"checkpoint": "fsdp_dtensor", "program": "build step save"},
    "expert-instances": {"model": "moe", "expert_parallel": "2", "mesh": "2x1x1"},
}
"""Limit → a scenario that it refuses, of those that the release of these tests raises."""

QUIET = """
from dataclasses import replace
from harness.systems.registry import register
from harness.systems.megatron_core import INFO
from harness.systems.megatron_core_rank import MegatronRank

class Quiet(MegatronRank):
    def observe(self, op):
        return super().observe(op) if op.index == 4 else ()

register(replace(INFO, name="quiet", entry="quiet:Quiet"))
"""

Servers = Callable[[Scenario], ForkServer]


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """A warm server for each variant, which also knows `quiet`: the system without observations before operation 4."""
    plugins = tmp_path_factory.mktemp("plugins")
    (plugins / "quiet.py").write_text(QUIET)
    running: dict[str, ForkServer] = {}
    with ExitStack() as stack:

        def server(scenario: Scenario) -> ForkServer:
            name = variant(scenario)
            if name not in running:
                overlay = Environments(None, ()).overlay(INFO, RELEASE)
                running[name] = stack.enter_context(
                    ForkServer(
                        path_prefix=(*overlay.paths, plugins),
                        warm_up=(INFO.warm_up,),
                        plugins=("quiet",),
                        env={**overlay.environment, VARIANT: name},
                    )
                )
            return running[name]

        yield server


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


@pytest.mark.real
@pytest.mark.parametrize(
    "axes",
    [
        {"mesh": "1x1x1"},
        {"mesh": "1x3x1", "model": "short", "dtype": "bf16/reduce=fp32/master=fp32", "microbatches": "3"},
        {"dtype": "fp32", "model": "unused", "optimizer": "adam/impl=multi_tensor"},
        {"mesh": "1x2x2", "model": "mixed_unit", "dtype": "mixed/master=fp32",
         "optimizer": "adamw/impl=multi_tensor/clip=1.0/schedule=linear"},
        {"model": "twins", "dtype": "mixed_fp16/master=fp32", "optimizer": "adamw/impl=multi_tensor/loss_scale=256.0",
         "program": "build step overflow overflow step step step"},
        {"mesh": "2x2x1", "model": "many", "options": "overlap_grad_reduce+overlap_param_gather"},
        {"mesh": "1x4x1", "model": "moe", "expert_parallel": "2"},
        {"mesh": "1x4x1", "model": "moe", "expert_parallel": "4", "dtype": "fp32"},
        {"model": "groups", "sharding": "replicate", "checkpoint": "plain", "optimizer": "sgd/impl=multi_tensor"},
        {"model": "later", "sharding": "replicate", "checkpoint": "plain", "dtype": "fp16/master=fp32"},
        {"offload": "cpu=0.5"},
        {"offload": "cpu", "dtype": "fp16/master=fp32", "optimizer": "adamw/impl=multi_tensor/loss_scale=256.0"},
        {"offload": "cpu=0.5", "options": "overlap_offload+precision_aware", "microbatches": "2"},
        {"options": "precision_aware", "dtype": "mixed/master=fp32/exp_avg=bf16/exp_avg_sq=bf16", "model": "twins"},
        {"optimizer": "adamw/impl=forloop", "model": "tied"},
        {"mesh": "1x2x2", "model": "gpt", "options": "overlap_grad_reduce+overlap_param_gather"},
        {"model": "gpt", "sharding": "replicate", "checkpoint": "plain", "optimizer": "adamw/impl=forloop"},
        {"model": "frozen_tower", "program": "resume"},
        {"model": "tied", "program": "model_only"},
    ],
    ids=str,
)  # fmt: skip
def test_state_equals_the_twin_bit_for_bit(servers: Servers, tmp_path: Path, axes: dict[str, str]) -> None:
    scenario = BASE.with_axes(axes)
    assert unsupported(scenario) is None
    outcomes = run(servers(scenario), scenario, tmp_path)
    assert all(outcome.ok for outcome in outcomes), outcomes
    judgement = judged(servers(scenario), scenario, tmp_path, outcomes)
    assert judgement["differences"] == []
    assert judgement["distrust"] == ""
    assert "device=cuda in torch.zeros" in judgement["emulated"]


@pytest.mark.real
@pytest.mark.parametrize("name", REFUSED)
def test_the_library_raises_what_the_limit_says(servers: Servers, tmp_path: Path, name: str) -> None:
    limit: Limit = next(limit for limit in LIMITS if limit.id == name)
    scenario = BASE.with_axes(REFUSED[name])
    assert limit.error
    assert unsupported(scenario) == limit.reason
    (outcome,) = run(servers(scenario), scenario, tmp_path)
    first = next(error for error in outcome.errors if error.rank == outcome.first_failed)
    assert (first.type, first.op, first.stage) == (limit.error.kind, limit.error.op, "op")
    assert limit.error.message in first.message


@pytest.mark.real
def test_observing_changes_nothing(servers: Servers, tmp_path: Path) -> None:
    """The same program with an observation after every operation, and with one after the last only."""
    axes = {"model": "twins", "dtype": "mixed/master=fp32", "optimizer": "adamw/impl=multi_tensor/clip=1.0"}
    final: list[list[bytes]] = []
    for system in ("megatron-core", "quiet"):
        options = {"options": "overlap_grad_reduce+overlap_param_gather", "program": "build step step step step"}
        scenario = BASE.with_axes({**axes, **options, "system": system})
        (tmp_path / system).mkdir()
        outcomes = run(servers(scenario), scenario, tmp_path / system)
        assert all(outcome.ok for outcome in outcomes), outcomes
        final.append([_last(path) for path in outcomes[0].observations])
    assert _without_symbols(final[0]) == _without_symbols(final[1])


def _last(path: Path) -> bytes:
    """The last packed observation of a rank's file."""
    content, at, found = path.read_bytes(), 0, b""
    while at < len(content):
        (length,) = LENGTH.unpack_from(content, at)
        found = content[at + LENGTH.size : at + LENGTH.size + length]
        at += LENGTH.size + length
    return found


def _without_symbols(observed: Sequence[bytes]) -> list[list[object]]:
    """Unpacked records without that of the touched symbols, which observing adds to."""
    from harness.observe.record import unpack

    return [[record for record in unpack(blob) if record.role != "emulated"] for blob in observed]


def test_every_limit_that_this_release_raises_is_checked() -> None:
    other_releases = {"checkpoint-fsdp-013", "checkpoint-since", "fsdp-device-mesh"}
    raised = {limit.id for limit in LIMITS if limit.error}
    assert raised - other_releases == set(REFUSED)


def test_the_variant_is_what_the_library_finds_beside_it() -> None:
    assert variant(BASE) == "apex"
    assert variant(BASE.with_axes({"optimizer": "adamw/impl=forloop"})) == "plain"
    assert variant(BASE.with_axes({"options": "precision_aware"})) == "te"


def test_overlap_is_not_exercised_on_a_device_whose_streams_do_nothing() -> None:
    scenario = BASE.with_axes({"options": "one_bucket+overlap_grad_reduce+overlap_param_gather"})
    assert [said.partition(":")[0] for said in not_exercised(scenario)] == [
        "overlap_grad_reduce",
        "overlap_param_gather",
    ]
    assert not_exercised(BASE) == ()


def test_options_are_documented() -> None:
    assert all(doc for doc in OPTIONS.values())
    assert unsupported(BASE.with_axes({"options": "no_such_switch"}))


@pytest.mark.parametrize("model", sorted(ZOO))
def test_every_model_of_the_zoo_has_a_supported_scenario(model: str) -> None:
    assert unsupported(BASE.with_axes({"model": model})) is None


@pytest.mark.parametrize(
    ("axes", "reason"),
    [
        ({"sharding": "fully_shard"}, "zero1"),
        ({"dtype": "bf16"}, "masters"),
        ({"dtype": "fp32/reduce=bf16"}, "reduced"),
        ({"optimizer": "adamw/impl=multi_tensor/loss_scale=64.0"}, "fp16"),
        ({"version": "0.15.3", "model": "groups"}, "0.16"),
        ({"version": "0.14.0", "optimizer": "adam/impl=multi_tensor"}, "AdamW"),
        ({"model": "moe", "expert_parallel": "2", "mesh": "1x2x2"}, "tensor parallelism"),
        ({"mesh": "1x1x5"}, "divide"),
    ],
    ids=str,
)
def test_what_has_no_meaning_is_refused_with_its_reason(axes: dict[str, str], reason: str) -> None:
    assert reason in (unsupported(BASE.with_axes(axes)) or "")
