"""Scripts of DeepSpeed's failures as texts: which calls they make, and what is refused. No library runs."""

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

STEPS = Scenario(system="deepspeed", program="build step step", checkpoint="zero", sharding="zero2").with_axes(
    {"mesh": "1x2x1", "dtype": "bf16"}
)


def script_of(scenario: Scenario, op: int, fqn: str = "up.weight", role: str = "param", where: str = "live") -> str:
    difference = Difference(Key(op, where, role, fqn), "bits", (0,), 1, 4)
    kind = expand(scenario)[op].kind
    failed = FailedOp(op, kind)
    made = Result(scenario, "deepspeed", "0.19.8", Verdict.MISMATCH, differences=(difference,), failed_op=failed)
    script = written(made, None).script
    compile(script, "repro.py", "exec")
    return script


def test_the_default_clipping_is_turned_off() -> None:
    assert '"gradient_clipping": 0.0' in script_of(STEPS, 1)


def test_the_accelerator_is_chosen_before_the_library_is_imported() -> None:
    script = script_of(STEPS, 1)
    assert script.index("import torch\n") < script.index('DS_ACCELERATOR="cpu"') < script.index("import deepspeed")


def test_blocks_rest_as_the_model_says() -> None:
    script = script_of(STEPS.with_axes({"model": "resting", "microbatches": "2"}), 2, "odd.weight")
    assert 'return {"odd": batch // 2 % 2 == 0, "late": batch % 2 > 0}.get(path, True)' in script
    assert "if is_used(path, inputs[1]):" in script


def test_a_load_of_the_module_leaves_the_optimizer_as_it_was() -> None:
    asked = STEPS.with_axes({"program": "build step save build load_model_only", "checkpoint": "universal"})
    lines = [line.strip() for line in script_of(asked, 4, role="exp_avg").splitlines()]
    loaded = lines.index('model.load_checkpoint(CHECKPOINT, tag="universal", load_module_only=True)')
    assert lines[loaded - 1] == "expected = read(model, optimizer)"


def test_a_universal_checkpoint_is_compared_with_plain_steps() -> None:
    asked = STEPS.with_axes({"program": "build step save", "checkpoint": "universal"})
    script = script_of(asked, 2, role="exp_avg", where="written")
    assert "expected = plain(1)" in script
    assert "safe_get_full" not in script


@pytest.mark.parametrize(
    ("axes", "reason"),
    [
        ({"optimizer": "adamw/clip=1.5"}, "gradient clipping"),
        ({"optimizer": "adamw/schedule=halve"}, "a learning-rate schedule"),
        ({"model": "tied"}, "tied parameters"),
        ({"model": "groups"}, "param groups of their own"),
    ],
)
def test_what_a_script_cannot_do_is_refused(axes: dict[str, str], reason: str) -> None:
    with pytest.raises(NoExportError, match=f"scripts for DeepSpeed do not do {reason}"):
        script_of(STEPS.with_axes(axes), 1)
