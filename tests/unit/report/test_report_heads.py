"""What reports say of a head: what of the walk was lost and why, what is refused there alone, what became of cures."""

from __future__ import annotations

from dataclasses import replace

import report_samples as samples
from shardproof.issues.cure_check import NOT_SHOWN, REPAIRED, STALE, CureCheck
from shardproof.report import json_report
from shardproof.report.heads_text import SHOWN, describe_heads
from shardproof.report.html import render_index
from shardproof.report.model import Report
from shardproof.report.summary import render_summary
from shardproof.report.text import render_text
from shardproof.result import Result
from shardproof.verdict import ExitStatus, Verdict

HEAD = "2.20.0+git.1a2b3c4"
REASON = "`common.pt` is not there; <b>0.19</b> writes *common_state*"


def on_head(result: Result, seed: int) -> Result:
    scenario = replace(result.scenario, version="git:1a2b3c4+cured", seed=seed)
    return replace(result, scenario=scenario, version=f"{HEAD}+cured")


def unknown(seed: int, reason: str = REASON) -> Result:
    return on_head(replace(samples.passing(), verdict=Verdict.UNKNOWN, reason=f"{reason}\nand more of it"), seed)


def refused(seed: int) -> Result:
    return on_head(replace(samples.passing(), verdict=Verdict.UNSUPPORTED, reason="the argument came with 2.21"), seed)


def check(cure: str, standing: str, shows: str = "") -> CureCheck:
    return CureCheck("torch-fsdp2", f"{HEAD}+cured", cure, "the code moved", standing, shows)


def report(*results: Result, checks: tuple[CureCheck, ...] = ()) -> Report:
    return replace(samples.report(*results), missing=(), before={}, checks=checks)


def passing(count: int) -> list[Result]:
    return [on_head(samples.passing(), seed) for seed in range(100, 100 + count)]


def test_a_report_of_releases_says_nothing_of_heads() -> None:
    assert describe_heads(samples.report()) == ()
    assert 'id="on-heads"' not in render_index(samples.report())


def test_what_was_lost_is_a_share_and_a_reason() -> None:
    found = report(*passing(6), unknown(1), unknown(2))
    assert [told.lines for told in describe_heads(found)] == [
        (f"25 % of the walk was lost: 2 scenarios, because: {REASON}",)
    ]
    assert f"torch-fsdp2 {HEAD}: 25 % of the walk was lost: 2 scenarios, because: {REASON}\n" in render_text(found)
    assert "&lt;b&gt;0.19&lt;/b&gt;" in render_index(found)
    assert "because: \\`common.pt\\` is not there; &lt;b>0.19&lt;/b> writes \\*common\\_state\\*" in render_summary(
        found
    )


def test_only_so_many_reasons_are_told() -> None:
    found = report(*passing(1), *(unknown(n, f"reason {n}") for n in range(SHOWN + 2)))
    (told,) = describe_heads(found)
    assert told.lines[-1] == "and 2 reasons more, among the causes"
    assert len(told.lines) == SHOWN + 1


def test_a_head_that_lost_nothing_says_so() -> None:
    (told,) = describe_heads(report(*passing(3)))
    assert told.lines == (
        "nothing of the walk was lost: of its 3 scenarios the newest release refuses what is refused here",
    )


def test_lost_coverage_is_told_and_is_no_pass_above_a_tenth() -> None:
    few, many = report(*passing(9), refused(1)), report(*passing(8), refused(1), refused(2))
    newest = few.heads[0].lost.newest
    assert f"lost coverage: 1 of 10 scenarios (10%) are refused here, and not on {newest}:" in render_text(few)
    assert "lost coverage: 2 × the argument came with 2.21" in render_text(many)
    assert (few.status, many.status) == (ExitStatus.OK, ExitStatus.HARNESS)
    assert "what passes there is no pass" in render_index(many)
    failing = on_head(samples.mismatch(), 7)
    assert report(*passing(8), refused(1), refused(2), failing).status is ExitStatus.FAILURE


def test_cures_that_do_not_apply_are_sorted_out() -> None:
    checks = (
        check("one", REPAIRED),
        check("two", STALE, "crash: boom"),
        check("three", NOT_SHOWN),
        check("4", REPAIRED),
    )
    (told,) = describe_heads(report(*passing(2), checks=checks))
    assert told.lines[1:] == (
        "repaired there, and its entry does not say so yet: one, 4",
        "stale cure, to be written anew: two; without it: crash: boom",
        "cures that do not apply, and nothing is shown of their defects: three",
    )
    (head,) = json_report.to_json(report(*passing(2), checks=checks))["run"]["heads"]
    assert [each["standing"] for each in head["cures"]] == [REPAIRED, STALE, NOT_SHOWN, REPAIRED]


def test_a_release_that_is_not_declared_is_no_head_and_its_cures_are_not_stale() -> None:
    older = replace(samples.passing(), version="2.0.1+cured")
    unfit = replace(check("two", STALE, "crash: boom"), version="2.0.1+cured")
    found = report(older, checks=(unfit, replace(check("one", REPAIRED), version="2.0.1+cured")))
    (told,) = describe_heads(found)
    assert told.lines[1] == "known defects that do not show there: one"
    assert told.lines[2] == "known defect whose cure is not made for this release: two; without it: crash: boom"
    assert "**torch-fsdp2 2.0.1** is a release that" in render_summary(found)
    page = render_index(found)
    assert "a head" not in page
    assert page.index("Known defects that were seen") < page.index('<section id="on-releases">')
