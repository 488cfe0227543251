"""Sweeps and bisections: which versions they try, what they conclude, and what they print. No library, no ranks."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
from shardproof.errors import UsageError
from shardproof.investigate.bisect import Bisection, Finding, State, names, subject
from shardproof.investigate.sweep import Sweep, status, sweep, sweeps, versions
from shardproof.laboratory.laboratory import Laboratory
from shardproof.protocol.releases import Package, package
from shardproof.report.releases_text import render_finding, render_sweep, render_sweeps, tried_line
from shardproof.result import Failure, Result
from shardproof.scenario import Scenario
from shardproof.verdict import ExitStatus, Verdict
from shardproof.world.overlay import clone_variable

from tests.unit.overlay_system import FAKE, write_library


@pytest.fixture
def fake() -> Package:
    return package("fake-lib")


def result(version: str, state: str) -> Result:
    """A result by letter: P pass, F and G failures that differ, U unknown, S unsupported."""
    scenario = replace(FAKE, version=version)
    base = Result(scenario, "fake", version, Verdict.PASS, duration_s=1.0)
    match state:
        case "F" | "G":
            return replace(base, verdict=Verdict.CRASH, error=Failure(f"Error{state}", "broken"))
        case "U":
            return replace(base, version="", verdict=Verdict.UNKNOWN, reason="cannot be installed:\n  pip says\n  no")
        case "S":
            return replace(base, verdict=Verdict.UNSUPPORTED, reason="not in this release")
    return base


# --- versions ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("texts", "found"),
    [
        ([], ["1.0", "1.1", "1.2", "2.0"]),
        (["1.1..2.0"], ["1.1", "1.2", "2.0"]),
        (["1.0.5..1.9"], ["1.1", "1.2"]),
        (["1.2.."], ["1.2", "2.0"]),
        (["..1.1"], ["1.0", "1.1"]),
        (["2.0", "1.0..1.1", "1.1"], ["2.0", "1.0", "1.1"]),
        (["1.1", "git:a..b", "path:/x", "9.9"], ["1.1", "git:a..b", "path:/x", "9.9"]),
    ],
)
def test_versions_are_ranges_and_names(fake: Package, texts: list[str], found: list[str]) -> None:
    assert list(versions(fake, texts)) == found


@pytest.mark.parametrize("text", ["3.0..4.0", "2.0..1.0", "a..b", "main"])
def test_versions_that_are_none_are_refused(fake: Package, text: str) -> None:
    with pytest.raises(UsageError, match="given"):
        versions(fake, [text])


def test_a_range_in_the_wrong_order_is_told_so(fake: Package) -> None:
    with pytest.raises(UsageError, match=r"from the older release to the newer; for example: 1\.0\.\.2\.0$"):
        versions(fake, ["2.0..1.0"])


def test_a_package_with_one_release_has_no_ranges(fake: Package) -> None:
    one = replace(fake, releases=fake.releases[:1])
    with pytest.raises(UsageError, match=r"one by one.*example: --versions 1\.0 --versions 2\.0"):
        versions(one, ["1.0..2.0"])
    assert list(versions(one, ["1.0", "2.0"])) == ["1.0", "2.0"]


# --- sweeps --------------------------------------------------------------------------------------------------


class Pretend:
    """A laboratory that answers by letters, in the wrong order, and is interrupted at a `!`."""

    def __init__(self, states: dict[str, str]) -> None:
        self.states = states

    def examine(self, scenarios: Iterable[Scenario], observed: object) -> Iterator[Result]:
        for scenario in sorted(scenarios, key=lambda s: s.version, reverse=True):
            if self.states[scenario.version] == "!":
                raise KeyboardInterrupt
            yield result(scenario.version, self.states[scenario.version])


def swept(states: dict[str, str]) -> Sweep:
    return sweep(FAKE, list(states), cast(Laboratory, Pretend(states)))


@pytest.mark.parametrize(
    ("states", "status"),
    [
        ("PP", ExitStatus.OK), ("PF", ExitStatus.FAILURE), ("UF", ExitStatus.FAILURE), ("UP", ExitStatus.HARNESS),
        ("SS", ExitStatus.NOTHING_RUN), ("SP", ExitStatus.OK),
    ],
)  # fmt: skip
def test_the_status_of_a_sweep(states: str, status: ExitStatus) -> None:
    assert swept({f"1.{n}": state for n, state in enumerate(states)}).status == status


def test_rows_come_in_the_order_asked_for_and_ctrl_c_keeps_them() -> None:
    found = swept({"1.1": "P", "1.0": "!", "2.0": "F"})
    assert [row.asked for row in found.rows] == ["1.1", "2.0"]
    assert found.interrupted
    assert "interrupted" in render_sweep(found)
    assert found.to_json()["interrupted"]
    assert [row["asked"] for row in found.to_json()["rows"]] == ["1.1", "2.0"]


def test_the_table_of_a_sweep() -> None:
    found = swept({"1.0": "P", "1.1": "U", "1.2": "S", "2.0": "F"})
    rows = [
        replace(row, result=replace(row.result, emulated=("CUDA",), not_exercised=("overlap",))) for row in found.rows
    ]
    rows[0] = replace(rows[0], result=replace(rows[0].result, outside_support=("torch 9: upstream tested with 2",)))
    text = render_sweep(Sweep(FAKE, tuple(rows)))
    assert text == (
        "system=fake model=short program=train\n\n"
        "release  verdict      signature                seconds\n"
        "1.0      pass                                      1.0\n"
        "1.1      unknown      cannot be installed: no      1.0\n"
        "1.2      unsupported  not in this release          1.0\n"
        "2.0      crash        ErrorF: broken               1.0\n\n"
        "emulated: CUDA\n"
        "not exercised: overlap\n"
        "outside what upstream supports or tested: torch 9: upstream tested with 2 (1.0)\n"
    )
    assert "\x1b[" in render_sweep(found, colour=True)


def test_several_sweeps_are_a_table_of_verdicts() -> None:
    found = [swept({"1.0": "F", "1.1": "P"}), swept({"1.0": "S", "1.1": "U"})]
    assert render_sweeps(["one", "another"], found) == (
        "scenario  1.0          1.1\none       crash        pass\nanother   unsupported  unknown\n\n"
    )
    assert render_sweeps(["one"], found[:1]) == render_sweep(found[0])
    assert status(found) == ExitStatus.FAILURE
    assert status([swept({"1.0": "P"}), swept({"1.0": "S"})]) == ExitStatus.OK


def test_ctrl_c_ends_all_sweeps_and_keeps_what_is_there() -> None:
    states = {"1.1": "P", "1.0": "!", "2.0": "F"}
    found = sweeps([FAKE, FAKE], list(states), cast(Laboratory, Pretend(states)))
    assert [[row.asked for row in one.rows] for one in found] == [["1.1", "2.0"]]
    assert status(found) == 130
    assert "interrupted" in render_sweeps(["one", "another"], found)


def test_a_librarys_words_do_not_drive_the_terminal() -> None:
    loud = replace(result("1.0", "F"), error=Failure("E", "[red]\x1b[2Jboo[/red]"))
    text = render_sweep(Sweep(FAKE, (replace(swept({"1.0": "P"}).rows[0], result=loud),)))
    assert "[red][Nj" in text.replace("J", "j")
    assert "\x1b" not in text


# --- bisections ----------------------------------------------------------------------------------------------


def search(
    fake: Package, states: dict[str, str], good: str, bad: str, *, any_failure: bool = False
) -> tuple[Finding, list[str]]:
    tried: list[str] = []

    def examine(version: str) -> Result:
        tried.append(version)
        if states[version] == "!":
            raise KeyboardInterrupt
        return result(version, states[version])

    found = Bisection(examine, lambda *_: None, any_failure=any_failure).run(fake, good, bad)
    return found, tried


RELEASES = ["1.0", "1.1", "1.2", "2.0"]


@pytest.mark.parametrize(
    ("states", "good", "bad", "words", "before", "after", "skipped"),
    [
        ("PPPF", "1.0", "2.0", "last good", "1.2", "2.0", []),
        ("PFFF", "1.0", "2.0", "last good", "1.0", "1.1", []),
        ("FFPP", "2.0", "1.0", "last bad", "1.1", "1.2", []),
        ("PGFF", "1.0", "2.0", "last good", "1.0", "1.2", ["1.1"]),
        ("PUSF", "1.0", "2.0", "last good", "1.0", "2.0", ["1.1", "1.2"]),
        ("PF--", "1.0", "1.1", "last good", "1.0", "1.1", []),
    ],
)
def test_a_failure_is_found_where_it_came_or_went(
    fake: Package, states: str, good: str, bad: str, words: str, before: str, after: str, skipped: list[str]
) -> None:
    found, tried = search(fake, dict(zip(RELEASES, states, strict=True)), good, bad)
    assert (found.words[0], found.before, found.after, list(found.skipped)) == (words, before, after, skipped)
    assert len(tried) == len(set(tried)), "nothing is tried twice"
    assert found.signature == "fake crash: ErrorF: broken"


def test_any_failure_counts_when_asked(fake: Package) -> None:
    states = dict(zip(RELEASES, "PGFF", strict=True))
    found, _ = search(fake, states, "1.0", "2.0", any_failure=True)
    assert (found.before, found.after, found.skipped) == ("1.0", "1.1", ())


@pytest.mark.parametrize(
    ("states", "said"),
    [("FPPF", "--good: given '1.0'; allowed: a version that passes; this one: crash ErrorF"),
     ("GPPF", "--good: given '1.0'.*ErrorG"),
     ("PPPP", "--bad: given '2.0'; allowed: a version that fails; this one: pass"),
     ("PPPU", "--bad: given '2.0'.*cannot be installed"),
     ("SPPF", "--good: given '1.0'.*not in this release")],
)  # fmt: skip
def test_ends_that_are_not_what_they_were_said_to_be_are_refused(fake: Package, states: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        search(fake, dict(zip(RELEASES, states, strict=True)), "1.0", "2.0")


@pytest.mark.parametrize(("good", "bad"), [("1.0", "git:a"), ("path:/x", "1.0"), ("1.0", "1.0"), ("1.0", "1.0.0")])
def test_ends_that_make_no_chain_are_refused_before_anything_runs(fake: Package, good: str, bad: str) -> None:
    with pytest.raises(UsageError, match="--good, --bad"):
        search(fake, {}, good, bad)


def test_ctrl_c_keeps_what_is_known(fake: Package) -> None:
    found, _ = search(fake, dict(zip(RELEASES, "P!PF", strict=True)), "1.0", "2.0")
    assert found.interrupted
    assert (found.before, found.after) == ("1.0", "2.0")
    assert "1.1, 1.2: not tried" in render_finding(found, {})


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """A clone with commits c0 … c7 on main, every second of which touches the library, and b1, b2 on a branch from c2.

    The tags name them. Returns git's answer to a command.
    """
    folder = tmp_path / "clone"
    write_library(folder, "1.0")

    def git(*words: str) -> str:
        command = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b", *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    def commit(name: str, *, touches: bool) -> None:
        (folder / ("fakelib/core/n.py" if touches else "notes")).write_text(f"N = {name!r}\n")
        git("add", "-A")
        git("commit", "-q", "-m", f"{name} [bold]")
        git("tag", name)

    git("init", "-q", "-b", "main")
    for n in range(8):
        commit(f"c{n}", touches=n % 2 == 0)
    git("checkout", "-q", "-b", "branch", "c2")
    commit("b1", touches=True)
    commit("b2", touches=True)
    monkeypatch.setenv(clone_variable("fake-lib"), str(folder))
    return git


def search_commits(
    fake: Package, git: Callable[..., str], states: dict[str, str], good: str, bad: str
) -> tuple[Finding, list[str], dict[str, str]]:
    """A bisection between tags; states by tag. Returns what was tried by tag, too."""
    tags = {git("rev-parse", tag): tag for tag in states}
    tried: list[str] = []
    asked: dict[str, str] = {}

    def examine(version: str) -> Result:
        tag = tags[git("rev-parse", version.removeprefix("git:"))]
        asked[version] = tag
        tried.append(tag)
        return result(version, states[tag])

    return Bisection(examine, lambda *_: None).run(fake, f"git:{good}", f"git:{bad}"), tried, asked


def test_commits_that_do_not_touch_the_library_are_not_tried(fake: Package, clone: Callable[..., str]) -> None:
    states = {f"c{n}": "P" if n < 4 else "F" for n in range(8)}
    found, tried, asked = search_commits(fake, clone, states, "c0", "c7")
    assert (asked[found.before], asked[found.after]) == ("c2", "c4")
    assert set(tried) <= {"c0", "c2", "c4", "c6", "c7"}
    assert found.note == ""
    assert subject(fake, found.after).endswith("c4 [bold]")
    assert "c4 [bold]" in render_finding(found, {found.after: subject(fake, found.after)})
    found, _, asked = search_commits(fake, clone, {t: "PF"[s == "P"] for t, s in states.items()}, "c7", "c0")
    assert (found.words[1], asked[found.after]) == ("first fixed", "c4")


@pytest.mark.parametrize(
    ("base", "good", "bad", "words", "before", "after"),
    [("P", "b2", "c7", "last good", "c2", "c4"), ("F", "b2", "c7", "last bad", "c2", "b1"),
     ("P", "c7", "b2", "last good", "c2", "b1")],
)  # fmt: skip
def test_ends_on_two_branches_are_told_apart_at_their_merge_base(
    fake: Package, clone: Callable[..., str], base: str, good: str, bad: str, words: str, before: str, after: str
) -> None:
    states = {"c2": base, "c4": "F", "c6": "F", "c7": "F", "b1": "P", "b2": "P"}
    if bad == "b2":
        states = {tag: {"P": "F", "F": "P"}[state] if tag != "c2" else state for tag, state in states.items()}
    found, _, asked = search_commits(fake, clone, states, good, bad)
    assert (found.words[0], asked[found.before], asked[found.after]) == (words, before, after)
    assert "merge base" in found.note


def test_a_merge_base_that_says_nothing_is_said(fake: Package, clone: Callable[..., str]) -> None:
    with pytest.raises(UsageError, match=r"merge base.*cannot be installed"):
        search_commits(fake, clone, {"c2": "U", "c7": "F", "b2": "P"}, "b2", "c7")


def test_what_a_bisection_prints(fake: Package) -> None:
    found, _ = search(fake, dict(zip(RELEASES, "PGFF", strict=True)), "1.0", "2.0")
    assert render_finding(found, {"1.2": "2026-01-01 a change"}) == (
        "last good  1.0\n"
        "first bad  1.2  2026-01-01 a change\n\n"
        "failure: fake crash: ErrorF: broken\n"
        "between them: 1.1: say nothing about this failure, so it may be one of them\n"
        "  1.1: crash: ErrorG: broken\n"
        "tried 4 versions\n"
    )
    assert tried_line("1.0", result("1.0", "P"), State.GOOD) == "1.0: good (pass)"
    assert tried_line("1.1", result("1.1", "G"), State.OTHER) == "1.1: says nothing (crash: ErrorG: broken)"
    document = found.to_json()
    assert (document["last_good"], document["first_bad"], document["skipped"]) == ("1.0", "1.2", ["1.1"])
    assert len(document["tried"]) == 4
    assert names([str(n) for n in range(9)]) == "0, 1, 2, … (3 more), 6, 7, 8"
