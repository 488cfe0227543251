"""`shardproof port` and `shardproof claims` on a library of two files and its clone, with real ranks."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from shardproof.cli.main import entry
from shardproof.errors import UsageError
from shardproof.folders import CACHE_VARIABLE
from shardproof.heads.claims import log_since, searched
from shardproof.heads.covering import covering, lost
from shardproof.heads.port import Asked, Misfit, New, Port, Repair
from shardproof.heads.port_page import page_of
from shardproof.heads.port_text import document, render
from shardproof.heads.regressions import State, judged, placed_on, regressions, there
from shardproof.issues.findings import section_of
from shardproof.issues.known_issues import KnownIssues, known_issues_of
from shardproof.protocol.registry import system_named
from shardproof.protocol.releases import package_of
from shardproof.result import Result
from shardproof.scenario import Scenario
from shardproof.verdict import ExitStatus, Verdict
from shardproof.world.overlay import clone_variable

from tests import report_samples as samples
from tests.unit.heads_system import HEADS_SYSTEM, REPAIRED, TRAIN, commit, write_tree
from tests.unit.overlay_system import write_wheel_of

PLUGIN = ("--plugin", "tests.unit.heads_system")
FINDINGS = section_of(HEADS_SYSTEM).findings
KNOWN = KnownIssues(known_issues_of(HEADS_SYSTEM))


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A clone whose tag `same` has what 1.0 has, `repaired` one defect less, `renamed` another argument too, `broken` a
    defect that nobody knows, and whose package index holds 1.0."""
    folder = tmp_path_factory.mktemp("heads")
    where = write_tree(folder / "clone")
    commit(where, "Release 1.0", tag="v1.0")
    commit(where, "Nothing that matters", tag="same")
    write_tree(where, version="1.1", defects=REPAIRED)
    commit(where, "Repair it (#80)", "Closes #77", tag="repaired")
    write_tree(where, version="1.1", defects=REPAIRED, train=TRAIN.replace("depth", "layers"))
    commit(where, "Rename", tag="renamed")
    write_tree(where, version="1.1", defects="DEFECT = 0\nOTHER = 8\n")
    commit(where, "Break", tag="broken")
    with pytest.MonkeyPatch.context() as patch:
        (folder / "wheels").mkdir()
        write_wheel_of(write_tree(folder / "tree"), folder / "wheels", "heads_lib", "1.0")
        for name in [name for name in os.environ if name.startswith("PIP_")]:
            patch.delenv(name)
        patch.setenv("PIP_CONFIG_FILE", os.devnull)
        patch.setenv("PIP_NO_INDEX", "1")
        patch.setenv("PIP_FIND_LINKS", str(folder / "wheels"))
        patch.setenv(CACHE_VARIABLE, str(folder / "cache"))
        patch.setenv(clone_variable("heads-lib"), str(where))
        yield where


def run(folder: Path, *words: str) -> int:
    return entry([*words, "--json", str(folder / "found.json"), *PLUGIN])


