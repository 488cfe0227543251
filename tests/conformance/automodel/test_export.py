"""Scripts of Automodel's failures as texts: which calls they make, and what is refused. No library runs."""

from __future__ import annotations

import pytest
from shardproof.diff import Difference
from shardproof.export.case import NoExportError
from shardproof.export.job import written
from shardproof.observe.logical import Key
from shardproof.program import expand
from shardproof.result import FailedOp, Result
from shardproof.scenario import Scenario
from shardproof.verdict import Verdict

LOADED = Scenario(system="automodel", program="build step", checkpoint="safetensors", model="hf_delta").with_axes(
    {"mesh": "1x2x1", "dtype": "fp32/param=bf16", "reshard_after_forward": "none", "options": "file_bf16"}
)
ISLAND = "model.layers.0.linear_attn._fp32_params.A_log"


def script_of(scenario: Scenario, op: int, fqn: str, role: str, kind: str = "dtype", version: str = "0.4.0") -> str:
    difference = Difference(Key(op, "live", role, fqn), kind, (0,), 1, 4, detail="dtype bf16 instead of fp32")
    failed = FailedOp(op, expand(scenario)[op].kind)
    made = Result(scenario, "automodel", version, Verdict.MISMATCH, differences=(difference,), failed_op=failed)
    script = written(made, None).script
    compile(script, "repro.py", "exec")
    return script


def test_the_dtype_that_was_asked_for_is_compared() -> None:
    script = script_of(LOADED, 0, "lm_head.weight", "param")
    assert "expected = torch.float32" in script
    assert 'observed = model.get_parameter("lm_head.weight").dtype' in script


def test_the_dtype_that_a_forward_sees_is_recorded_there() -> None:
    script = script_of(LOADED, 1, ISLAND, "compute_param")
    assert "self.seen = {name: p.dtype" in script
    assert 'model.get_submodule("model.layers.0.linear_attn._fp32_params").seen["A_log"]' in script


def test_a_llama_without_a_forward_is_that_of_transformers() -> None:
    script = script_of(LOADED.with_axes({"model": "hf_llama"}), 0, "lm_head.weight", "param")
    assert "LlamaForCausalLM(config)" in script
    assert "force_hf=True" in script
    assert "class TinyForCausalLM" not in script


@pytest.mark.parametrize(
    ("version", "call"),
    [("0.4.0", "create_device_mesh(config, dp_size=2"), ("0.7.0", "DistributedSetup.build(config, ParallelismSizes(")],
)
def test_the_calls_are_those_of_the_release(version: str, call: str) -> None:
    assert call in script_of(LOADED, 0, "lm_head.weight", "param", version=version)


@pytest.mark.parametrize(
    ("axes", "op", "kind", "reason"),
    [
        ({"mesh": "1x1x2"}, 0, "dtype", "tensor parallelism"),
        ({"model": "qwen3_5"}, 0, "dtype", "the real models"),
        ({}, 1, "bits", "comparisons of steps"),
    ],
)
def test_what_a_script_cannot_do_is_refused(axes: dict[str, str], op: int, kind: str, reason: str) -> None:
    with pytest.raises(NoExportError, match=f"scripts for Automodel do not do {reason}"):
        script_of(LOADED.with_axes(axes), op, "lm_head.weight", "param", kind)
