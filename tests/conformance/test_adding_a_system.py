"""The worked example of docs/adding-a-system.md: a system in a small package, below the size it is said to have, whose
scenarios pass, and which shows a defect that is planted in it.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from harness.laboratory import Laboratory
from harness.scenario import Scenario
from harness.verdict import Verdict
from tests.conformance import torch_zero
from tests.conformance.torch_zero import SYSTEM
from tests.conformance.torch_zero.forgetful import FORGETFUL

pytestmark = pytest.mark.real

BASE = Scenario(system=SYSTEM.name, sharding="zero1", checkpoint="full").with_axes({"mesh": "1x2x1"})
MOST_LINES = 300


@pytest.mark.parametrize(
    "axes",
    [
        {},
        {"model": "groups", "mesh": "1x3x1", "optimizer": "adamw/clip=1.0", "load": "shrink"},
        {"model": "tied", "optimizer": "sgd/momentum=0.9", "program": "rollback", "dtype": "bf16"},
        {"model": "frozen_tower", "program": "overflow", "optimizer": "adamw/loss_scale=1024.0", "microbatches": "2"},
    ],
)
def test_it_passes(laboratory: Laboratory, axes: dict[str, str]) -> None:
    result = laboratory.examine_one(BASE.with_axes(axes))
    assert result.verdict is Verdict.PASS, (result.signature, result.reason, result.error)


def test_a_load_that_forgets_the_optimizer_is_seen(laboratory: Laboratory) -> None:
    result = laboratory.examine_one(replace(BASE, system=FORGETFUL.name))
    assert result.verdict is Verdict.MISMATCH, (result.signature, result.reason, result.error)


def test_it_is_of_the_size_that_the_page_says() -> None:
    files = [path for path in Path(torch_zero.__file__).parent.glob("*.py") if "forgetful" not in path.name]
    assert {path.stem for path in files} == {"__init__", "accepts", "contract", "stored", "rank"}
    assert sum(len(path.read_text().splitlines()) for path in files) < MOST_LINES
    default = Scenario(system=SYSTEM.name)
    assert {limit.id for limit in SYSTEM.accepts.limits if limit.refuses(default)} == {"sharding", "checkpoint"}
    assert SYSTEM.refusal(BASE) is None
