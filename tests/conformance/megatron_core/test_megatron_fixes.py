"""Each defect found in Megatron-Core sits where we say: a few lines there, and its regressions pass.

*Verifies*: with the patch of `tests/patches/`, and with those patches beside it that its entry names, every scenario
of a defect passes; without it, with the same ones beside it, it does not. In CI the repairs of the three bugs that
this system was built for, as plugins that the ranks import first.
Two defects cannot be reached on any release, since another one ends their scenarios; those lie beside their patches.
*Does not verify*: that a patch is how upstream should repair it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from harness.laboratory import Laboratory
from harness.result import Result
from harness.scenario import Scenario
from harness.systems.megatron_core import INFO
from harness.verdict import Verdict
from tests.conformance.patched import PATCHES, changed_lines, needs_clone, patched

pytestmark = pytest.mark.real

RELEASE = "0.16.1"
REGRESSIONS = Path(__file__).parents[2] / "scenarios" / "regressions"
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
"""Patch → what it cures; `megatron-core-` before each name left out."""


def regression(name: str) -> Scenario:
    file = next(f for f in (folder / f"megatron-core-{name}.toml" for folder in (REGRESSIONS, PATCHES)) if f.is_file())
    return Scenario.from_toml(file.read_text(), file.name)


def text(result: Result) -> str:
    return result.signature or result.reason or result.verdict.value


def test_every_patch_is_small_and_has_an_entry() -> None:
    assert {path.stem.removeprefix("megatron-core-") for path in PATCHES.glob("megatron-core-*.patch")} == FIXES.keys()
    assert all(changed_lines(f"megatron-core-{name}") <= MOST_LINES for name in FIXES)


@pytest.fixture(scope="module")
def opened() -> Iterator[Laboratory]:
    with Laboratory(jobs=1, deadline_s=60.0) as laboratory:
        yield laboratory


def repaired(names: tuple[str, ...], release: str, folder: Path) -> str:
    return patched(INFO, release, "megatron", [f"megatron-core-{name}" for name in names], folder)


@pytest.mark.nightly
@pytest.mark.parametrize("name", FIXES)
def test_a_few_lines_cure_it(name: str, opened: Laboratory, tmp_path: Path) -> None:
    fix, first = FIXES[name], regression(FIXES[name].regressions[0])
    needs_clone(first)
    release = first.version or RELEASE
    cured = repaired((*fix.beside, name), release, tmp_path / "cured")
    for each in fix.regressions:
        result = opened.examine_one(replace(regression(each), version=cured))
        assert result.verdict is Verdict.PASS, f"{each}: {text(result)}"
    if fix.beside:
        others = repaired(fix.beside, release, tmp_path / "others")
        assert opened.examine_one(replace(first, version=others)).verdict.is_failure


PLUGIN = '''
from dataclasses import replace

from harness.systems.megatron_core import INFO
from harness.systems.megatron_core_rank import MegatronRank, library
from harness.systems.registry import register


class Repaired(MegatronRank):
    """Ranks whose library is repaired as soon as it is there."""

    def __init__(self, context):
        library()
        from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
        repair(DistributedOptimizer)
        super().__init__(context)


register(replace(INFO, entry=f"{__name__}:Repaired"))
'''

KEEP_ORDER = '''
def repair(optimizer):
    """Groups are installed in the order in which their parameters were found."""
    build = optimizer._build_model_and_main_param_groups

    def in_order(cls, gbuf_ranges, param_gbuf_map, ranges, config):
        built = build(gbuf_ranges, param_gbuf_map, ranges, config)
        for group, halves, singles, _, shards, masters in zip(ranges, *built):
            own = {id(param): main for param, main in [*zip(halves, masters), *zip(singles, shards)]}
            group["orig_group"]["params"] = [own[id(param)] for param in group["params"]]
        return built

    optimizer._build_model_and_main_param_groups = classmethod(in_order)
'''

REBUILD_MAP = '''
def repair(optimizer):
    """The map is made again from the order in which the groups were installed."""
    construct = optimizer.__init__

    def and_map(self, *arguments, **options):
        construct(self, *arguments, **options)
        for index, parts in enumerate(zip(self.model_fp32_groups, self.model_float16_groups)):
            for position, param in enumerate([*parts[0], *parts[1]]):
                self.model_param_group_index_map[param] = (index, position)

    optimizer.__init__ = and_map
'''

REFRESH_COPIES = '''
def repair(optimizer):
    """A refresh reaches the masters, and from there every copy that the hybrid optimizer steps."""
    plain = optimizer._copy_model_params_to_main_params

    def everywhere(self, state_dict=None):
        plain(self, state_dict)
        copies = getattr(self.optimizer, "param_to_inner_param", None)
        if copies is None or self.config.use_precision_aware_optimizer:
            return
        pairs = ((self.model_float16_groups, self.shard_fp32_from_float16_groups),
                 (self.model_fp32_groups, self.shard_fp32_groups))
        for model, master in [both for groups in pairs for group in zip(*groups) for both in zip(*group)]:
            span = self._get_model_param_range_map(model)["param"]
            master.data.copy_(model.detach().view(-1)[span.start : span.end])
        for master, copy in copies.items():
            copy.data.copy_(master)

    optimizer._copy_model_params_to_main_params = everywhere
'''

REPAIRS = {
    "keep_order": (KEEP_ORDER, ("2777-swap", "2777")),
    "rebuild_map": (REBUILD_MAP, ("2777-swap", "2777")),
    "refresh_copies": (REFRESH_COPIES, ("3949", "3949-fp16")),
}
"""Plugin → its text, and the regressions that pass with it: the two ways to repair #2777, and pull request 5071."""


@pytest.mark.parametrize("name", REPAIRS)
def test_the_repair_that_an_issue_names(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repair, regressions = REPAIRS[name]
    (tmp_path / f"{name}.py").write_text(PLUGIN + repair)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with Laboratory(jobs=1, deadline_s=60.0, plugins=(name,)) as repaired:
        for each in regressions:
            result = repaired.examine_one(regression(each))
            assert result.verdict is Verdict.PASS, f"{each}: {text(result)}"


KEEP_ZEROS = '''
def repair(_optimizer):
    """FusedAdam, emulated here, stores zeros where an fp8 state is zero."""
    import torch
    from harness.emulation.apex import FusedAdam
    apply = FusedAdam._apply_scale

    def keep(self, name, unscaled, stored, scale):
        apply(self, name, unscaled, stored, scale)
        if stored.dtype is torch.float8_e4m3fn and scale == 0:
            stored.copy_(unscaled)

    FusedAdam._apply_scale = keep
'''


@pytest.mark.nightly
def test_a_guard_in_fused_adam_cures_fp8_zeros(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The defect is TransformerEngine's, so that no patch of Megatron-Core can be its repair."""
    (tmp_path / "keep_zeros.py").write_text(PLUGIN + KEEP_ZEROS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with Laboratory(jobs=1, deadline_s=60.0, plugins=("keep_zeros",)) as repaired:
        result = repaired.examine_one(regression("fp8-zeros"))
        assert result.verdict is Verdict.PASS, text(result)


@pytest.mark.parametrize("axes", [{"offload": "none"}, {"offload": "cpu=0.5", "options": "precision_aware"}], ids=str)
def test_a_refresh_is_right_without_offload_and_with_masters_in_the_optimizer(
    axes: dict[str, str], opened: Laboratory
) -> None:
    """Where 3949 does not occur, unpatched: pull request 5071 says so of the precision-aware optimizer."""
    result = opened.examine_one(regression("3949").with_axes(axes))
    assert result.verdict is Verdict.PASS, text(result)
