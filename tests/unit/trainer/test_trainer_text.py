"""What `shardproof trainer` prints of results made by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from shardproof.result import ArmResult, Result
from shardproof.scenario import Scenario
from shardproof.trainer.described import Described
from shardproof.trainer.report import text
from shardproof.trainer.values.wording import SAME_AS_AGREE
from shardproof.verdict import Verdict

TRAINER = Described(Path("mine.py"), "Mine", "", {"lr": ("1", "2", "3")})


def result(cell: str, verdict: Verdict, sentence: str = "", **more: Any) -> Result:
    """A result of one arm beside one that passes."""
    scenario = Scenario(system="mine:Mine", program="arms", options=(cell,) if cell else ())
    arms = (ArmResult("twice", "pass", ""), ArmResult("resumed", verdict.value, sentence, ("not compared, a",)))
    return Result(scenario, "mine:Mine", "", verdict, **{"arms": arms, "duration_s": 1.5} | more)


def test_cells_that_fail_alike_but_for_numbers_are_told_once() -> None:
    found = [result(f"lr={n}", Verdict.MISMATCH, f"`load` left lr at {n}.5 of 2") for n in (1, 2)]
    found.append(result("lr=3", Verdict.MISMATCH, "`load` restored nothing"))
    lines = text.render(TRAINER, found, " --out o", " --plugin a/mine.py").splitlines()
    assert "    MISMATCH  resumed: `load` left lr at 1.5 of 2" in lines
    assert "    MISMATCH  resumed: `load` left lr at 2.5 of 2" not in lines
    assert lines[lines.index("    alike, but for numbers:") + 1] == f"      {found[1].id} (lr=2)"
    assert f"    replay: shardproof replay {found[0].id} --out o --plugin a/mine.py" in lines
    assert f"    explain: shardproof explain {found[0].id} --out o" in lines
    assert "    MISMATCH  resumed: `load` restored nothing" in lines
    assert "  resumed: not compared, a (3 cells)" in lines
    assert lines[-1] == "mine:Mine: 3 mismatch"


def test_an_axis_that_nothing_compares_leads_to_alike() -> None:
    axes = {
        "mesh": ("1", "2"),
        "chunks": ("1", "2"),
        "lr": ("1", "2"),
        "dtype": ("a", "b"),
        "offload": ("no", "yes"),
        "one": ("1",),
    }
    trainer = Described(Path("mine.py"), "Mine", "", axes, altered={"rate": "run"}, alike={"offload": "bits"})
    assert text.lead_to_alike(trainer, []) == (
        "mesh, chunks: the values of each are not compared with each other; if those of one must come to the same "
        'model, say `alike = {"AXIS": "rounding"}` (docs/trainer.md)'
    )
    assert text.lead_to_alike(replace(trainer, alike={}), []) == (
        "mesh, chunks, offload: the values of each are not compared with each other; if those of one must come to the "
        'same model, say `alike = {"AXIS": "rounding"}` (docs/trainer.md)'
    )
    assert (
        text.lead_to_alike(replace(trainer, alike={"mesh": "rounding", "offload": "bits", "chunks": "bits"}), []) == ""
    )


def test_of_cells_that_fail_alike_one_with_a_whole_factor_is_shown() -> None:
    told = "every gradient is {} times what it should be: look at what scales"
    found = [result("lr=1", Verdict.MISMATCH, told.format(3.141)), result("lr=2", Verdict.MISMATCH, told.format(4)),
             result("lr=3", Verdict.MISMATCH, "`load` restored nothing")]  # fmt: skip
    lines = text.render(TRAINER, found).splitlines()
    assert f"    MISMATCH  resumed: {told.format(4)}" in lines
    assert f"    MISMATCH  resumed: {told.format(3.141)}" not in lines


def test_arms_that_say_no_more_than_that_ranks_disagree_are_one_line() -> None:
    arms = [ArmResult("ranks agree", "mismatch", "w is apart"),
            *(ArmResult(name, "mismatch", SAME_AS_AGREE) for name in ("resumed", "written"))]  # fmt: skip
    lines = text.render(TRAINER, [result("", Verdict.MISMATCH, arms=tuple(arms))]).splitlines()
    at = lines.index("    MISMATCH  ranks agree: w is apart")
    assert lines[at + 1] == "    the same in 2 more: resumed, written"


@pytest.mark.parametrize(
    ("one", "line"),
    [
        (result("", Verdict.PASS), "ok        {id}  first value of every axis  (2 of 2 arms pass, 1.5 s)"),
        (
            result("lr=2", Verdict.PASS, reason="the planted fault never struck"),
            "ok        {id}  lr=2  (2 of 2 arms pass; the planted fault never struck, 1.5 s)",
        ),
        (
            result("lr=2", Verdict.MISMATCH, known_issue="mine-1", reason="of no concern"),
            "known     {id}  lr=2  (1 of 2 arms pass; mine-1, 1.5 s)",
        ),
        (
            result("lr=2", Verdict.UNSUPPORTED, arms=(), reason="no such thing\nin this release"),
            "-         {id}  lr=2  (no such thing, 1.5 s)",
        ),
    ],
)
def test_the_line_of_a_cell(one: Result, line: str) -> None:
    assert line.format(id=one.id) in text.render(TRAINER, [one]).splitlines()


def test_state_that_was_found_is_listed_once_and_what_hides_it_is_a_warning() -> None:
    state = ("found: net: module, Linear", "hidden: net.box: it has a closure")
    found = [result(f"lr={n}", Verdict.PASS, state=state) for n in (1, 2)]
    assert text.render(TRAINER, found).splitlines()[:5] == [
        "state that was found:",
        "  net: module, Linear",
        "WARNING: state that cannot be read, and is not compared (name it in `state()`):",
        "  net.box: it has a closure",
        "",
    ]


def test_what_a_step_does_is_told_once_with_what_other_cells_do_otherwise() -> None:
    first = ("measured: step 1: order: 1 backward", "measured: step 1: reduced: a", "ends: 1")
    other = ("measured: step 1: order: 2 backwards", "measured: step 1: reduced: b", "ends: 2")
    found = [result("", Verdict.PASS, state=first), result("lr=2", Verdict.PASS, state=other),
             result("lr=3", Verdict.PASS, state=other)]  # fmt: skip
    lines = text.render(TRAINER, found).splitlines()
    begin = lines.index("what step 1 does, as measured, for you to compare with what it should do:")
    assert lines[begin + 1 : begin + 5] == [
        "  order: 1 backward",
        "  reduced: a",
        "  otherwise in other cells:",
        "    order: 2 backwards  (lr=2 and 1 more)",
    ]
    assert not [line for line in lines if "come to the same parameters" in line]


def test_an_axis_of_which_all_values_come_to_the_same_is_told() -> None:
    found = [result(cell, Verdict.PASS, state=("ends: 1",)) for cell in ("", "lr=2")]
    lines = text.render(TRAINER, found).splitlines()
    assert lines[lines.index("worth a look, and not judged:") + 1].startswith(
        "  lr: all of its values come to the same parameters in every step, bit for bit: right of what concerns"
    )
    apart = [result("", Verdict.PASS, state=("ends: 1",)), result("lr=2", Verdict.PASS, state=("ends: 2",))]
    assert "worth a look" not in text.render(TRAINER, apart)
