"""The worked example of docs/adding-a-system.md: a system in one module, below the size it is said to have, whose
scenarios pass, and which shows a defect that is planted in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from harness.laboratory import Laboratory
from harness.scenario import Scenario
from harness.verdict import Verdict
from tests.conformance import torch_zero, torch_zero_forgetful
from tests.conformance.torch_zero import INFO, LIMITS, unsupported

pytestmark = pytest.mark.real

BASE = Scenario(system=INFO.name, sharding="zero1", checkpoint="full").with_axes({"mesh": "1x2x1"})
MOST_LINES = 300


@pytest.fixture(scope="module")
def opened() -> Iterator[Laboratory]:
    with Laboratory(
        jobs=1, deadline_s=60.0, plugins=(torch_zero.__name__, torch_zero_forgetful.__name__)
    ) as laboratory:
        yield laboratory


@pytest.mark.parametrize(
    "axes",
    [
        {},
        {"model": "groups", "mesh": "1x3x1", "optimizer": "adamw/clip=1.0", "load": "shrink"},
        {"model": "tied", "optimizer": "sgd/momentum=0.9", "program": "rollback", "dtype": "bf16"},
        {"model": "frozen_tower", "program": "overflow", "optimizer": "adamw/loss_scale=1024.0", "microbatches": "2"},
    ],
)
def test_it_passes(opened: Laboratory, axes: dict[str, str]) -> None:
    result = opened.examine_one(BASE.with_axes(axes))
    assert result.verdict is Verdict.PASS, (result.signature, result.reason, result.error)


def test_a_load_that_forgets_the_optimizer_is_seen(opened: Laboratory) -> None:
    result = opened.examine_one(replace(BASE, system=torch_zero_forgetful.FORGETFUL.name))
    assert result.verdict is Verdict.MISMATCH, (result.signature, result.reason, result.error)


def test_it_is_one_module_of_the_size_that_the_page_says() -> None:
    assert len(Path(torch_zero.__file__).read_text().splitlines()) < MOST_LINES
    assert {limit.id for limit in LIMITS if limit.refuses(Scenario(system=INFO.name))} == {"sharding", "checkpoint"}
    assert unsupported(BASE) is None
