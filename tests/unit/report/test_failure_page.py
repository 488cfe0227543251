"""What a failure's page says before it is drawn: groups, commands, the bits of the first deviating element.

*Verifies*: the order and the counts of the groups, the effect in a sentence, bits of every dtype. *Does not
verify*: how it looks, and what the page's script adds: tests/browser/test_failure_in_browser.py.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import report_samples as samples
from shardproof.diff import Difference
from shardproof.export import page
from shardproof.issues.known_issues import KnownIssues
from shardproof.observe.courses import RankCourse
from shardproof.observe.logical import Key
from shardproof.report.bits import differing, meaning_of, parts_of
from shardproof.report.failure_page import element_of, failure_page, owners_of, runs_of, span_of
from shardproof.report.groups import grouped
from shardproof.report.html import render_failure, render_index
from shardproof.result import FailedOp, Failure, Result
from shardproof.tensor_pictures import Elements
from shardproof.wording.rank_ends import told_ends


def differences(*of: tuple[int, str, str, str, str]) -> Result:
    found = tuple(Difference(Key(op, where, role, name), kind) for op, where, role, name, kind in of)
    return replace(samples.mismatch(), differences=found)


def test_differences_are_grouped_by_operation_role_and_tensor() -> None:
    result = differences(
        (9, "live", "param", "a", "bits"), (8, "written", "step", "a", "missing"), (8, "live", "exp_avg", "a", "gap"),
        (8, "live", "exp_avg", "a", "overlap"), (8, "live", "exp_avg", "b", "gap"), (8, "live", "grad", "a", "bits"),
        (-1, "live", "", "", "missing"),
    )  # fmt: skip
    nothing, load, step = grouped(result, Elements())
    assert (nothing.name, nothing.first) == ("no operation", True)
    assert [(role.name, role.kinds) for role in load.roles] == [
        ("grad", "bits × 1"), ("exp_avg", "gap × 2, overlap × 1"), ("written step", "missing × 1")
    ]  # fmt: skip
    assert [(t.name, len(t.differences)) for t in load.roles[1].tensors] == [("a", 2), ("b", 1)]
    assert (load.name, load.size, load.first) == ("operation 8 (load)", 4, False)
    assert (step.name, step.first) == ("operation 9 (step)", False)


def test_where_the_ranks_were_is_said_and_drawn_with_everything_escaped() -> None:
    result = samples.struck()
    assert told_ends(result) == (
        "Rank 1 raised KeyError in the observation of operation 1 (`step`) after 0.21 s. "
        "Rank 5 was done after 0.20 s. "
        "Rank 0 raised RuntimeError in operation 1 (`step`) after 0.26 s. "
        "Ranks 2 and 4 were in operation 1 (`step`) when they were killed after 1.22 s. "
        "Rank 3 was in the record of operation 0 (`build`) when it was killed after 1.22 s."
    )
    drawn = render_failure(samples.report(result), result)
    section = drawn[drawn.index('id="ranks"') :].partition("</section>")[0]
    assert section.count("</li>") == 6
    assert "Rank 1 raised KeyError in the observation" in section
    assert "KeyError: &lt;script&gt;" in section
    assert samples.HOSTILE not in section
    assert 'aria-label="Rank 3: start: 0.010 s to 0.020 s; set-up' in section
    assert "style=" not in section, "the policy of the page admits no style but its own"


def test_a_result_that_does_not_say_where_ranks_were_has_no_such_section() -> None:
    assert 'id="ranks"' not in render_failure(samples.report(samples.crash()), samples.crash())
    assert told_ends(samples.crash()) == ""


def test_ranks_at_a_deadline_and_before_the_first_operation_have_their_words() -> None:
    waits = tuple(RankCourse(rank, ((-1, "construct", 0.1),), "stuck", 20.0) for rank in range(3))
    died = RankCourse(3, ((-1, "start", 0.0),), "died", 0.1, "signal SIGKILL")
    assert told_ends(replace(samples.crash(), courses=(*waits, died))) == (
        "Rank 3 ended without a word (signal SIGKILL) in the start of the process group after 0.10 s. "
        "Ranks 0, 1 and 2 were still in the set-up of the system when the time was up after 20.00 s."
    )


def test_a_role_is_told_in_plain_words_where_its_name_is_none() -> None:
    (load,) = grouped(
        differences(
            (8, "live", "param", "a", "bits"), (8, "live", "exp_avg", "a", "bits"), (8, "live", "x", "a", "bits")
        ),
        Elements(),
    )
    assert [role.meaning for role in load.roles] == ["first moments", "parameters", ""]


def page_of(result: Result) -> list[str]:
    told = failure_page(result, KnownIssues())
    return [told.title, told.effect, *(command.text for command in told.commands)]


def test_commands_are_those_that_can_be_used() -> None:
    crash = page_of(replace(samples.crash(), system="reference"))
    assert crash[1].startswith("The save raises, and the run ends there")
    assert [text.split()[1] for text in crash[2:]] == ["replay", "shrink", "explain"]
    assert [text.split()[1] for text in page_of(samples.unknown())[2:]] == ["replay", "explain"]


@pytest.mark.parametrize(
    ("result", "effect"),
    [
        (samples.hang(None), "All ranks wait for each other"),
        (replace(samples.mismatch(), explanations=()), "The resumed run goes on from another state"),
        (differences((3, "live", "step", "a", "extra")), "Saving, which must only read"),
        (differences((3, "written", "step", "a", "bits")), "What is resumed from this checkpoint"),
        (samples.passing(), ""),
    ],
)
def test_what_a_failure_does_to_training_is_a_sentence(result: Result, effect: str) -> None:
    assert failure_page(replace(result, explanations=()), KnownIssues()).effect.startswith(effect)


def test_the_first_deviating_element_has_its_bits() -> None:
    told = failure_page(samples.pictured(), KnownIssues())
    tensors = {(role.role, t.name): t for op in told.operations for role in op.roles for t in role.tensors}
    param = element_of(tensors["param", "up.weight"])
    assert param is not None
    assert param.index == (0, 1)
    assert [row.number for row in param.rows] == ["1.0", "-1.0"]
    assert [part.name for part in param.rows[0].parts] == ["sign", "exponent", "mantissa"]
    assert [part.digits for part in param.rows[1].parts] == ["1", "01111111", "0" * 23]
    assert param.distance == "2130706432 ULP apart; bit 31 differs"
    nan = element_of(tensors["exp_avg_sq", "up.weight"])
    assert nan is not None
    assert nan.rows[1].meaning == "quiet NaN, payload 0x0"
    assert nan.distance == "5 bits differ, the highest is 13"
    zero = element_of(tensors["quant", "up.weight"])
    assert zero is not None
    assert [row.meaning for row in zero.rows] == ["zero", "negative zero"]
    missing = element_of(tensors["step", "up.weight"])
    assert missing is not None
    assert [row.number for row in missing.rows] == ["2.0", "nothing"]
    counts = element_of(tensors["counts", "up.weight"])
    assert counts is not None
    assert counts.rows[1].hexadecimal == "0xc000000000000000"
    assert owners_of(tensors["param", "up.weight"]) == "rank 0: [0:2, 0:6]; rank 1: [2:4, 0:6]"
    assert owners_of(tensors["master", "up.weight"]) == "rank 0: all of it"
    assert span_of(tensors["param", "up.weight"].first) == "[0, 1] to [3, 5]"
    assert runs_of(tensors["param", "up.weight"].first) == "1, 7, 23"
    assert told.first is not None
    assert told.first.name == "up.weight"


def test_without_elements_the_page_has_what_the_difference_says() -> None:
    text = render_failure(samples.report(), replace(samples.pictured(), elements=b""))
    assert '<data id="elements"' not in text
    assert "data-picture=" not in text
    assert "0x3f800000" in text


def test_damaged_elements_cost_the_pictures_alone() -> None:
    text = render_failure(samples.report(), replace(samples.pictured(), elements=b"damaged"))
    assert '<data id="elements"' not in text


def test_a_bare_assertion_has_its_place() -> None:
    trace = 'File "/x/site-packages/lib/load.py", line 7, in load\n    assert same(a, b)\n'
    error = Failure("AssertionError", "", 0, trace, 8)
    text = render_failure(samples.report(), replace(samples.crash(), error=error, failed_op=FailedOp(8, "load")))
    assert "<h1>Loading failed an assertion in load (load.py:7)</h1>" in text
    assert "<code>lib/load.py:7, in load</code>" in text
    assert "assert same(a, b)" in text
    assert "AssertionError on rank 0: assert same(a, b), at lib/load.py:7, in load" in text


@pytest.mark.parametrize(
    ("dtype", "pattern", "meaning"),
    [
        ("fp32", 0x7F800000, "infinity"), ("fp32", 0xFF800000, "minus infinity"), ("fp32", 1, "subnormal"),
        ("fp32", 0x7FC00123, "quiet NaN, payload 0x123"), ("fp32", 0x7F800001, "signalling NaN, payload 0x1"),
        ("bf16", 0x8000, "negative zero"), ("fp16", 0, "zero"), ("fp64", 1 << 62, ""), ("int64", 0, ""),
        ("fp8e4m3", 0x7F, "NaN"), ("fp8e4m3", 0x7E, ""), ("fp8e4m3", 0xFF, "NaN"),
    ],
)  # fmt: skip
def test_what_a_number_does_not_say(dtype: str, pattern: int, meaning: str) -> None:
    assert meaning_of(dtype, pattern) == meaning
    assert int("".join(part.digits for part in parts_of(dtype, pattern)), 2) == pattern


def test_which_bits_differ() -> None:
    assert differing(5, 5) == "no bit differs"
    assert differing(0, 4) == "bit 2 differs"
    assert differing(0, 5) == "2 bits differ, the highest is 2"


def test_an_error_of_ours_costs_the_calls_and_not_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(result: Result) -> None:
        raise IndexError("operation 9 of 3")

    monkeypatch.setattr(page, "case_of", broken)
    filing = page.filing_of(differences((4, "live", "exp_avg", "tower.weight", "bits")), None)
    assert "an error of shardproof's own" in filing.reason
    assert "operation 9 of 3" in filing.reason


def test_a_failure_on_what_upstream_never_supported_says_so_on_its_page_and_on_its_card() -> None:
    result = replace(samples.crash(), outside_support=("torch 2.15.0: upstream tested with 2.10",))
    sentence = "Upstream does not say that it works with torch 2.15.0."
    assert sentence in render_failure(samples.report(result), result)
    assert sentence in render_index(samples.report(result))
    assert sentence not in render_index(samples.report(samples.crash()))


def test_a_traceback_in_the_reason_is_folded_and_escaped() -> None:
    result = replace(samples.unknown(), reason=f"lib 1 cannot be imported here: S\n{samples.HOSTILE}\nValueError: S")
    drawn = render_failure(samples.report(result), result)
    assert "<details><summary>lib 1 cannot be imported here: S</summary><pre" in drawn
    assert samples.HOSTILE not in drawn
