"""Bits that flip in what a rank keeps, before and after each operation, and in gradients on their way to a step.

*Verifies*: on torch's optimizer alone, built and stepped as a system does.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from shardproof.faults.boundary import all_came, boundary_fault, never_struck
from shardproof.faults.memory import moment_called
from shardproof.models import model_spec
from shardproof.program import Op, expand
from shardproof.protocol.registry import contract_of
from shardproof.protocol.system import RankContext, RankSystem
from shardproof.scenario import Scenario

SCENARIO = Scenario.from_axes({"mesh": "1x2x1", "program": "build step step"})


class Run:
    """One rank, and what it keeps after each operation."""

    def __init__(self, fault: str, folder: Path, rank: int = 0) -> None:
        self.scenario = SCENARIO.with_axes({"faults": fault})
        self.folder = folder
        self.kept: list[dict[str, Any]] = []
        for op in expand(self.scenario):
            context = RankContext(
                self.scenario, model_spec("dense"), op.mesh, rank, folder, contract_of(SCENARIO), fault=fault
            )
            boundary_fault(fault).around(lambda op=op: self._act(op), op, context, cast("RankSystem", None))  # type: ignore[misc]
            state = {key: value.clone() for key, value in self.optimizer.state.get(self.param, {}).items()}
            self.kept.append({"param": self.param.detach().clone(), **state})

    def _act(self, op: Op) -> None:
        if op.kind == "build":
            self.param = torch.nn.Parameter(torch.ones(3))
            self.optimizer = torch.optim.AdamW([self.param])
        else:
            self.param.grad = torch.full((3,), 0.5)
            self.optimizer.step()

    def first_wrong(self, sound: Run) -> tuple[int, set[str]] | None:
        """After which operation something is not as in a sound run, and what."""
        for index, (own, its) in enumerate(zip(self.kept, sound.kept, strict=True)):
            if wrong := {name for name in own if not torch.equal(own[name], its[name])}:
                return index, wrong
        return None


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Run("boundary.skip-load", tmp_path_factory.mktemp("sound"))


@pytest.mark.parametrize(
    ("fault", "wrong"),
    [
        ("param", (1, {"param"})),
        ("param@2", (0, {"param"})), ("param@3", (1, {"param"})), ("param@6", (2, {"param"})),
        ("moment", (1, {"exp_avg"})), ("moment@4", (1, {"exp_avg"})), ("moment@5", (2, {"exp_avg", "param"})),
        ("step@4", (1, {"step"})), ("gradient", (1, {"exp_avg", "exp_avg_sq"})),
        ("gradient@2", (2, {"exp_avg", "exp_avg_sq", "param"})),
    ],
)  # fmt: skip
def test_a_bit_flips_at_its_moment(fault: str, wrong: tuple[int, set[str]], sound: Run, tmp_path: Path) -> None:
    run = Run(f"boundary.memory-{fault}", tmp_path)
    assert run.first_wrong(sound) == wrong
    assert not never_struck(run.scenario, tmp_path)


@pytest.mark.parametrize(("fault", "came"), [("moment@2", True), ("moment@7", False), ("gradient@3", False)])
def test_a_moment_without_such_a_thing_is_told_from_one_that_does_not_come(
    fault: str, came: bool, sound: Run, tmp_path: Path
) -> None:
    run = Run(f"boundary.memory-{fault}", tmp_path)
    assert run.first_wrong(sound) is None
    assert (never_struck(run.scenario, tmp_path), all_came(run.scenario, tmp_path)) == (True, came)


def test_other_ranks_are_left_alone(sound: Run, tmp_path: Path) -> None:
    assert Run("boundary.memory-param@2", tmp_path, rank=1).first_wrong(sound) is None


def test_a_step_that_a_group_counts_is_one() -> None:
    group: dict[str, Any] = {"params": [], "step": 4}
    optimizer = cast("Any", type("Counting", (), {"param_groups": [group], "state": {}})())
    from shardproof.faults import memory

    assert list(memory._owned_parts(optimizer, "step")) == [group]


def test_moments_have_names() -> None:
    ops = expand(SCENARIO)
    named = {
        "boundary.memory-param@1": "before 0 build", "boundary.memory-step@2": "after 0 build",
        "boundary.memory-moment@5": "before 2 step", "boundary.memory-gradient@2": "optimizer's step 2",
        "boundary.memory-gradient": "optimizer's step 1", "boundary.memory-param": "", "boundary.kill-rank@3": "",
    }  # fmt: skip
    assert {fault: moment_called(fault, ops) for fault in named} == named
