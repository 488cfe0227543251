"""Each defect found in Megatron-Core sits where we say: a few lines there, and its regressions pass.

*Verifies*: with the patch of `patches/`, and with those patches beside it that its entry names, every scenario
of a defect passes; without it, with the same ones beside it, it does not. In CI the repairs of the three bugs that
this system was built for, as systems whose ranks repair the library first (`repairs.py`).
Two defects cannot be reached on any release, since another one ends their scenarios; those lie beside their patches.
*Does not verify*: that a patch is how upstream should repair it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from harness.laboratory import Laboratory
from harness.result import Result
from harness.systems.megatron_core import SYSTEM
from harness.verdict import Verdict
from tests.conformance.megatron_core import RELEASE
from tests.conformance.megatron_core.repairs import REPAIRED
from tests.conformance.patched import changed_lines, needs_clone, patched, patches_of, regression
from tests.conformance.sessions import assert_equals_the_twin

pytestmark = pytest.mark.real

MOST_LINES = 26
"""A patch adds and removes no more lines than that."""


@dataclass(frozen=True)
class Fix:
    """regressions: what the patch turns green. beside: patches of other defects that would hide this one, or that the
    same scenario meets as well."""

    regressions: tuple[str, ...]
    beside: tuple[str, ...] = ()


FIXES: Mapping[str, Fix] = {
    "1268": Fix(("1268", "1268-fully-reshardable")),
    "1268-sharded": Fix(("1268-sharded",)),
    "1553": Fix(("1553",)),
    "2576": Fix(("2576",)),
    "2777": Fix(
        ("2777", "2777-swap", "2777-fp16", "2777-gather-scatter", "2777-dp-reshardable", "2777-fully-reshardable",
         "2777-fully-reshardable-swap")
    ),
    "3949": Fix(("3949", "3949-full", "3949-fp16", "3949-fp16-half", "3949-late")),
    "4046": Fix(("4046",)),
    "4423": Fix(("4423",), beside=("4423-silent",)),
    "4423-gdn": Fix(("4423-gdn", "4423-gdn-tp", "4423-gdn-four")),
    "4423-silent": Fix(("4423-silent", "4423-odd"), beside=("4423",)),
    "4910": Fix(("4910",)),
    "4705": Fix(("4705",)),
    "4705-replicate": Fix(("4705-replicate",)),
    "5077": Fix(("5077", "5077-many")),
    "5835-load": Fix(("5835-load",)),
    "5929": Fix(("5929",), beside=("plain-load-step", "7449")),
    "5929-replicate": Fix(("5929-replicate", "5929-replicate-shapes")),
    "6191": Fix(("6191", "6191-interior")),
    "6212": Fix(("6212", "5835-load")),
    "7449": Fix(("7449", "7449-device")),
    "7449-step": Fix(("7449-step",)),
    "7468": Fix(("7468",)),
    "chained-scaler": Fix(("chained-scaler",)),
    "device-fp32-islands": Fix(("device-fp32-islands",), beside=("6212",)),
    "dp-reshardable-step": Fix(("dp-reshardable-step",)),
    "dummy-step": Fix(("dummy-step",), beside=("7449",)),
    "empty-group-step": Fix(("empty-group-step",)),
    "fsdp-empty-shard-state": Fix(("fsdp-empty-shard-state",)),
    "fsdp-fp32-load": Fix(("fsdp-fp32-load",)),
    "fsdp-fp32-swiglu": Fix(("fsdp-fp32-swiglu",)),
    "fsdp-frozen": Fix(("fsdp-frozen",)),
    "fsdp-hybrid-no-overlap": Fix(("fsdp-hybrid-no-overlap", "fsdp-hybrid-no-overlap-optim")),
    "fsdp-load-after-step": Fix(("fsdp-load-after-step",)),
    "fsdp-one-rank": Fix(("fsdp-one-rank", "fsdp-one-rank-overlap")),
    "fsdp-plain-state": Fix(("fsdp-plain-state",)),
    "fsdp-ragged-unit": Fix(("fsdp-ragged-unit",)),
    "fsdp-tp-without-te": Fix(("fsdp-tp-without-te",)),
    "gather-scatter-instances": Fix(("gather-scatter-instances",)),
    "no-initialization": Fix(("no-initialization",)),
    "plain-load-step": Fix(("plain-load-step",), beside=("shared-step",)),
    "plain-no-state": Fix(("plain-no-state",), beside=("plain-load-step", "shared-step")),
    "precision-aware-clip": Fix(("precision-aware-clip",)),
    "precision-aware-fp32-master": Fix(("precision-aware-fp32-master",)),
    "precision-aware-load": Fix(("precision-aware-load",)),
    "precision-aware-save-first": Fix(("precision-aware-save-first",), beside=("2576",)),
    "reload-fp32-islands": Fix(("reload-fp32-islands",), beside=("6212",)),
    "reload-fp32-offload": Fix(("reload-fp32-offload",)),
    "reload-precision-aware": Fix(("reload-precision-aware",)),
    "scheduler-rollback": Fix(("scheduler-rollback",)),
    "sgd-sharded": Fix(("sgd-sharded",)),
    "shared-step": Fix(("shared-step",), beside=("plain-load-step", "dp-reshardable-step")),
    "torch-offload-ignored": Fix(("torch-offload-ignored",)),
}  # fmt: skip
"""Patch → what it cures."""


def text(result: Result) -> str:
    return result.signature or result.reason or result.verdict.value


def test_every_patch_is_small_and_has_an_entry() -> None:
    assert set(patches_of(SYSTEM)) == FIXES.keys()
    assert all(changed_lines(SYSTEM, name) <= MOST_LINES for name in FIXES)


@pytest.mark.nightly
@pytest.mark.parametrize("name", FIXES)
def test_a_few_lines_cure_it(name: str, laboratory: Laboratory, tmp_path: Path) -> None:
    fix, first = FIXES[name], regression(SYSTEM, FIXES[name].regressions[0])
    needs_clone(first)
    release = first.version or RELEASE
    cured = patched(SYSTEM, release, (*fix.beside, name), tmp_path / "cured")
    for each in fix.regressions:
        result = laboratory.examine_one(replace(regression(SYSTEM, each), version=cured))
        assert result.verdict is Verdict.PASS, f"{each}: {text(result)}"
    if fix.beside:
        others = patched(SYSTEM, release, fix.beside, tmp_path / "others")
        assert laboratory.examine_one(replace(first, version=others)).verdict.is_failure


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