def found_in(folder: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads((folder / "found.json").read_text("utf-8"))
    return found


# --- port ----------------------------------------------------------------------------------------------------


@pytest.mark.nightly
@pytest.mark.real
def test_a_head_on_which_nothing_changed_ends_in_one_line(
    clone: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, "port", "heads@git:same", "--out", str(tmp_path / "out")) == ExitStatus.OK
    said = capsys.readouterr().out
    assert said.endswith("\nnothing changed: 1.0 is declared in releases.toml\n")
    assert "1. What of ours no longer fits: nothing: everything fits" in said
    found = found_in(tmp_path)
    assert found["tried"]["regressions"] == 2  # type: ignore[index]
    assert found["still_there"] == 2
    page = (tmp_path / "out/port.html").read_text("utf-8")
    assert "heads git:same" in page


@pytest.mark.nightly
@pytest.mark.real
def test_what_is_repaired_is_told_with_its_commit(
    clone: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, "port", "heads@git:repaired", "--out", str(tmp_path / "out"), "--quick") == ExitStatus.OK
    said = capsys.readouterr().out
    assert "2. What is repaired: 1\n   heads-77: 77 passes\n" in said
    assert "Repair it (#80)  (names #77)" in said
    assert said.endswith("1 entries of issues.toml are out of date\n")


@pytest.mark.nightly
@pytest.mark.real
def test_an_argument_that_was_renamed_on_purpose_is_named_in_one_line(
    clone: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, "port", "heads@git:renamed", "--out", str(tmp_path / "out")) == ExitStatus.HARNESS
    said = capsys.readouterr().out
    assert "1. What of ours no longer fits: 1\n   train() takes no 'depth' any more; new there: 'layers'" in said
    (misfit,) = found_in(tmp_path)["misfits"]  # type: ignore[misc]
    assert misfit["place"] == "headslib/core/loop.py:1"
    assert misfit["called"].startswith("tests/unit/heads_system.py:")
    assert len(misfit["results"]) > 1, "one line for all that ran into it"


@pytest.mark.real
def test_a_failure_that_nobody_knows_is_new(clone: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, "port", "heads@git:broken", "--out", str(tmp_path / "out")) == ExitStatus.FAILURE
    (new,) = found_in(tmp_path)["new"]  # type: ignore[misc]
    assert "param bits" in new["signature"]
    failed = new["results"][0]
    capsys.readouterr()
    assert entry(["explain", failed, "--out", str(tmp_path / "out")]) == ExitStatus.OK
    assert f'href="failures/{failed}.html"' in (tmp_path / "out/port.html").read_text("utf-8")


@pytest.mark.real
def test_a_tree_that_cannot_be_imported_is_one_line(
    clone: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tree = write_tree(tmp_path / "tree", train="import no_such_dependency\n")
    words = ("port", f"heads@path:{tree}", "--out", str(tmp_path / "out"))
    assert run(tmp_path, *words) == ExitStatus.HARNESS
    said = capsys.readouterr().out
    assert "ModuleNotFoundError: No module named 'no_such_dependency': the tree cannot be imported" in said


@pytest.mark.parametrize(
    ("words", "said"),
    [(("heads",), "a version without cures"), (("heads@git:same+cured",), "a version without cures"),
     (("torch-fsdp2@2.13.0",), "SYSTEM"), (("heads@git:v99",), "a commit of the clone"),
     (("heads@git:same", "--since", "x"), "version of heads-lib")],
    ids=["no version", "cured", "no package", "no commit", "no release"],
)  # fmt: skip
def test_bad_input_of_port(
    clone: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], said: str
) -> None:
    assert entry(["port", *words, "--out", str(tmp_path / "out"), *PLUGIN]) == ExitStatus.USAGE
    assert said in capsys.readouterr().err


# --- claims --------------------------------------------------------------------------------------------------


def test_a_number_that_landed_is_found_without_a_run(clone: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert entry(["claims", "heads", "--rev", "main", *PLUGIN]) == ExitStatus.OK
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("since v1.0: 1 entries name a number of someone/heads, 1 of them have landed")
    assert lines[1] == "  heads-77"
    assert lines[2].endswith("Repair it (#80)")
    assert len(lines) == 3


@pytest.mark.real
def test_a_claim_that_is_out_of_date_ends_with_1(
    clone: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, "claims", "heads", "--rev", "repaired", "--run") == ExitStatus.FAILURE
    said = capsys.readouterr().out
    assert "heads-77: repaired; out of date: the entry says nothing of a repair" in said
    assert "77 pass, repaired" in said
    (found,) = found_in(tmp_path)["systems"]  # type: ignore[misc]
    assert found["claims"][0]["landed"][0]["number"] == 77
    assert run(tmp_path, "claims", "heads", "--rev", "same", "--run") == ExitStatus.OK


def test_where_the_search_begins(clone: Path) -> None:
    package = package_of(HEADS_SYSTEM)
    assert log_since(package, "main", "").base == "v1.0"
    assert log_since(package, "main", "2026-01-02").since == "2026-01-02"
    assert len(log_since(package, "main", "repaired").commits) == 2
    assert searched(HEADS_SYSTEM, "main", "repaired").claims == ()
    with pytest.raises(UsageError, match="a commit of the clone"):
        searched(HEADS_SYSTEM, "main", "no-such-tag")


@pytest.mark.parametrize(
    ("words", "said"),
    [(("heads", "--all"), "--all: given 'alone'"), (("torch-fsdp2",), "SYSTEM"), (("nothing",), "system: given")],
    ids=["all without run", "no package", "no system"],
)
def test_bad_input_of_claims(
    clone: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], said: str
) -> None:
    assert entry(["claims", *words, *PLUGIN]) == ExitStatus.USAGE
    assert said in capsys.readouterr().err


def test_without_a_clone_there_is_nothing_to_search(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in os.environ if name.startswith("SHARDPROOF_CLONE_")]:
        monkeypatch.delenv(name)
    assert entry(["claims"]) == ExitStatus.USAGE
    assert "a clone of a library" in capsys.readouterr().err


# --- regressions on a head -----------------------------------------------------------------------------------


def test_the_regressions_of_a_system_have_their_entries() -> None:
    kept = regressions(HEADS_SYSTEM, FINDINGS)
    assert [(each.name, each.finding and each.finding.id) for each in kept] == [
        ("77", "heads-77"), ("elsewhere", "heads-elsewhere"),
    ]  # fmt: skip
    assert placed_on(replace(kept[0].scenario, version="1.0+cured:x", load_version="newest"), "git:main") == replace(
        kept[0].scenario, version="git:main+cured:x"
    )


def test_of_an_entry_with_several_regressions_a_quick_look_takes_one() -> None:
    system = system_named("megatron-core")
    findings = section_of(system).findings
    some, every = (regressions(system, findings, one_each=quick) for quick in (True, False))
    assert len(some) < len(every)
    assert {each.finding.id for each in every if each.finding} == {each.finding.id for each in some if each.finding}


@pytest.mark.parametrize(
    ("since", "fixed", "release", "is_there"),
    [("1.0", "", "1.0", True), ("1.0", "1.1", "1.0", True), ("1.0", "1.1", "1.1", False), ("1.2", "", "1.0", False),
     ("1.2 or earlier", "", "1.0", None), ("1.0", "main, so far", "1.0", None),
     ("0.9", "1.0, by pull request 7; taken back in 1.1", "1.0", None)],
)  # fmt: skip
def test_what_an_entry_says_of_a_release(since: str, fixed: str, release: str, is_there: bool | None) -> None:
    assert there(replace(FINDINGS[0], since=since, fixed=fixed), release) is is_there
    assert there(None, release) is None


@pytest.mark.parametrize(
    ("fixed", "verdict", "known", "state"),
    [("", Verdict.PASS, None, State.REPAIRED), ("1.0", Verdict.PASS, None, State.AS_SAID),
     ("", Verdict.MISMATCH, "heads-77", State.THERE), ("1.0", Verdict.MISMATCH, "heads-77", State.BACK),
     ("", Verdict.MISMATCH, None, State.OTHERWISE), ("", Verdict.UNKNOWN, None, State.NOTHING),
     ("", Verdict.UNSUPPORTED, None, State.NOTHING)],
)  # fmt: skip
def test_what_a_regression_says(fixed: str, verdict: Verdict, known: str | None, state: State) -> None:
    (kept, _) = regressions(HEADS_SYSTEM, FINDINGS)
    kept = replace(kept, finding=replace(FINDINGS[0], fixed=fixed))
    result = Result(kept.scenario, "heads", "1.1", verdict, known_issue=known)
    assert judged(kept, [result], "1.0", KNOWN).state is state


def test_a_defect_that_a_newer_release_than_the_head_repaired_did_not_come_back() -> None:
    (kept, _) = regressions(HEADS_SYSTEM, FINDINGS)
    kept = replace(kept, finding=replace(FINDINGS[0], since="0.1", fixed="1.0"))
    result = Result(kept.scenario, "heads", "0.9", Verdict.MISMATCH, known_issue="heads-77")
    assert judged(kept, [result], "1.0", KNOWN).state is State.THERE


def test_a_head_that_is_older_than_a_defect_has_not_repaired_it() -> None:
    (kept, _) = regressions(HEADS_SYSTEM, FINDINGS)
    result = Result(kept.scenario, "heads", "0.9+git.abc", Verdict.PASS)
    assert judged(kept, [result], "1.0", KNOWN).state is State.AS_SAID


def test_every_value_occurs_once() -> None:
    found = covering(HEADS_SYSTEM, "git:main", "1.0")
    assert {scenario.version for scenario in found} == {"git:main+cured"}
    assert {str(scenario.optimizer.kind) for scenario in found} == {"adamw", "sgd"}
    assert lost(HEADS_SYSTEM, "1.0", "1.0") == ()
    system = system_named("megatron-core")
    values = {str(scenario.checkpoint) for scenario in covering(system, "git:main", "0.16.1")}
    assert {"dp_zero", "fully_reshardable", "plain", "sharded"} <= values


def test_what_a_limit_takes_away_on_a_head_is_told() -> None:
    found = lost(system_named("megatron-core"), "0.16.1", "0.13.0")
    assert found
    assert all(each.reason and each.axis for each in found)


# --- what is shown -------------------------------------------------------------------------------------------


def sample(**more: object) -> Port:
    asked = Asked(HEADS_SYSTEM, "git:main", "1.0")
    found = Port(asked, "1.1+git.abc", tried={"checks": 3, "scenarios": 4, "regressions": 2}, planned=6)
    return replace(found, **more)  # type: ignore[arg-type]


def unknown(reason: str) -> Result:
    return Result(Scenario(system="heads"), "heads", "1.1", Verdict.UNKNOWN, reason=reason)


@pytest.mark.parametrize(
    ("more", "status", "said"),
    [
        ({}, 0, 'nothing changed: add [[release]] version = "1.1" to releases.toml of heads'),
        ({"called": "1.0+git.abc"}, 0, "nothing changed: 1.0 is declared in releases.toml"),
        ({"repaired": (Repair(FINDINGS[0], ("77",)),)}, 0, "1 entries of issues.toml are out of date"),
        ({"new": (New("heads crash: x", (samples.crash(),)),)}, 1, "1 failures are new"),
        ({"misfits": (Misfit("driver", "x", results=(unknown("x"),)),)}, 3, "it hides 1 of 6 results"),
        ({"interrupted": True}, 130, "interrupted: 6 of 6 scenarios were reached"),
    ],
    ids=["nothing", "declared", "repaired", "new", "misfit", "interrupted"],
)
def test_the_last_line_says_what_to_do(more: dict[str, object], status: int, said: str) -> None:
    found = sample(**more)
    assert found.status == status
    assert said in render(found).splitlines()[-1]
    assert document(found)["next"] == render(found).splitlines()[-1]


def test_hostile_text_reaches_no_page() -> None:
    hostile = "<script>alert(1)</script>"
    found = sample(
        misfits=(Misfit("driver", hostile, hostile, hostile, (unknown(hostile),)),),
        repaired=(Repair(None, (hostile,), (hostile,)),),
        new=(New(hostile, (samples.crash(),), (hostile,), hostile),),
    )
    page = page_of(found)
    assert "<script>alert" not in page
    assert "&lt;script&gt;alert(1)" in page
