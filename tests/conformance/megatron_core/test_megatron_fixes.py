"""The repairs that upstream's issues name, as systems whose ranks repair the library first (`repairs.py`).

*Verifies*: the two ways to repair #2777, and pull request 5071, on the regressions of the three bugs that this system
was built for. That each defect sits where its cure says is tests/conformance/test_cures.py's. *Does not verify*: that a
repair is how upstream should do it.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from shardproof.laboratory.laboratory import Laboratory
from shardproof.systems.megatron_core import SYSTEM

from tests.conformance.megatron_core import RELEASE
from tests.conformance.megatron_core.repairs import REPAIRED
from tests.conformance.regression_scenarios import regression
from tests.conformance.sessions import assert_equals_the_twin

pytestmark = pytest.mark.real

REPAIRS = {
    "keep-order": ("2777-swap", "2777"),
    "rebuild-map": ("2777-swap", "2777"),
    "refresh-copies": ("3949", "3949-fp16"),
}
"""Repair → the regressions that pass with it: the two ways to repair #2777, and pull request 5071."""


@pytest.mark.parametrize(("repair", "name"), [(repair, name) for repair, names in REPAIRS.items() for name in names])
def test_the_repair_that_an_issue_names(repair: str, name: str, laboratory: Laboratory, tmp_path: Path) -> None:
    scenario = replace(regression(SYSTEM, name), system=REPAIRED[repair].name, version=RELEASE)
    assert_equals_the_twin(laboratory, scenario, tmp_path)


@pytest.mark.nightly
def test_a_guard_in_fused_adam_cures_fp8_zeros(laboratory: Laboratory, tmp_path: Path) -> None:
    """The defect is TransformerEngine's, so that no patch of Megatron-Core can be its repair."""
    scenario = replace(regression(SYSTEM, "fp8-zeros"), system=REPAIRED["keep-zeros"].name, version=RELEASE)
    assert_equals_the_twin(laboratory, scenario, tmp_path)


@pytest.mark.parametrize("axes", [{"offload": "none"}, {"offload": "cpu=0.5", "options": "precision_aware"}], ids=str)
def test_a_refresh_is_right_without_offload_and_with_masters_in_the_optimizer(
    axes: dict[str, str], laboratory: Laboratory, tmp_path: Path
) -> None:
    """Where 3949 does not occur, unpatched: pull request 5071 says so of the precision-aware optimizer."""
    scenario = replace(regression(SYSTEM, "3949"), version=RELEASE).with_axes(axes)
    assert SYSTEM.refusal(scenario) is None
    assert_equals_the_twin(laboratory, scenario, tmp_path)
