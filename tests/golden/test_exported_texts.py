"""Scripts and issue texts of failures, word for word, in `exports/`. SHARDPROOF_ACCEPT=1 rewrites them.

The results that they are made of lie beside them, as a run gave them. That a script fails, and passes with the cure, is
shown by tests/conformance/test_exports.py.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from shardproof.export.issue import render_issue
from shardproof.export.job import written
from shardproof.export.newest import not_asked
from shardproof.export.software import Software
from shardproof.issues.known_issues import KnownIssues, known_issues_of
from shardproof.protocol.registry import system_named
from shardproof.result import Result

GOLDEN = Path(__file__).with_name("exports")
OBSERVED = {
    "automodel-2419-c": "dtype of model.layers.0.linear_attn._fp32_params.A_log, as the forward sees it, "
    "after the step: expected torch.float32, observed torch.bfloat16",
    "automodel-policy-text": "what mp_policy: bfloat16 of a recipe comes to: expected an error, observed bfloat16",
    "deepspeed-module-only-3": "weight after the load: expected [1.0], observed [2.0]",
    "torch-fsdp2-164929": "step of down.bias after the save: expected 0.0, observed 1.0",
    "transformer-engine-tags-offset": "tensor_model_parallel of softmax_offset of DotProductAttention: expected True, "
    "observed False",
    "transformer-engine-2713": "shape of qkv.weight in the checkpoint: expected (12, 6), observed (6, 6)",
    "megatron-fsdp-mixed-unit-scale": "block.A_log after the step: expected [0.8125], observed [0.625]",
    "megatron-bridge-3949": "master of down.weight after the load model only, element (0,): expected -1.125, observed "
    "-1.5234375",
    "megatron-core-fsdp-hybrid-no-overlap-optim": "gradient that exp_avg has taken up, exp_avg / (1 - beta1): expected "
    "[2.5], observed [0.75]",
    "megatron-core-2777-swap": "exp_avg of a.weight in the checkpoint, element (0,): expected -0.225, observed -0.2705",
}


@pytest.mark.parametrize("name", OBSERVED)
def test_a_script_and_an_issue_text(name: str) -> None:
    result = Result.from_json(json.loads((GOLDEN / f"{name}.json").read_text("utf-8")))
    known = KnownIssues(known_issues_of(system_named(result.system))).match(result)
    made = written(result, known)
    software = Software(
        "3.11", {system_named(result.system).distributions[0]: result.version}, outside=result.outside_support
    )
    newest = not_asked(result, made.description.releases, made.description.on_main)
    text = render_issue(made, OBSERVED[name], software, newest)
    files = {f"{name}.py.txt": made.script, f"{name}.md.txt": text}
    files |= {f"{name}.{shim}.txt": shim_text for shim, shim_text in made.draft.shims.items()}
    for file, content in files.items():
        if os.environ.get("SHARDPROOF_ACCEPT"):
            (GOLDEN / file).write_text(content, "utf-8")
        assert (GOLDEN / file).read_text("utf-8") == content, file
