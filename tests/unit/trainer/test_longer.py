"""Cells that are run once more with more steps, since their learning rate moves, and longer runs that end early."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from report_samples import RUN
from shardproof.cli.main import entry
from shardproof.observe.logical import Value
from shardproof.program import Op
from shardproof.protocol import registry
from shardproof.report.model import Report
from shardproof.request import Outcome, Request
from shardproof.result import ArmResult, FailedOp, Result
from shardproof.scenario import Mesh, Scenario
from shardproof.trainer.described import Described
from shardproof.trainer.judge.judging import Judging
from shardproof.trainer.judge.longer import cut_short, longer, longer_program
from shardproof.trainer.judge.trains import _rate_lost
from shardproof.trainer.values.notes import schedule_goes_on, schedule_stands_still
from shardproof.verdict import Verdict
from simulated import LR, Simulation
from trainer_texts import registered

TRAINER = Described(
    Path("mine.py"), "Mine", "", {"chunks": ("1", "2"), "lr": ("1", "2"), "fused": ("no", "yes")},
    alike={"chunks": "rounding", "fused": "bits"},
)  # fmt: skip
MOVES = schedule_goes_on(4, "arms 16 4 resumed alike")
OVER = "ValueError on rank 0 in step (mine.py, line 9): Tried to step 11 times"


@pytest.fixture(autouse=True)
def _systems_of_before(monkeypatch: pytest.MonkeyPatch) -> None:
    registry.all_systems()
    monkeypatch.setattr(registry, "_SYSTEMS", dict(registry._SYSTEMS))


@pytest.mark.parametrize(
    ("changed", "program"),
    [
        ({}, "arms 16 4 resumed alike"),
        ({"steps": (3, 1)}, "arms 18 4 resumed alike"),
        ({"steps": (10, 5)}, "arms 20 4 resumed alike"),
        ({"alike": {}}, "arms 16 4 resumed"),
        ({"steps": (4, 0)}, "arms 16 0 alike"),
        ({"saves": False, "steps": (2, 0)}, "arms 16 0 alike"),
        ({"steps": (4, 0), "alike": {}}, ""),
        ({"steps": (12, 4)}, ""),
    ],
)
def test_the_program_of_a_longer_run(changed: dict[str, Any], program: str) -> None:
    assert longer_program(replace(TRAINER, **changed)) == program


def result(cell: str = "", verdict: Verdict = Verdict.PASS, *arms: ArmResult, note: str = MOVES, **more: Any) -> Result:
    """A result with a note on the schedule and other arms."""
    scenario = Scenario(system="mine:Mine", program="arms", options=tuple(cell.split()))
    own = (ArmResult("trains", "pass", "", (note,)), *arms)
    return Result(scenario, "mine:Mine", "", verdict, **{"arms": own} | more)


def test_the_first_cell_and_those_of_one_other_way_are_run_once_more() -> None:
    cells = ["", "lr=2", "chunks=2", "chunks=2 fused=yes", "fused=yes"]
    found = longer(TRAINER, list(map(result, cells)))
    assert [scenario.options for scenario in found] == [(), ("chunks=2",), ("fused=yes",)]
    assert {scenario.program for scenario in found} == {"arms 16 4 resumed alike"}
    assert [scenario.options for scenario in longer(TRAINER, list(map(result, cells[:2])))] == [(), ("lr=2",)]


def test_what_fails_or_has_nothing_to_compare_is_not_run_once_more() -> None:
    assert longer(TRAINER, [result("", Verdict.MISMATCH), result("lr=2", note="something else")]) == []
    alone = [result(cell, note=schedule_goes_on(4, "arms 16 0 alike")) for cell in ("", "lr=2", "fused=yes")]
    assert [scenario.options for scenario in longer(TRAINER, alone)] == [("fused=yes",)]


@pytest.mark.parametrize(
    ("arms", "at", "told"),
    [
        ([("uninterrupted", "crash", OVER)], "step", OVER),
        ([("uninterrupted", "hang", "No end in step.")], "fit", "No end in step."),
        ([("alike chunks", "crash", OVER)], "step", OVER),
        ([("uninterrupted", "crash", OVER)], "save", ""),
        ([("trains", "unknown", "No parameter changes.\nMore.")], "step", "No parameter changes."),
        ([("trains", "mismatch", "w ends as NaN or infinity, so that no arm could see what else goes wrong.")], "step",
         "w ends as NaN or infinity, so that no arm could see what else goes wrong."),
        ([("trains", "mismatch", "w is frozen.")], "step", ""),
        ([("resumed", "crash", OVER)], "step", ""),
        ([("trains", "unknown", "No parameter changes."), ("alike chunks", "mismatch", "They differ.")], "step", ""),
    ],
)  # fmt: skip
def test_how_a_longer_run_ends_that_cannot_be_made(arms: list[tuple[str, str, str]], at: str, told: str) -> None:
    made = [ArmResult(*arm) for arm in arms]
    assert cut_short(result("", Verdict.CRASH, *made, failed_op=FailedOp(9, at))) == told


def test_a_longer_run_that_passes_or_that_is_refused() -> None:
    assert cut_short(result()) == ""
    assert cut_short(result("", Verdict.UNKNOWN, arms=(), reason="no memory\nmore")) == "no memory"


def test_in_a_later_epoch_the_end_of_the_data_alone_is_no_crash() -> None:
    for message, left_out in (("StopIteration on rank 0 in step (mine.py, line 9)", True), (OVER, False)):
        arm = ArmResult("uninterrupted", "crash", message)
        cell = result("", Verdict.CRASH, arm, failed_op=FailedOp(9, "step"))
        assert (cut_short(cell, data=True) == message, cut_short(cell) == message) == (left_out, True)


def test_a_rate_that_moves_is_noted_with_a_longer_program(tmp_path: Path) -> None:
    trainer = registered(tmp_path, "axes = {'mesh': ['2', '4']}")

    def notes(folder: str, program: str) -> list[str]:
        (tmp_path / folder).mkdir()
        made = Simulation(
            Scenario(system=trainer.system, program=program),
            lambda session, op, state: state.update({LR: str(0.1 / (1 + op.iteration))}) if op.kind == "step" else None,
        )
        arms = made.judged(tmp_path / folder)["arms"]
        return [note for arm in arms if arm["name"] == "trains" for note in arm["notes"]]

    assert schedule_goes_on(4, "arms 16 4 resumed") in notes("own", "arms")
    assert notes("asked", "arms 2 2") == []


def test_what_a_note_says_of_a_rate_that_stays() -> None:
    assert schedule_stands_still("0.1", 4).endswith("`steps` can be more, or the milestone sooner")
    assert schedule_stands_still("0.1", 4, "arms 16 4 resumed").endswith("`--program 'arms 16 4 resumed'` may try it")


@pytest.mark.parametrize("ends", [False, True])
def test_the_command_runs_longer_and_leaves_out_what_comes_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *, ends: bool
) -> None:
    trainer = registered(tmp_path, "axes = {'mesh': ['1'], 'chunks': ['1', '2']}\nalike = {'chunks': 'bits'}")
    requests = list[Request]()

    def made(scenario: Scenario) -> Result:
        if scenario.program == "arms":
            return replace(result(), scenario=scenario, system=trainer.system)
        wrong = ArmResult("uninterrupted", "crash", OVER) if ends else ArmResult("alike chunks", "mismatch", "Apart.")
        verdict = Verdict(wrong.verdict) if scenario.options else Verdict.PASS
        own = (wrong,) if scenario.options else ()
        return Result(scenario, trainer.system, "", verdict, arms=own, failed_op=FailedOp(9, "step"))

    def record(request: Request) -> Outcome:
        requests.append(request)
        found: Sequence[Result] = tuple(map(made, request.plan.scenarios))
        return Outcome(Report(RUN, tuple(found)), request.out / "index.html", interrupted=False)

    monkeypatch.setattr("shardproof.run.run", record)
    status = entry(["trainer", str(trainer.file), "--out", str(tmp_path / "out"), "-q", "-j", "1"])
    told = capsys.readouterr().out
    programs = [[scenario.program for scenario in request.plan.scenarios] for request in requests]
    assert programs[:2] == [["arms"] * 2, ["arms"] * 2 + ["arms 16 4 resumed alike"] * 2]
    assert [request.goes_on for request in requests] == ["", *[RUN.id] * (2 if ends else 1)]
    assert "may try it" not in told
    left_out = "chunks=2, arms 16 4 resumed alike: this longer run was tried, for what a learning-rate schedule or"
    if ends:
        assert programs[2] == ["arms"] * 2 + ["arms 16 4 resumed alike"]
        assert (status, left_out in told, OVER in told) == (0, True, True)
    else:
        assert (status, len(programs), left_out in told) == (1, 2, False)
        assert "MISMATCH  alike chunks: Apart." in told


@pytest.mark.parametrize(
    ("used", "told"),
    [
        (["0.1", "0.1", "0.1", "0.1"], "step 2 begins with a learning rate of 0.01 and steps with 0.1"),
        (["0.1", "0.1", "0.01", "0.1"], ""),
        (["0.5", "0.5", "0.5", "0.5"], ""),  # every step sets its rate itself
    ],
)
def test_a_rate_that_is_set_before_a_step_and_not_used_is_told(used: list[str], told: str) -> None:
    begun = ["0.1", "0.1", "0.01", "0.1"]
    steps = [Op(n + 1, "step", "", 0, Mesh(), n, 0, 0, -1) for n in range(4)]
    rates = [{("setting", "group0.lr"): Value("utf8", (len(rate),), rate.encode())} for rate in begun]
    judging = cast(Judging, SimpleNamespace(whole=SimpleNamespace(ops=steps), at=lambda index: rates[index]))
    assert _rate_lost(judging, used).startswith(told)
    assert bool(_rate_lost(judging, used)) == bool(told)
