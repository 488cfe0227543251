"""One vocabulary: what a result means to a reader has one word, the same in progress, on the terminal, on the page, in
JUnit, in the summary and in the JSON."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest
import report_samples as samples
from shardproof.issues.known_issues import KnownIssues
from shardproof.report.html import render_failure, render_index
from shardproof.report.json_report import to_json
from shardproof.report.junit import render_junit
from shardproof.report.progress import Progress
from shardproof.report.summary import render_summary
from shardproof.report.text import render_text
from shardproof.verdict import Standing, exit_status

WORDS = "3 pass, 3 new, 1 known, 2 unsupported, 1 unknown"


def test_every_report_says_the_same_words() -> None:
    report = samples.report()
    assert report.in_words == WORDS
    assert f"\n{WORDS}\n" in render_text(report)
    assert WORDS in render_index(report)
    assert f"\n{WORDS}.\n" in render_summary(report)
    assert to_json(report)["run"]["standings"] == {"pass": 3, "new": 3, "known": 1, "unsupported": 2, "unknown": 1}


def test_progress_says_the_same_words() -> None:
    stream = io.StringIO()
    report = samples.report()
    with Progress({result.id: 1.0 for result in report.results}, stream) as progress:
        for result in report.results:
            progress.finished(result)
    assert ", 3 new, 1 known, 2 unsupported, 1 unknown in " in stream.getvalue()
    assert "failed" not in stream.getvalue()


def test_junit_begins_each_message_with_the_word() -> None:
    cases = ElementTree.fromstring(render_junit(samples.report())).iter("testcase")
    messages = [child.get("message", "") for case in cases for child in case if child.get("type") != "missing"]
    words = [message.split(":")[0] for message in messages]
    assert sorted(words) == ["known", "new", "new", "new", "unknown", "unsupported", "unsupported"]


def test_beside_no_new_failures_nothing_is_new_or_red() -> None:
    """What is known may be met for the first time, and is not marked as something to look at."""
    report = replace(samples.report(samples.passing(), samples.hang()), missing=())
    assert not exit_status(report.counts, report.known)
    page = render_index(report)
    assert "Nothing new: 1 of 2 scenarios fail, with known defects" in page
    new = page[page.index('<section id="new">') : page.index('<section id="known">')]
    assert "None." in new
    known = page[page.index('<section id="known">') : page.index('<section id="explore">')]
    assert not re.search(r"\b\d+ new\b", known)


def test_a_run_that_ends_with_0_in_spite_of_failures_says_why_on_the_terminal() -> None:
    report = replace(samples.report(samples.passing(), samples.hang()), missing=())
    assert (
        "\nExit status 0 in spite of 1 failure: it is a defect that is known, and nothing new failed.\n"
        in render_text(report)
    )
    assert "in spite" not in render_text(replace(report, results=(*report.results, samples.crash())))


@pytest.mark.parametrize("standing", Standing)
def test_a_word_is_a_verdict_or_says_which_failures(standing: Standing) -> None:
    found = [result for result in samples.every_kind() if result.counts_as is standing]
    assert found
    assert all(result.verdict.is_failure for result in found) == (standing in (Standing.NEW, Standing.KNOWN))


def test_a_file_says_that_its_failure_looks_known() -> None:
    """A scenario file is not compared with what is known: its failure is new there, and the issue is still named."""
    issues = KnownIssues()
    report = replace(samples.report(samples.mismatch(), samples.passing()), issues=issues)
    assert report.resembling == {}
    object.__setattr__(issues, "match", lambda result: "torch-fsdp2-9")
    assert report.resembling == {"torch-fsdp2-9": 1}
    cured = "no cure tells it from another one with this face; `--known` counts it as that issue"
    assert f"\nit looks like known issue torch-fsdp2-9: {cured}\n" in render_text(report)
    new = next(result for result in report.results if report.resembled(result))
    for page in (render_index(report), render_failure(report, new)):
        assert page.count("looks like known issue torch-fsdp2-9</span>") == 1


def test_a_planted_fault_that_changed_nothing_is_told_beside_the_pass() -> None:
    why = "the planted fault had no effect: nothing that was observed is other than without it"
    idle = replace(samples.passing(faults="stale-index-map"), reason=why)
    told = render_text(samples.report(idle, samples.passing(1)))
    assert "stale-index-map had no effect in 1 of 1: `shardproof faults` runs each where it strikes" in told
    assert "had no effect" not in render_text(samples.report(samples.passing()))
