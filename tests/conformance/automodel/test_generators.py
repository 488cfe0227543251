"""Random generators under NeMo Automodel: its StatefulRNG is saved and loaded as recipes do it, rank by rank; and
recipes that do it wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.errors import UsageError
from harness.laboratory import Laboratory
from harness.program import expand
from harness.result import Result
from harness.scenario import Scenario
from harness.systems.automodel.stored import STORED
from harness.verdict import Verdict
from tests.conformance.automodel import careless

DROPOUT = {
    "model": "hf_dropout",
    "mesh": "1x1x2",
    "checkpoint": "safetensors",
    "program": "build step save step build load step",
    "microbatches": "2",
}


def scenario(system: str = "automodel", **axes: str) -> Scenario:
    return Scenario.from_axes({"system": system, **DROPOUT, **axes})


def test_a_file_of_no_rank_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rng").mkdir()
    (tmp_path / "rng" / "rng_of_all.pt").write_bytes(b"")
    (tmp_path / "model").mkdir()
    (tmp_path / "optim").mkdir()
    asked = scenario()
    save = next(op for op in expand(asked) if op.kind == "save")
    with pytest.raises(UsageError):
        STORED.read(tmp_path, save, asked)


@pytest.mark.real
@pytest.mark.nightly  # Automodel takes long to import
class TestOnRanks:
    def examined(self, laboratory: Laboratory, system: str, **axes: str) -> Result:
        return laboratory.examine_one(scenario(system, **axes))

    @pytest.mark.parametrize(
        "axes", [{}, {"mesh": "2x2x1"}, {"load": "tp_change"}, {"mesh": "1x3x1", "load": "shrink"}], ids=str
    )
    def test_every_rank_gets_its_own_back(self, laboratory: Laboratory, axes: dict[str, str]) -> None:
        result = self.examined(laboratory, "automodel", **axes)
        assert (result.verdict, result.signature, result.reason) == (Verdict.PASS, "", "")

    def test_a_recipe_that_loads_none_is_caught(self, laboratory: Laboratory) -> None:
        result = self.examined(laboratory, careless.FORGETS.name)
        assert result.signature == f"{result.system} mismatch: load: rng bits"
        assert {d.key.fqn for d in result.differences} >= {f"rank{r}.{n}" for r in (0, 1) for n in ("torch", "python")}

    def test_ranks_that_all_load_the_firsts_are_caught(self, laboratory: Laboratory) -> None:
        result = self.examined(laboratory, careless.RANK_0S.name)
        assert {d.key.fqn for d in result.differences} == {"rank1.torch", "rank1.numpy", "rank1.python"}
        assert "stream_of_another_rank" in {each.mechanism for each in result.explanations}
