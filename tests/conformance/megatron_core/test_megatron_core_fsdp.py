"""Megatron-Core under its own Megatron-FSDP: where a rank's rows lie is our arithmetic, not what the library says.

*Verifies*: that a library which cuts elsewhere is caught, though it agrees with itself. *Does not verify*: defects of
releases, which have regressions.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.laboratory import Laboratory
from harness.scenario import Scenario
from harness.verdict import Verdict

pytestmark = pytest.mark.real

SOUND = Scenario(system="megatron-core", sharding="zero1", checkpoint="fsdp_dtensor").with_axes(
    {
        "model": "dense",
        "mesh": "1x2x1",
        "dtype": "bf16/master=fp32",
        "optimizer": "adamw/impl=multi_tensor",
        "options": "fsdp_optim_grads_params",
        "program": "build step",
    }
)

CUTS_ELSEWHERE = """
from dataclasses import replace

from harness.systems.megatron_core import INFO
from harness.systems.megatron_core_rank import MegatronRank, library
from harness.systems.registry import register


class Elsewhere(MegatronRank):
    \"\"\"Ranks whose library makes the first one's part of every bucket larger than it has to be.\"\"\"

    def __init__(self, context):
        library()
        from megatron.core.distributed.fsdp.src.megatron_fsdp import param_and_grad_buffer as buffers
        pad = buffers._pad
        buffers._pad = lambda elements, divisor: pad(elements, 2 * divisor)
        super().__init__(context)


register(replace(INFO, entry=f"{__name__}:Elsewhere"))
"""


def test_a_wrong_map_is_a_gap_and_an_overlap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same library without it passes in the walk of nightly_fsdp."""
    (tmp_path / "cuts_elsewhere.py").write_text(CUTS_ELSEWHERE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with Laboratory(jobs=1, deadline_s=60.0, plugins=("cuts_elsewhere",)) as laboratory:
        result = laboratory.examine_one(SOUND)
    assert result.verdict is Verdict.MISMATCH, result.signature
    assert {"gap", "overlap"} <= {m.kind for m in result.differences}, result.signature
