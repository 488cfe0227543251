"""Megatron-Bridge as the parent sees it: limits, packages, rules of its oracle, and what its save must write."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from shardproof.issues.findings import section_of
from shardproof.laboratory.judge import ResolvedScenario, judge
from shardproof.models import model_spec
from shardproof.observe.record import LIVE, WRITTEN
from shardproof.program import expand
from shardproof.protocol.releases import package_of
from shardproof.scenario import Scenario
from shardproof.space.constraints import tabulate
from shardproof.systems import megatron_core
from shardproof.systems.megatron_bridge import SYSTEM

from tests.oracles import by_twin, records_of

BASE = Scenario(system="megatron-bridge", sharding="zero1", checkpoint="weights", program="model_only").with_axes(
    {"dtype": "bf16/master=fp32", "optimizer": "adamw/impl=multi_tensor", "mesh": "1x2x1"}
)
REGRESSIONS = sorted(Path(str(SYSTEM.folder), "regressions").glob("*.toml"))


def test_every_regression_is_one_of_an_entry() -> None:
    shown = {name for finding in section_of(SYSTEM).findings for name in finding.regressions}
    assert shown
    assert {file.stem for file in REGRESSIONS} == shown


@pytest.mark.parametrize("file", REGRESSIONS, ids=lambda f: f.stem)
def test_regressions_are_supported(file: Path) -> None:
    assert SYSTEM.refusal(Scenario.from_toml(file.read_text(), file.name)) is None


@pytest.mark.parametrize(
    ("axes", "reason"),
    [
        ({"checkpoint": "dp_zero"}, "has these values of checkpoint: weights[+fully_parallel]"),
        ({"program": "resume"}, "where it finetunes"),
        ({"model": "moe", "expert_parallel": "2"}, "expert parallelism"),
        ({"model": "gated"}, "weights whose sections are stacked"),
        ({"offload": "cpu", "optimizer": "adam/impl=multi_tensor"}, "AdamW only"),
        ({"options": "fsdp_optim"}, "has these values of options"),
        ({"sharding": "fully_shard"}, "zero1"),
        ({"dtype": "bf16"}, "master=fp32"),
        ({"optimizer": "adamw"}, "has these values of optimizer impl: multi_tensor, forloop"),
    ],
)
def test_refuses_with_a_reason(axes: dict[str, str], reason: str) -> None:
    assert reason in str(SYSTEM.refusal(BASE.with_axes(axes)))


@pytest.mark.parametrize("version", ["", "0.3.0", "0.3.1"])
def test_its_version_is_not_taken_for_megatron_cores(version: str) -> None:
    asked = BASE.with_axes({"version": version, "optimizer": "adam/impl=multi_tensor", "model": "groups"})
    assert SYSTEM.refusal(asked) is None


def test_limits_are_cores_but_for_formats_and_releases() -> None:
    ours = {limit.id for limit in SYSTEM.accepts.limits}
    cores = {limit.id for limit in megatron_core.SYSTEM.accepts.limits}
    assert {"checkpoint", "program", "tp-divides", "precision-aware-without-te"} <= ours
    by_release = {"l2-before-015", "groups-before-016"}
    assert by_release <= cores
    assert not by_release & ours
    driven_there = {"local-state", "generators-fsdp", "generators-device"}
    driven_there |= {"precision-aware-offloaded", "remainders-of-masters", "other-buckets", "other-buckets-gathered"}
    assert {name for name in cores - ours if not name.startswith(("checkpoint-", "fsdp-"))} == by_release | driven_there
    assert ours - cores == {"expert_parallel"}


@pytest.mark.parametrize(
    "axes", [{}, {"optimizer": "adamw/impl=forloop"}, {"options": "precision_aware"}, {"optimizer": "adamw"}], ids=str
)
def test_its_ranks_need_the_environment_that_cores_do(axes: dict[str, str]) -> None:
    asked = BASE.with_axes(axes)
    assert SYSTEM.variant(asked) == megatron_core.SYSTEM.variant(asked)


def test_every_limit_can_be_tabulated() -> None:
    axes = {"checkpoint": ["weights", "dp_zero"], "program": ["model_only", "resume"], "offload": ["none", "cpu"]}
    values = {axis: [getattr(BASE.with_axes({axis: text}), axis) for text in texts] for axis, texts in axes.items()}
    assert len(SYSTEM.accepts.limits) > len(axes)
    for limit in SYSTEM.accepts.limits:
        table = tabulate(limit.id, limit.reason, limit.refuses, BASE, values)
        for places in product(*(range(len(each)) for each in values.values())):
            at = dict(zip(values, places, strict=True))
            scenario = replace(BASE, **{axis: values[axis][place] for axis, place in at.items()})
            refused = table is not None and not table.allowed[tuple(at[axis] for axis in table.axes)]
            assert refused == bool(limit.refuses(scenario)), f"{limit.id}: {scenario}"


def test_the_release_of_core_beside_it_is_pinned() -> None:
    declared = package_of(SYSTEM)
    assert [release.version for release in declared.releases] == ["0.3.0", "0.3.1"]
    assert all("megatron-core==0.16.1" in release.beside for release in declared.releases)
    assert declared.importer == "shardproof.systems.megatron_bridge.rank:library"
    assert all("==" in requirement for release in declared.releases for requirement in release.beside)


def test_its_load_refreshes_masters() -> None:
    """In twin and reference alike; Megatron-Core's waits for reload_params."""
    assert SYSTEM.contract.load_refreshes
    assert not megatron_core.SYSTEM.contract.load_refreshes
    load = next(op for op in expand(BASE) if op.kind == "load_model_only")
    for system, fresh in (("megatron-bridge", True), ("megatron-core", False)):
        asked = _of(system)
        found = {(key.role, key.fqn): value for key, value in by_twin(asked).items() if key.op == load.index}
        master = found["master", "down.weight"]
        assert (_upper_half(master.data) == found["param", "down.weight"].data) is fresh
        found_of_reference = judge(ResolvedScenario.from_scenario(asked), records_of(asked))
        assert [d for d in found_of_reference.differences if d.key.where == LIVE] == []


