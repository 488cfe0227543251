"""Real FSDP2 and DCP on real gloo ranks against the twin, bit for bit. What it refuses, the conformance kit asks
it (`test_kit.py`)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from shardproof.laboratory.laboratory import Laboratory
from shardproof.observe.record import pack, unpack
from shardproof.scenario import Scenario
from shardproof.systems.torch_fsdp2 import SYSTEM

from tests.conformance.sessions import (
    LENGTH,
    assert_equals_the_twin,
    assert_observing_changes_nothing,
    blobs,
    judged,
    observed,
    run,
)

pytestmark = pytest.mark.real

BASE = Scenario(system="torch-fsdp2")


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
def test_state_equals_the_twin_bit_for_bit(laboratory: Laboratory, tmp_path: Path, axes: dict[str, str]) -> None:
    scenario = BASE.with_axes(axes)
    assert SYSTEM.refusal(scenario) is None
    assert_equals_the_twin(laboratory, scenario, tmp_path)


def test_a_build_forgets_the_step_that_was_begun_before_it(laboratory: Laboratory, tmp_path: Path) -> None:
    scenario = BASE.with_axes({"mesh": "1x2x1", "microbatches": "2", "program": "build step accumulate build step"})
    assert_equals_the_twin(laboratory, scenario, tmp_path)


def test_one_changed_bit_is_a_difference(laboratory: Laboratory, tmp_path: Path) -> None:
    scenario = BASE.with_axes({"mesh": "1x2x1", "program": "build step"})
    outcomes = run(laboratory, scenario, tmp_path)
    file = observed(outcomes)[1]
    build, step = (list(unpack(blob)) for blob in blobs(file))
    at = next(i for i, r in enumerate(step) if r.role == "exp_avg_sq" and r.data)
    step[at] = step[at]._replace(data=bytes([step[at].data[0] ^ 1]) + step[at].data[1:])
    file.write_bytes(b"".join(LENGTH.pack(len(b)) + b for b in (pack(build), pack(step))))
    (difference,) = judged(laboratory, scenario, tmp_path, outcomes)["differences"]
    assert "exp_avg_sq" in json.dumps(difference)


def test_a_learning_rate_that_becomes_a_tensor_is_a_difference(laboratory: Laboratory, tmp_path: Path) -> None:
    scenario = BASE.with_axes({"mesh": "1x2x1", "program": "build step"})
    outcomes = run(laboratory, scenario, tmp_path)
    for file in observed(outcomes):
        build, step = (list(unpack(blob)) for blob in blobs(file))
        at = next(i for i, r in enumerate(step) if (r.role, r.fqn) == ("setting", "group0.lr"))
        text = b"tensor float32 ()"
        step[at] = step[at]._replace(shape=(len(text),), size=(len(text),), data=text)
        file.write_bytes(b"".join(LENGTH.pack(len(b)) + b for b in (pack(build), pack(step))))
    (difference,) = judged(laboratory, scenario, tmp_path, outcomes)["differences"]
    assert "'float'" in json.dumps(difference)
    assert "tensor float32 ()" in json.dumps(difference)


def test_observing_changes_nothing(laboratory: Laboratory, tmp_path: Path) -> None:
    """With everything in play that has state of its own: schedule, scaler, clipping, a load in the same ranks."""
    axes = {"mesh": "1x2x1", "model": "frozen_tower", "optimizer": "adamw/schedule=halve/loss_scale=64.0/clip=1.0"}
    scenario = BASE.with_axes({**axes, "program": "build step save step load step"})
    assert_observing_changes_nothing(laboratory, scenario, tmp_path)
