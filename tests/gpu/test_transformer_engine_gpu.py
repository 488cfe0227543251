"""TransformerEngine's layers on a real GPU, over its real extension: nothing is emulated, and the result says so."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
from shardproof.laboratory.laboratory import Laboratory
from shardproof.scenario import Scenario
from shardproof.verdict import Verdict

pytestmark = pytest.mark.gpu

if find_spec("transformer_engine_torch") is None:
    pytest.skip("no transformer_engine_torch: pip install 'shardproof[te]'", allow_module_level=True)

BASE = Scenario(system="transformer-engine", device="cuda", model="te_layers").with_axes(
    {"mesh": "1x2x1", "dtype": "bf16/master=fp32", "optimizer": "adamw/impl=multi_tensor"}
)


@pytest.mark.parametrize("options", ["", "meta", "fp8_current", "fp8_delayed"])
def test_layers_and_fused_adam(laboratory: Laboratory, options: str) -> None:
    result = laboratory.examine_one(BASE.with_axes({"options": options}))
    assert result.verdict is Verdict.PASS, result.signature
    assert result.emulated == ()
    assert result.chosen == {"compiled extension": "real, on a GPU"}
