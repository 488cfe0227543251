"""Random generators under NeMo Automodel: its StatefulRNG is saved and loaded as recipes do it, rank by rank; and
recipes that do it wrong."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from shardproof.errors import UsageError
from shardproof.laboratory.laboratory import Laboratory
from shardproof.program import expand
from shardproof.result import Result
from shardproof.scenario import Scenario
from shardproof.systems.automodel.accepts import LIMITS
from shardproof.systems.automodel.stored import STORED, _generators
from shardproof.verdict import Verdict

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


def test_what_lies_beside_the_states_is_a_difference(tmp_path: Path) -> None:
    held = {"cuda_rng_state": [], "torch_rng_state": torch.zeros(8, dtype=torch.uint8), "mps_rng_state": torch.ones(2)}
    torch.save(held, tmp_path / "rng_global_rank_1.pt")
    save = next(op for op in expand(scenario()) if op.kind == "save")
    records = list(_generators(tmp_path, save, scenario()))
    assert [(r.role, r.fqn) for r in records] == [("rng", "torch.1"), ("unknown", "rng.1.mps_rng_state")]


def test_a_state_of_a_gpu_is_a_difference_on_a_cpu(tmp_path: Path) -> None:
    torch.save({"cuda_rng_state": [torch.ones(2)]}, tmp_path / "rng_dp_rank_0.pt")
    save = next(op for op in expand(scenario()) if op.kind == "save")
    found = [list(_generators(tmp_path, save, replace(scenario(), device=device))) for device in ("cpu", "cuda")]
    assert [[(r.role, r.fqn) for r in records] for records in found] == [[("unknown", "rng.0.cuda_rng_state.0")], []]


def test_what_a_pickled_state_was_called_with_is_a_difference_unless_it_is_nothing(tmp_path: Path) -> None:
    save = next(op for op in expand(scenario()) if op.kind == "save")
    for args in ((), (1,)):
        torch.save({"class": "RNGState", "args": args}, tmp_path / "rng_global_rank_0.pt")
        expected = [("unknown", "rng.0.args")] if args else []
        assert [(r.role, r.fqn) for r in _generators(tmp_path, save, scenario())] == expected


@pytest.mark.parametrize(
    ("saved", "loaded", "one_form"),
    [("0.6.0", "newest", True), ("", "0.6.0", True), ("0.4.0", "0.5.0", True), ("0.5.0", "0.6.0", False)],
)
def test_generators_go_between_releases_of_one_form(saved: str, loaded: str, one_form: bool) -> None:
    limit = next(limit for limit in LIMITS if limit.id == "generators-of-another-release")
    assert limit.refuses(scenario(version=saved, load_version=loaded, program="restart")) is not one_form


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
