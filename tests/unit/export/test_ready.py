"""The findings that can be sent: which they are, what is checked of each, and the page that says so.

*Verifies*: `shardproof.export.ready`, with runs and exports that are made up. *Does not verify*: the scripts; nightly
exports every regression (tests/conformance/test_exports.py).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from shardproof.cli.ready import is_cloned
from shardproof.errors import UsageError
from shardproof.export.case import NoExportError
from shardproof.export.job import Exported
from shardproof.export.newest import HEAD, Newest
from shardproof.export.ready import Checked, check, page, ready
from shardproof.protocol.registry import all_systems, system_named
from shardproof.report.publish import publish
from shardproof.result import FailedOp, Result
from shardproof.scenario import Scenario
from shardproof.space.files import space_names
from shardproof.verdict import Verdict

FINDINGS = ready(all_systems())
SCENARIO = Scenario(system="deepspeed")
FAILED = Result(SCENARIO, "deepspeed", "0.19.8", Verdict.MISMATCH, failed_op=FailedOp(3, "step"))


def exported(passes: bool | None) -> Exported:
    cured = None if passes is None else SimpleNamespace(passes=passes)
    return cast(Exported, SimpleNamespace(cured=cured, together=None, wrong=passes is False))


def checked(on_main: Result | UsageError | None, *, script: Exported | NoExportError) -> Checked:
    def examined(scenario: Scenario) -> Result:
        if scenario.version != HEAD:
            return FAILED
        if isinstance(on_main, UsageError):
            raise on_main
        assert on_main is not None
        return on_main

    def export(result: Result, known: str, folder: Path, newest: Newest) -> Exported:
        assert (result, known) == (FAILED, FINDINGS[0].id)
        if isinstance(script, NoExportError):
            raise script
        return script

    return check(FINDINGS[0], Path("out/one"), SCENARIO, examined, export, cloned=on_main is not None)


def test_those_that_are_ready_are_counted_findings_with_a_scenario_and_a_cure() -> None:
    assert len(FINDINGS) == 11
    for finding in FINDINGS:
        assert finding.novelty.on_a_release, finding.id
        assert finding.cure, finding.id
        assert finding.scenarios[0] in space_names()
        assert finding.regressions[0] == finding.name
        assert system_named(finding.system).export is not None


def test_a_script_that_shows_it_can_be_sent() -> None:
    row = checked(None, script=exported(True))
    assert (row.script, row.sound) == ("shows it; passes with the cure", True)
    assert row.main == "not asked: give a clone, `--clone deepspeed=DIR`"
    assert checked(None, script=exported(None)).script == "shows it"


def test_a_script_that_fails_with_the_cure_too_cannot() -> None:
    row = checked(None, script=exported(False))
    assert (row.script, row.sound) == ("shows it; DOES NOT PASS with the cure", False)


def test_a_finding_without_a_script_cannot() -> None:
    row = checked(None, script=NoExportError.because(FAILED, "no script says how"))
    assert row.script.startswith("none: no script can be written")
    assert not row.sound


@pytest.mark.parametrize(
    ("now", "said", "sound"),
    [
        (replace(FAILED, version="0.20.0+git.1a2b3c4"), "there on 0.20.0+git.1a2b3c4", True),
        (replace(FAILED, version="0.20.0", verdict=Verdict.PASS, failed_op=None), "gone on 0.20.0", False),
        (replace(FAILED, version="0.20.0", verdict=Verdict.CRASH), "crash on 0.20.0: look at it", True),
        (UsageError("no such commit\nallowed: one"), "could not run: no such commit", True),
    ],
    ids=["there", "gone", "other", "not run"],
)
def test_the_newest_commit_is_asked_where_there_is_a_clone(now: Any, said: str, sound: bool) -> None:
    row = checked(now, script=exported(True))
    assert (row.main, row.sound) == (said, sound)


def test_a_clone_is_of_a_system_or_of_its_package() -> None:
    assert is_cloned("automodel", ["nemo-automodel=../Automodel"])
    assert is_cloned("automodel", ["deepspeed=../DeepSpeed", "automodel=../Automodel"])
    assert not is_cloned("automodel", ["deepspeed=../DeepSpeed"])


def test_the_page_says_what_was_checked_and_where_it_is_public(tmp_path: Path) -> None:
    row = Checked(FINDINGS[0], Path("out/one"), "shows it", "deepspeed 0.19.8", "there on 0.20.0", sound=True)
    text = page([row], "2026-11-28", Path("out"))
    assert "Checked on 2026-11-28." in text
    public = FINDINGS[0].novelty.upstream or f"nothing found on {FINDINGS[0].novelty.searched}"
    cells = f"| {FINDINGS[0].novelty.harm} | shows it | deepspeed 0.19.8 | there on 0.20.0 | {public} |"
    assert f"| [{FINDINGS[0].id}](one/issue.md) {cells}" in text
    for _ in range(2):  # an earlier page is ours, and may be written over
        assert publish(tmp_path / "index.md", text).read_text("utf-8") == text
