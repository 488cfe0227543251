"""`boundary.kill-rank` with a number kills each rank before each operation once."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from harness.faults.boundary import boundary_fault
from harness.models import model_spec
from harness.program import Op, expand
from harness.scenario import Scenario
from harness.systems.protocol import RankContext
from harness.systems.registry import contract_of

SCENARIO = Scenario.from_axes({"mesh": "1x2x1", "program": "build step save reshard build load", "load": "shrink"})


class _KilledError(Exception):
    pass


def killed_by(number: int, monkeypatch: pytest.MonkeyPatch, folder: Path) -> list[tuple[str, int, int]]:
    """Which ranks were killed, before which operation and in which session; the others go on."""
    found: list[tuple[str, int, int]] = []

    def kill(pid: int, signal: int) -> None:
        raise _KilledError

    monkeypatch.setattr(os, "kill", kill)
    fault = boundary_fault(f"boundary.kill-rank@{number}")
    done: list[Op] = []
    for op in expand(SCENARIO):
        for rank in range(op.mesh.world):
            context = RankContext(
                SCENARIO, model_spec("dense"), op.mesh, rank, folder, contract_of(SCENARIO), fault=fault.id
            )
            try:
                fault.around(lambda op=op: done.append(op), op, context, object())  # type: ignore[arg-type, misc]
            except _KilledError:
                found.append((op.kind, rank, op.session))
    assert len(done) == 8 - len(found)
    return found


def test_each_rank_is_killed_before_each_operation(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = [killed_by(number, monkeypatch, tmp_path) for number in range(1, 10)]
    assert found == [
        [("build", 0, 0)], [("build", 1, 0)], [("step", 0, 0)], [("step", 1, 0)], [("save", 0, 0)], [("save", 1, 0)],
        [("build", 0, 1)], [("load", 0, 1)], [],
    ]  # fmt: skip
