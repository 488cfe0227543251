"""Defects of a library that make a Megatron-Core rank hold something unheard of are differences, never `unknown`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from harness.laboratory import Laboratory
from harness.scenario import Mesh, Scenario
from harness.verdict import Verdict

pytestmark = pytest.mark.real

REBINDS, LOSES, OFFLOADS_NOTHING, FORGETS = 101, 102, 103, 104  # as in the plugin, which the parent does not import
BASE = Scenario(system="megatron-core", sharding="zero1", checkpoint="dp_zero", mesh=Mesh(1, 2, 1)).with_axes(
    {
        "dtype": "bf16/reduce=fp32/master=fp32",
        "optimizer": "adamw/impl=multi_tensor",
        "program": "build step save step load",
    }
)
OFFLOADED = {"offload": "cpu", "optimizer": "adamw/impl=forloop", "program": "train"}


@pytest.fixture(scope="module")
def lab() -> Iterator[Laboratory]:
    with Laboratory(jobs=1, deadline_s=100.0, plugins=("tests.conformance.megatron_defects",)) as running:
        yield running


@pytest.mark.parametrize(
    ("seed", "axes", "found"),
    [
        (0, {}, set()),
        (REBINDS, {}, {("size", "master"), ("size", "exp_avg"), ("size", "exp_avg_sq")}),
        (LOSES, {"program": "build step"}, {("extra", "param"), ("gap", "master")}),
        (0, OFFLOADED, set()),
        (OFFLOADS_NOTHING, OFFLOADED, {("bits", "host")}),
        (FORGETS, {"mesh": "2x1x1"}, {("gap", "step")}),
    ],
    ids=["sound", "rebinds", "loses", "sound-offload", "offloads-nothing", "forgets"],
)
def test_a_defect_is_a_difference(
    lab: Laboratory, seed: int, axes: dict[str, str], found: set[tuple[str, str]]
) -> None:
    result = lab.examine_one(BASE.with_axes({"seed": str(seed), **axes}))
    assert result.verdict is (Verdict.MISMATCH if found else Verdict.PASS), result
    assert found <= {(d.kind, d.key.role) for d in result.differences}
