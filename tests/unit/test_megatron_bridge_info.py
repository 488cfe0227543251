"""Megatron-Bridge as the parent sees it: limits, packages, rules of its oracle, and what its save must write."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from harness.errors import UsageError
from harness.judge import judge
from harness.models import model_spec
from harness.observe.record import LIVE, WRITTEN
from harness.oracle import twin
from harness.oracle.contracts import rules
from harness.program import expand
from harness.readers import must_be_written
from harness.reference import system as reference
from harness.releases import package, parse
from harness.scenario import Scenario
from harness.space.constraints import tabulate
from harness.systems import megatron_bridge, megatron_core

BASE = Scenario(system="megatron-bridge", sharding="zero1", checkpoint="weights", program="model_only").with_axes(
    {"dtype": "bf16/master=fp32", "optimizer": "adamw/impl=multi_tensor", "mesh": "1x2x1"}
)
REGRESSIONS = Path(__file__).parents[2] / "scenarios" / "regressions"


@pytest.mark.parametrize("file", sorted(REGRESSIONS.glob("megatron-bridge-*.toml")), ids=lambda f: f.stem)
def test_regressions_are_supported(file: Path) -> None:
    assert megatron_bridge.unsupported(Scenario.from_toml(file.read_text(), file.name)) is None


@pytest.mark.parametrize(
    ("axes", "reason"),
    [
        ({"checkpoint": "dp_zero"}, "a checkpoint of the weights: weights, weights"),
        ({"program": "resume"}, "where it finetunes"),
        ({"model": "moe", "expert_parallel": "2"}, "expert parallelism"),
        ({"offload": "cpu", "optimizer": "adam/impl=multi_tensor"}, "AdamW only"),
        ({"sharding": "fully_shard"}, "zero1"),
        ({"dtype": "bf16"}, "master=fp32"),
        ({"optimizer": "adamw"}, "impl=multi_tensor"),
    ],
)
def test_refuses_with_a_reason(axes: dict[str, str], reason: str) -> None:
    assert reason in str(megatron_bridge.unsupported(BASE.with_axes(axes)))


@pytest.mark.parametrize("version", ["", "0.3.0", "0.3.1"])
def test_its_version_is_not_taken_for_megatron_cores(version: str) -> None:
    asked = BASE.with_axes({"version": version, "optimizer": "adam/impl=multi_tensor", "model": "groups"})
    assert megatron_bridge.unsupported(asked) is None


def test_limits_are_cores_but_for_formats_and_releases() -> None:
    ours = {limit.id for limit in megatron_bridge.LIMITS}
    assert {"checkpoint", "resume", "tp-divides", "precision-aware-without-te"} <= ours
    assert "l2-before-015" not in ours
    assert megatron_core.INFO.variant is megatron_bridge.INFO.variant


def test_every_limit_can_be_tabulated() -> None:
    axes = {"checkpoint": ["weights", "dp_zero"], "program": ["model_only", "resume"], "offload": ["none", "cpu"]}
    values = {axis: [getattr(BASE.with_axes({axis: text}), axis) for text in texts] for axis, texts in axes.items()}
    for limit in megatron_bridge.LIMITS[:4]:
        tabulate(limit.id, limit.reason, limit.refuses, BASE, values)


def test_the_release_of_core_beside_it_is_pinned() -> None:
    declared = package("megatron-bridge")
    assert [release.version for release in declared.releases] == ["0.3.0", "0.3.1"]
    assert all("megatron-core==0.16.1" in release.beside for release in declared.releases)
    assert declared.importer == "harness.systems.megatron_bridge_rank:library"
    assert all("==" in requirement for release in declared.releases for requirement in release.beside)


def test_an_importer_is_optional() -> None:
    text = 'schema = 1\n[lib]\nimports = "lib"\ntree = "lib"\n[[lib.release]]\nversion = "1.0"\n'
    assert parse(text, "tests")["lib"].importer == ""
    with pytest.raises(UsageError, match="importer"):
        parse(text.replace("tree", "importers"), "tests")


def test_its_load_refreshes_masters() -> None:
    """In twin and reference alike; Megatron-Core's waits for reload_params."""
    core = rules("megatron-core")
    assert rules("megatron-bridge").load_refreshes
    assert not core.load_refreshes
    load = next(op for op in expand(BASE) if op.kind == "load_model_only")
    for system, fresh in (("megatron-bridge", True), ("megatron-core", False)):
        found = {(key.role, key.fqn): value for key, value in twin.run(_of(system)).items() if key.op == load.index}
        master = found["master", "down.weight"]
        assert (_upper_half(master.data) == found["param", "down.weight"].data) is fresh
        found_of_reference = judge(_of(system), reference.run(_of(system).with_axes({"checkpoint": "sharded"})))
        assert [d for d in found_of_reference.differences if d.key.where == LIVE] == []


def test_its_checkpoint_holds_weights_buffers_and_iteration_only() -> None:
    scenario = BASE.with_axes({"model": "mixed_unit"})
    save = next(op for op in expand(scenario) if op.kind == "save")
    live = {key: value for key, value in twin.run(scenario).items() if key.op == save.index}
    written = must_be_written(live, save, scenario)
    assert {key.role for key in written} <= {"param", "buffer", "iteration"}
    assert {key.fqn for key in written if key.role == "param"} == {p.fqn for p in model_spec("mixed_unit").params}
    assert {key.where for key in written} == {WRITTEN} != {LIVE}


def test_the_names_of_transformer_engine_are_gone_afterwards() -> None:
    from harness.emulation import te_names

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