def test_its_checkpoint_holds_weights_buffers_and_iteration_only() -> None:
    scenario = BASE.with_axes({"model": "mixed_unit"})
    save = next(op for op in expand(scenario) if op.kind == "save")
    live = {key: value for key, value in by_twin(scenario).items() if key.op == save.index}
    written = SYSTEM.stored.must_hold(live, save, scenario)
    assert {key.role for key in written} <= {"param", "buffer", "iteration"}
    assert {key.fqn for key in written if key.role == "param"} == {p.fqn for p in model_spec("mixed_unit").params}
    assert {key.where for key in written} == {WRITTEN} != {LIVE}


def test_what_the_parent_asks_of_the_system_imports_neither_torch_nor_the_library() -> None:
    code = (
        "import sys; from shardproof.systems.megatron_bridge import SYSTEM as s; s.accepts, s.contract, s.stored;"
        "s.models; print({'torch', 'megatron'} & set(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


def test_the_names_of_transformer_engine_are_gone_afterwards() -> None:
    from shardproof.emulation import te_names

    with te_names.importable("2.10.0"):
        import transformer_engine.pytorch as te  # type: ignore[import-not-found]

        assert issubclass(te.LayerNormLinear, te_names.Absent)
        with pytest.raises(RuntimeError, match="only its name is"):
            te.Linear(1, 1)
        with pytest.raises(RuntimeError, match="loaded already"), te_names.importable("2.10.0"):
            pass
    assert not [name for name in sys.modules if name.startswith("transformer_engine")]


def _of(system: str) -> Scenario:
    return BASE.with_axes({"system": system})


def _upper_half(fp32: bytes) -> bytes:
    """The bf16 bits of fp32 values that are exactly bf16 values."""
    return b"".join(fp32[at + 2 : at + 4] for at in range(0, len(fp32), 4))
