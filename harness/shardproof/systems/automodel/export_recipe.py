"""What a recipe of NeMo Automodel makes of the texts in its section `distributed`, as scripts without a model: the
dtype between pipeline stages, and a text where a policy belongs. Values for the template `recipe.py.j2`. No torch."""

from __future__ import annotations

from shardproof.export.case import FailureCase
from shardproof.export.model import TORCH_NAME
from shardproof.export.script import Draft
from shardproof.versions import before

HOME = "shardproof.systems.automodel"
LONG = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def draft_recipe_script(case: FailureCase) -> Draft | None:
    """A script that calls Automodel's recipe parser directly, for failures in the parsed `distributed` section. None if
    the failure lies elsewhere."""
    name = case.first.key.fqn if case.first and case.first.key.role == "resolved" else ""
    policy, version = case.scenario.dtype, case.result.version
    stages = {"param_dtype": policy.param, "reduce_dtype": policy.reduce, "output_dtype": policy.output}
    texts = ", ".join(f'"{stage}": "{LONG[dtype]}"' for stage, dtype in stages.items() if dtype)
    if name == "recipe_pipeline.pipeline.dtype":
        lines = [
            f"policy = {{{texts}}}",
            'section = {"pp_size": 2, "pipeline": {}, "mp_policy": policy}',
            "found = parse_distributed_section(section)",
        ]
        told = "dtype between pipeline stages of activations of that policy"
        expected, observed = TORCH_NAME[policy.output or policy.param or ""], 'found["pipeline_config"].dtype'
        calls = {"build": "\n".join(lines)}
    elif name == "recipe_policy.no_mapping":
        told, expected, observed = "what mp_policy: bfloat16 of a recipe comes to", '"an error"', "found"
        lines = ['found = parse_distributed_section({"mp_policy": "bfloat16"})["strategy_config"].mp_policy']
        calls = {"build": "\n".join(["try:", f"    {lines[0]}", "except ValueError:", '    found = "an error"'])}
    else:
        return None
    calls |= {"start": "", "subject": told, "expected": expected}
    module = "_dist_setup" if before(version, "0.5.0") else "_dist_utils"
    return Draft(HOME, "recipe.py.j2", calls, observed, {"module": module}, f"nemo-automodel {version}")
