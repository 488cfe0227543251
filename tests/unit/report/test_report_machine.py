"""The forms that other tools read: JSON, JUnit XML, the job summary."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import junit_schema
import pytest
import report_samples as samples
from shardproof.errors import UsageError
from shardproof.report.files import write_reports
from shardproof.report.json_report import render_json
from shardproof.report.junit import NAME_CHARACTERS, render_junit
from shardproof.report.publish import publish
from shardproof.report.summary import LIMIT_BYTES, render_summary
from shardproof.result import Failure, Result


def test_json_by_the_contract() -> None:
    data = json.loads(render_json(samples.report()))
    assert data["run"].keys() >= {"versions", "seed", "command", "counts"}
    assert data["run"]["counts"]["mismatch"] == 2
    assert data["run"]["missing"] == [samples.scenario(seed="99").id]
    assert [Result.from_json(r) for r in data["results"]] == list(samples.every_kind())
    assert data["results"][2]["previous"] == {"run": "20260101-030405-abcd", "verdict": "mismatch"}


def test_json_of_an_empty_run() -> None:
    assert json.loads(render_json(replace(samples.report(), results=())))["results"] == []


def junit_cases() -> list[ElementTree.Element]:
    return list(ElementTree.fromstring(render_junit(samples.report())).iter("testcase"))


def test_junit_is_xml_with_unique_names_and_every_scenario() -> None:
    names = [case.get("name", "") for case in junit_cases()]
    assert len(names) == len(set(names)) == len(samples.every_kind()) + 1
    assert max(map(len, names)) <= NAME_CHARACTERS


def test_junit_outcomes() -> None:
    outcomes = [[child.tag for child in case] for case in junit_cases()]
    flat = [tags[0] if tags else "pass" for tags in outcomes]
    # The suite of torch-fsdp2 comes first, then the reference's only case.
    assert flat == [
        "pass", "failure", "failure", "failure", "skipped", "skipped", "skipped", "error", "pass", "pass", "error",
    ]  # fmt: skip
    suites = ElementTree.fromstring(render_junit(samples.report())).findall("testsuite")
    assert suites[0].get("failures") == "3"
    assert suites[0].get("skipped") == "3"
    assert {s.get("name") for s in suites} == {"torch-fsdp2", "reference"}


def test_junit_says_what_and_how_to_replay() -> None:
    text = render_junit(samples.report())
    assert f"shardproof replay {samples.mismatch().id}" in text
    assert "known issue torch-fsdp2-1" in text
    assert "\x00" not in text


def test_junit_stays_below_the_limit_of_gitlab() -> None:
    huge = replace(samples.mismatch(), differences=samples.mismatch().differences * 2000)
    results = tuple(replace(huge, scenario=samples.scenario(seed=str(n))) for n in range(5))
    assert len(render_junit(samples.report(*results)).encode()) < 200_000


HOSTILE = "]]>\x00\x1b[31m\ud800\ufffe <a href=\"x\" b='y'>&amp;\n\t" + "long " * 2000
"""What XML cannot express, what ends a section of it, quotes of both kinds, and no end."""


def test_junit_is_valid_whatever_things_are_called() -> None:
    named = replace(samples.mismatch(), system=HOSTILE, version=HOSTILE)
    raised = replace(samples.crash(), error=Failure(HOSTILE, HOSTILE, 0, HOSTILE, 3), known_issue=HOSTILE)
    new = replace(samples.crash(seed="1"), error=Failure(HOSTILE, HOSTILE, 0, HOSTILE, 3))
    refused = replace(samples.unsupported(), reason=HOSTILE)
    report = samples.report(*samples.every_kind(), named, raised, new, refused)
    run = replace(report.run, versions={HOSTILE: HOSTILE})
    for one in (samples.report(), replace(report, run=run), replace(report, results=(), missing=())):
        assert junit_schema.complaints(render_junit(one).encode()) == []


def test_the_schema_notices_what_is_wrong() -> None:
    right = render_junit(samples.report())
    for wrong in (
        right.replace('tests="', 'tests="-'), right.replace("<testsuites ", '<testsuites id="x" ', 1),
        right.replace("<skipped ", "<skip ").replace("</skipped>", "</skip>"), right.replace(' time="', ' time="1e'),
        right.replace("<testcase ", "<testcase shard='1' ", 1), right[:-20],
    ):  # fmt: skip
        assert junit_schema.complaints(wrong.encode()) != []


def test_the_summary_is_inert_markdown_within_its_limit() -> None:
    text = render_summary(samples.report())
    assert "<script>" not in text
    assert "| torch-fsdp2 |" in text
    assert "1 planned scenarios have no verdict" in text


def test_a_summary_of_thousands_of_causes_is_cut_and_says_so() -> None:
    letters = str.maketrans("0123456789", "abcdefghij")
    causes = (
        replace(samples.crash(seed=str(n)), error=Failure("E", str(n).translate(letters) + "*" * 190))
        for n in range(3000)
    )
    text = render_summary(samples.report(*causes))
    assert len(text.encode()) <= LIMIT_BYTES
    assert "more causes, see the report" in text


def test_all_files_are_written(tmp_path: Path) -> None:
    page = write_reports(samples.report(), tmp_path / "out", tmp_path / "r.json", tmp_path / "sub" / "r.xml")
    assert page == tmp_path / "out" / "index.html"
    assert page.is_file()
    assert (tmp_path / "out" / "summary.md").is_file()
    assert (tmp_path / "out" / "failures" / f"{samples.crash().id}.html").is_file()
    assert json.loads((tmp_path / "r.json").read_text())
    assert ElementTree.parse(tmp_path / "sub" / "r.xml")
    assert not list(tmp_path.rglob("*.partial"))


def test_a_place_that_cannot_be_written_is_a_usage_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="writable place"):
        publish(tmp_path / "file" / "x.json", "{}")
