"""Ranks that are killed, stopped or raise: each once at each operation, and at each point of its saves and loads."""

from __future__ import annotations

import os
from pathlib import Path
from typing import cast

import pytest
import torch
from shardproof.faults.boundary import all_came, boundary_fault, never_struck
from shardproof.models import model_spec
from shardproof.ownership import is_planted
from shardproof.program import Op, expand
from shardproof.protocol.registry import contract_of
from shardproof.protocol.system import RankContext, RankSystem
from shardproof.scenario import Scenario

SCENARIO = Scenario.from_axes({"mesh": "1x2x1", "program": "build step save reshard build load", "load": "shrink"})


class _StruckError(Exception):
    pass


def context_of(scenario: Scenario, op: Op, rank: int, folder: Path) -> RankContext:
    contract = contract_of(scenario)
    return RankContext(scenario, model_spec("dense"), op.mesh, rank, folder, contract, fault=scenario.faults[0])


def struck_by(fault_id: str, monkeypatch: pytest.MonkeyPatch, folder: Path) -> list[tuple[str, int, int]]:
    """Which ranks were struck, before which operation and in which session; the others go on. A save opens one file,
    and rank 0 another; a load opens one."""
    found: list[tuple[str, int, int]] = []

    def kill(pid: int, signal: int) -> None:
        raise _StruckError

    monkeypatch.setattr(os, "kill", kill)
    fault = boundary_fault(fault_id)
    scenario = SCENARIO.with_axes({"faults": fault_id})
    folder.mkdir(exist_ok=True)
    for op in expand(scenario):
        for rank in range(op.mesh.world):

            def act(op: Op = op, rank: int = rank) -> None:
                if op.kind not in ("save", "load"):
                    return
                for name in ("data", "more")[: 2 if (op.kind, rank) == ("save", 0) else 1]:
                    (folder / f"checkpoint0-{name}-{rank}").open("w").close()

            context = context_of(scenario, op, rank, folder)
            try:
                fault.around(act, op, context, cast("RankSystem", None))
            except _StruckError:
                found.append((op.kind, rank, op.session))
            except OSError as error:
                found += [(op.kind, rank, op.session)] if is_planted(error) else []
    return found


@pytest.mark.parametrize("fault", ["boundary.kill-rank", "boundary.stuck-rank", "boundary.error-rank"])
def test_each_rank_is_struck_before_each_operation(fault: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = [struck_by(f"{fault}@{number}", monkeypatch, tmp_path) for number in range(1, 10)]
    assert found == [
        [("build", 0, 0)], [("build", 1, 0)], [("step", 0, 0)], [("step", 1, 0)], [("save", 0, 0)], [("save", 1, 0)],
        [("build", 0, 1)], [("load", 0, 1)], [],
    ]  # fmt: skip


@pytest.mark.parametrize("fault", ["boundary.kill-at-file", "boundary.stuck-at-file", "boundary.error-at-file"])
def test_each_rank_is_struck_at_each_point_of_saves_and_loads_also_of_a_later_session(
    fault: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = [struck_by(f"{fault}@{number}", monkeypatch, tmp_path / str(number)) for number in range(1, 8)]
    assert found == [[("save", 0, 0)], [("save", 1, 0)], [("save", 0, 0)], [], [("load", 0, 1)], [], []]
    scenarios = [SCENARIO.with_axes({"faults": f"{fault}@{number}"}) for number in (6, 7)]
    folders = [tmp_path / str(number) for number in (6, 7)]
    assert all(map(never_struck, scenarios, folders))
    assert list(map(all_came, scenarios, folders)) == [True, False], "rank 0 has a third point, and nobody a fourth"


@pytest.mark.parametrize("number", [1, 3])
def test_bytes_that_torch_writes_and_reads_are_points(number: int, tmp_path: Path) -> None:
    """Of an archive that C++ code opens there is no other one: one tensor is written, and read again."""
    scenario = SCENARIO.with_axes({"faults": f"boundary.error-at-file@{number}"})
    (fault,) = map(boundary_fault, scenario.faults)
    file = str(tmp_path / "elsewhere.pt")
    acts = {"save": lambda: torch.save(torch.ones(2), file), "load": lambda: torch.load(file, mmap=False)}
    failed = []
    for op in (op for op in expand(scenario) if op.kind in acts):
        try:
            fault.around(acts[op.kind], op, context_of(scenario, op, 0, tmp_path), cast("RankSystem", None))
        except OSError:
            failed.append(op.kind)
            break
    assert failed == [{1: "save", 3: "load"}[number]]
