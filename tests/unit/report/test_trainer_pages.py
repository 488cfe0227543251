"""What reports say of a trainer's cell where the trainer's file is not known, as on the machine of a reader.

*Verifies*: arms, sentences, notes and state on the page and in `explain`, escaped; titles, commands, JUnit; and that a
result keeps its signature on its way through JSON. *Does not verify*: that arms are judged rightly: tests of
`shardproof.trainer`.
"""

from __future__ import annotations

from dataclasses import replace
from xml.etree import ElementTree

import pytest
import report_samples as samples
from shardproof.diff import Difference
from shardproof.errors import UsageError
from shardproof.observe.logical import Key
from shardproof.program import expand
from shardproof.report.failure_page import FoundState, failure_page
from shardproof.report.failure_text import render_explained
from shardproof.report.html import render_failure, render_index
from shardproof.report.junit import render_junit
from shardproof.report.model import Report
from shardproof.result import ArmResult, Result
from shardproof.verdict import Verdict
from shardproof.wording.titles import LONGEST, title

CELL = samples.cell()

ESCAPED = samples.HOSTILE.replace("<", "&lt;").replace(">", "&gt;")


def report(*results: Result) -> Report:
    run = replace(samples.RUN, command=("trainer", "--set", "mesh=4", "my trainer.py:Mine"))
    return Report(run, results or (CELL,), (), {}, samples.ISSUES)


def test_a_result_needs_no_trainers_file_to_say_which_operations_differ() -> None:
    with pytest.raises(UsageError):
        expand(CELL.scenario)
    again = Result.from_json(CELL.to_json())
    assert again == CELL
    assert again.sessions == CELL.sessions
    assert again.kind_of(7) == again.kind_of(12) == "load"
    assert again.kind_of(13) == again.kind_of(-1) == again.kind_of(None) == ""
    assert again.signature == "my_trainer:Mine mismatch: load: exp_avg missing"
    assert again.aftermath == ()  # each arm has a first operation of its own


def test_a_cell_that_an_earlier_release_stored_is_read_without_its_sessions() -> None:
    stored = CELL.to_json()
    del stored["sessions"]
    assert Result.from_json(stored).kind_of(7) == ""
    assert "Arms" in render_failure(report(), Result.from_json(stored))


def test_the_page_has_a_row_for_each_arm_and_warns_of_state_that_is_hidden() -> None:
    page = render_failure(report(), CELL)
    assert samples.HOSTILE not in page
    for arm in CELL.arms:
        assert f'<th scope="row">{arm.name}</th>' in page
    assert f"<p><code>load</code> restored no {ESCAPED} of 1 parameter.</p>" in page
    assert f'<p class="soft">rng {ESCAPED}</p>' in page
    warning = page[page.index('<div class="warning"') :]
    warning = warning[: warning.index("</div>")]
    assert f"<li>cache: iterator {ESCAPED}</li>" in warning
    assert "model" not in warning
    assert "<li>model: module, Linear</li>" in page
    assert "<dt>expert_parallel</dt>" not in page
    assert "forgets=true+mesh=4" in page
    assert "No diagnosis rule" not in page
    assert "allowed:" not in page


def test_the_page_of_another_system_has_neither_section() -> None:
    page = render_failure(samples.report(), samples.mismatch())
    assert 'id="arms"' not in page
    assert 'id="state"' not in page
    assert "<dt>expert_parallel</dt>" in page


def test_the_index_names_the_cell_and_what_no_verdict_says_anything_about() -> None:
    page = render_index(report(CELL, replace(CELL, verdict=Verdict.PASS, differences=(), arms=(), failed_op=None)))
    assert '<span class="mono">forgets=true mesh=4</span>' in page
    assert "State of a trainer that cannot be read" in page
    assert f'<td>cache: iterator {ESCAPED}</td><td class="num">2</td>' in page
    assert "shardproof replay" in page
    assert "--plugin &#39;my trainer.py:Mine&#39;" in page
    plain = replace(CELL, scenario=CELL.scenario.with_axes({"options": ""}))
    assert '<span class="mono">first value of every axis</span>' in render_index(report(plain))


def test_commands_that_run_something_name_the_trainers_file() -> None:
    found = report()
    page = failure_page(CELL, found.issues, found.place, found.again)
    commands = {command.name: command.text for command in page.commands}
    assert commands["Replay"].endswith("--plugin 'my trainer.py:Mine'")
    assert "--plugin" in commands["Shrink"]
    assert "--plugin" not in commands["Explain"]
    assert samples.report().again == ""


@pytest.mark.parametrize(
    ("sentence", "expected"),
    [
        ("The optimizer starts again.", "The optimizer starts again"),
        (f"The optimizer starts again at step 1: {'exp_avg ' * 20}.", "The optimizer starts again at step 1"),
        (f"Short: {'exp_avg ' * 20}.", ""),
        ("", "Loading lost first moments of 0.weight"),
    ],
)
def test_its_title_is_what_the_first_failing_arm_says(sentence: str, expected: str) -> None:
    arms = (ArmResult("twice", "pass", "not this"), ArmResult("resumed", "mismatch", sentence))
    told = title(replace(CELL, arms=arms))
    assert len(told) <= LONGEST
    assert told == expected or (not expected and told.startswith("Short: exp_avg"))


def test_the_title_names_the_save_where_the_save_left_something_out() -> None:
    """What a load lacks follows from it. What a save did not leave out, the arm that loads is asked first."""
    resumed, saved = (ArmResult(name, "mismatch", f"What {name} says.") for name in ("resumed", "written"))
    gone = Difference(Key(3, "written", "exp_avg", "0.weight"), "missing", total=1, mismatched=1)
    both = replace(CELL, arms=(resumed, saved), differences=(*CELL.differences, gone))
    assert (title(both), both.failed_arm) == ("What written says", resumed)
    assert title(replace(both, differences=CELL.differences)) == "What resumed says"
    assert title(replace(both, arms=(resumed, replace(saved, verdict="pass")))) == "What resumed says"


def test_a_title_is_the_first_sentence_of_a_long_text() -> None:
    arms = (ArmResult("resumed", "mismatch", f"The schedule starts again: all of it. {'lr ' * 60}."),)
    assert title(replace(CELL, arms=arms)) == "The schedule starts again: all of it"


def test_junit_has_the_first_failing_arms_sentence_as_its_message() -> None:
    (failure,) = ElementTree.fromstring(render_junit(report())).iter("failure")
    assert failure.get("message") == f"new: resumed: `load` restored no {samples.HOSTILE} of 1 parameter."


def test_explain_tells_arms_notes_and_state() -> None:
    text = render_explained(CELL, samples.ISSUES)
    assert "  pass      twice\n" in text
    assert f"  mismatch  resumed: `load` restored no {samples.HOSTILE} of 1 parameter.\n" in text
    assert f"rng {samples.HOSTILE}" in text
    assert (
        text.index("WARNING")
        < text.index("cache: iterator")
        < text.index("model: module")
        < text.index("operation 7 (load), first")
    )
    assert "the calls of a trainer stand in its own file" in text
    assert "\x1b[" in render_explained(CELL, samples.ISSUES, colour=True)


def test_state_is_told_apart_by_the_word_in_front_of_its_first_colon() -> None:
    found = FoundState.of(
        (
            "found: a: b",
            "hidden: c",
            "measured: step 1: lr: 1",
            "ends: 1",
            "keys: a",
            "gradients: exact",
            "no colon",
            "found",
        )
    )
    assert found == FoundState(("a: b",), ("c",), ("step 1: lr: 1",), ("gradients: exact", "no colon", "found"))
