"""Parameters that some steps leave without a gradient, under FusedAdam.

*Verifies*: both oracles count steps by group, make zero moments for what rests in the first step, and use no gradient
twice, with masters and moments in several dtypes.
*Does not verify*: what the library does, which the walks ask.
"""

from __future__ import annotations

import pytest
from shardproof.laboratory.judge import ResolvedScenario, run_reference
from shardproof.scenario import Scenario


@pytest.mark.parametrize("dtype", ["fp32", "bf16/master=fp32", "bf16/master=fp32/exp_avg=bf16/exp_avg_sq=bf16"])
@pytest.mark.parametrize("model", ["resting", "sometimes"])
def test_both_oracles_agree_on_what_rests(dtype: str, model: str) -> None:
    scenario = Scenario.from_axes({
        "system": "transformer-engine", "model": model, "optimizer": "adamw/impl=multi_tensor", "dtype": dtype,
        "program": "rollback", "mesh": "1x2x1",
    })  # fmt: skip
    found, _, _ = run_reference(ResolvedScenario.from_scenario(scenario))
    assert found.distrust == ""
