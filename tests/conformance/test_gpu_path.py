"""Scenarios with `device = cuda` from the laboratory to the verdict on a machine without a GPU: on the emulated device.

It is the path that a GPU takes: a server that runs nothing before the fork, ranks that take their device, share it over
gloo and hand it to the library's mesh, pinned offload, a twin in a worker on the same device, a reference that vouches
for structure alone.
*Does not verify* what only a GPU can show: NCCL, its kernels, streams, what C++ says of a tensor's device.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from shardproof.laboratory import laboratory as laboratory_module
from shardproof.laboratory.laboratory import Laboratory
from shardproof.laboratory.run_verdict import REFERENCE_NOT_COMPARED
from shardproof.scenario import Mesh, Scenario
from shardproof.verdict import Verdict
from shardproof.world import environments
from shardproof.world.server import ForkServer

ROOT = Path(__file__).parents[2]
STUB = "tests.unit.gpu_stub"
BASE = Scenario(
    system="torch-fsdp2", device="cuda", mesh=Mesh(1, 2, 1), model="twins", program="build step save build load step"
)


def emulating(**options: Any) -> ForkServer:
    """A server whose GPU, if it is to have one, is the emulated one."""
    if options.get("device") == "cuda":
        assert not options["warm_up"], "nothing may run before the fork"
        plugins = (*options["plugins"], STUB)
        options |= {"plugins": plugins, "warm_up": [f"{STUB}:emulate"]}
        options["path_prefix"] = [*options.get("path_prefix", ()), ROOT]
    return ForkServer(**options)


@pytest.fixture(scope="module")
def laboratory() -> Iterator[Laboratory]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(laboratory_module, "ForkServer", emulating)
        patch.setattr(environments, "ForkServer", emulating)
        with Laboratory(jobs=1, deadline_s=120.0) as running:
            yield running


@pytest.mark.real
@pytest.mark.parametrize(
    "axes",
    [
        {},
        pytest.param({"optimizer": "adamw/capturable=true"}, marks=pytest.mark.nightly),
        pytest.param({"optimizer": "adamw/impl=fused/capturable=true"}, marks=pytest.mark.nightly),
        pytest.param({"optimizer": "adamw/impl=fused"}, marks=pytest.mark.nightly),
        pytest.param({"optimizer": "adam/impl=forloop/clip=1.0/schedule=halve"}, marks=pytest.mark.nightly),
        pytest.param({"optimizer": "adamw/loss_scale=1024.0", "program": "overflow"}, marks=pytest.mark.nightly),
        pytest.param({"dtype": "fp32/param=bf16/reduce=fp32", "mesh": "2x2x1"}, marks=pytest.mark.nightly),
        pytest.param({"mesh": "1x2x2", "model": "dense"}, marks=pytest.mark.nightly),
        pytest.param({"offload": "cpu", "optimizer": "adamw/clip=1.0"}, marks=pytest.mark.nightly),
        pytest.param({"checkpoint": "full", "load": "grow", "program": "restart"}, marks=pytest.mark.nightly),
    ],
    ids=lambda axes: " ".join(axes.values()) or "adamw",
)
def test_a_scenario_on_the_device_passes(laboratory: Laboratory, axes: dict[str, str]) -> None:
    scenario = BASE.with_axes(axes)
    result = laboratory.examine_one(scenario)
    assert result.verdict is Verdict.PASS, result.signature
    assert "emulated GPU" in result.device
    assert "gloo" in result.device
    assert result.not_exercised == (() if scenario.offload.fraction else (REFERENCE_NOT_COMPARED,))


MEGATRON = BASE.with_axes(
    {"system": "megatron-core", "sharding": "zero1", "checkpoint": "dp_zero", "dtype": "bf16/master=fp32",
     "optimizer": "adamw/impl=multi_tensor/groups=one", "model": "dense"}
)  # fmt: skip


@pytest.mark.real
@pytest.mark.nightly
@pytest.mark.parametrize(
    "axes",
    [
        {},
        {"optimizer": "adamw/impl=forloop/groups=one", "program": "train"},
        {"options": "precision_aware", "program": "train"},
        {"offload": "cpu=0.5", "program": "train"},
        {"checkpoint": "fully_reshardable", "dtype": "fp32"},
        {"options": "overlap_grad_reduce+overlap_param_gather", "optimizer": "adamw/impl=multi_tensor/clip=1.0"},
    ],
    ids=lambda axes: " ".join(axes.values()) or "dp_zero",
)
def test_megatron_core_finds_its_device(laboratory: Laboratory, axes: dict[str, str]) -> None:
    result = laboratory.examine_one(MEGATRON.with_axes(axes))
    assert result.verdict is Verdict.PASS, result.signature
    assert "emulated GPU" in result.device
    assert "CUDA device" not in result.emulated  # what the system says of itself on a CPU
