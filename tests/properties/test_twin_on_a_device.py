"""The twin on another device than the CPU, as far as a machine without a GPU can tell: on the emulated one.

Its arithmetic is the CPU's, so that the twin must give the same bits; and it refuses what a GPU refuses, so that a
tensor left behind on the host shows.
"""

from __future__ import annotations

import os

os.environ["ATEN_CPU_CAPABILITY"] = "default"  # read by torch when its first kernel runs

from collections.abc import Iterator

import pytest
from shardproof.emulation import cuda
from shardproof.emulation.used_symbols import forget_used_symbols, used_symbols
from shardproof.laboratory import judge as court
from shardproof.observe.logical import Logical, Value
from shardproof.oracle import twin
from shardproof.oracle.contract import steps_on_gpu, twin_device
from shardproof.oracle.inputs import Inputs
from shardproof.scenario import Mesh, Scenario

BASE = Scenario(system="torch-fsdp2", mesh=Mesh(1, 2, 1), program="build step save build load step", model="groups")
MEGATRON = {"system": "megatron-core", "sharding": "zero1", "checkpoint": "dp_zero", "dtype": "bf16/master=fp32"}

CASES: dict[str, dict[str, str]] = {
    "adamw": {},
    "forloop": {"optimizer": "adam/impl=forloop"},
    "fused": {"optimizer": "adamw/impl=fused"},
    "sgd": {"optimizer": "sgd/nesterov=true"},
    "clip": {"optimizer": "adamw/clip=1.0/schedule=halve"},
    "loss scale": {"optimizer": "adamw/loss_scale=1024.0", "program": "overflow"},
    "bf16": {"dtype": "bf16"},
    "mixed": {"dtype": "fp32/param=bf16/reduce=fp32", "model": "frozen_tower"},
    "megatron": {**MEGATRON, "optimizer": "adamw/impl=multi_tensor"},
    "megatron clip": {**MEGATRON, "optimizer": "adamw/impl=multi_tensor/clip=1.0"},
    "megatron part on the host": {
        **MEGATRON, "model": "dense", "optimizer": "adamw/impl=multi_tensor/groups=one", "offload": "cpu=0.5",
    },
    "megatron part on the host, one kernel": {
        **MEGATRON, "model": "dense", "optimizer": "adamw/impl=multi_tensor/groups=one", "offload": "cpu=0.5",
        "options": "torch_offload",
    },
}  # fmt: skip


def inputs_of(scenario: Scenario) -> Inputs:
    return court.ResolvedScenario.from_scenario(scenario).inputs


@pytest.mark.parametrize("case", CASES)
def test_the_twin_on_a_device_says_what_it_says_on_the_cpu(case: str) -> None:
    scenario = BASE.with_axes(CASES[case])
    on_gpu = scenario.with_axes({"device": "cuda"})
    assert steps_on_gpu(on_gpu)
    inputs = inputs_of(on_gpu)
    assert inputs.steps_on_gpu
    forget_used_symbols()
    with cuda.emulated():
        found = twin.run(inputs)
    assert used_symbols()
    assert found == twin.run(inputs_of(scenario))


@pytest.mark.parametrize(
    ("axes", "device", "steps_there"),
    [({}, "cuda", True), ({"offload": "cpu"}, "cpu", False), ({**MEGATRON, "offload": "cpu=0.5"}, "cpu", True)],
    ids=["on the device", "offloaded", "offloaded in part"],
)
def test_what_is_offloaded_is_the_cpus(axes: dict[str, str], device: str, steps_there: bool) -> None:
    scenario = BASE.with_axes({"device": "cuda", **axes})
    assert twin_device(scenario) == inputs_of(scenario).device == device
    assert steps_on_gpu(scenario) is inputs_of(scenario).steps_on_gpu is steps_there


@pytest.fixture
def fresh() -> Iterator[None]:
    yield
    court._reference_against_twin.cache_clear()


def spoilt(truth: Logical, value: Value | None) -> Logical:
    """The truth with one parameter's value replaced, or lacking it."""
    key = next(key for key in truth if key.role == "param" and key.op == 1)
    return {k: v for k, v in truth.items() if k != key} | ({key: value} if value else {})


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_on_a_gpu_the_reference_vouches_for_structure_only(
    device: str, monkeypatch: pytest.MonkeyPatch, fresh: None
) -> None:
    truth = twin.run(inputs_of(BASE))
    key = next(key for key in truth if key.role == "param" and key.op == 1)
    right = truth[key]
    scenario = BASE.with_axes({"device": device})

    def verdict(value: Value | None) -> str:
        court._reference_against_twin.cache_clear()
        monkeypatch.setattr(court, "_twin", lambda inputs, norms: spoilt(truth, value))
        return court._oracles_disagree(court.ResolvedScenario.from_scenario(scenario))

    assert verdict(right) == ""
    other_bits = Value(right.dtype, right.shape, bytes([right.data[0] ^ 1]) + right.data[1:])
    assert bool(verdict(other_bits)) is (device == "cpu")
    assert "twin and reference disagree" in verdict(None)
