"""A night on a head, with the fake library: what is run, what is bisected, and what is written about each cause."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import report_samples as samples
from shardproof.cli.main import entry
from shardproof.errors import UsageError
from shardproof.heads.named_files import changed_files, touched
from shardproof.heads.night import STATE, Asked, Command, Night, Ran, Seen, commits_of_night, night
from shardproof.heads.night_text import issue, write_night
from shardproof.issues.known_issues import KnownIssues
from shardproof.protocol.registry import system_named
from shardproof.protocol.releases import package
from shardproof.report.causes import cause_of
from shardproof.result import Result
from shardproof.store import DATABASE, Store
from shardproof.verdict import ExitStatus, Verdict
from shardproof.world import preflight

from tests.unit.overlay_system import FAKE, isolate, write_library

PLUGIN = ("--plugin", "tests.unit.overlay_system")


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        yield isolate(patch, tmp_path_factory.mktemp("overlays"))


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Commits good, notes, wrong (a regression) and later, as tags."""
    folder = tmp_path / "clone"

    def commit(name: str) -> None:
        for words in (["add", "-A"], ["commit", "-qm", f"{name} <b>commit</b>"], ["tag", name]):
            command = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b", *words]
            subprocess.run(command, check=True, capture_output=True)

    library = write_library(folder, "1.9") / "fakelib/core/__init__.py"
    subprocess.run(["git", "init", "-q", "-b", "main", str(folder)], check=True)
    commit("good")
    (folder / "notes").write_text("not of the library")
    commit("notes")
    library.with_name("other.py").write_text("")
    commit("other")
    library.write_text(library.read_text().replace("'right'", "'wrong'"))
    commit("wrong")
    library.with_name("other.py").write_text("N = 1")
    commit("later")
    library.write_text(library.read_text().replace("'wrong'", "'right'"))
    commit("mended")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SHARDPROOF_CLONE_FAKE_LIB", str(folder))
    return folder


def asked(out: Path, last: str, now: str, budget_s: float = 100.0) -> Asked:
    out.mkdir(exist_ok=True)
    return Asked(
        system=system_named("fake"), package=package("fake-lib"), last=last, now=now, out=out, sample=5,
        budget_s=budget_s, jobs=1, names=("fake.toml",),
    )  # fmt: skip


class Walks:
    """Stands for the commands: a walk whose results a test gives, a port, and a bisection that ends with its answer."""

    def __init__(self, out: Path, *results: Result, port: int = 0, bisect: dict[str, object] | str = "") -> None:
        self.out, self.results, self.port, self.bisect = out, results, port, bisect
        self.said: list[Sequence[str]] = []

    def __call__(self, words: Sequence[str]) -> Ran:
        self.said.append(words)
        if words[0] == "port":
            return Ran(self.port)
        if words[0] == "bisect":
            if isinstance(self.bisect, str):
                return Ran(2, self.bisect)
            Path(words[words.index("--json") + 1]).write_text(json.dumps(self.bisect))
            return Ran(0)
        (self.out / "walk").mkdir(exist_ok=True)
        version = words[words.index("--system") + 1].partition("@")[2]
        mine = [replace(r, scenario=replace(r.scenario, version=version)) for r in self.results]
        with Store(self.out / "walk" / DATABASE) as store:
            run = store.begin_run(words, 0, {}, planned=[result.scenario for result in mine])
            store.finished_many(run, mine)
            store.end_run(run)
        return Ran(1 if any(r.verdict.is_failure for r in mine) else 0)

    def names(self) -> list[str]:
        return [words[0] for words in self.said]


def ran(where: Path, last: str, now: str, walks: Command, budget_s: float = 100.0) -> Night:
    found = night(asked(where, last, now, budget_s), walks, KnownIssues())
    write_night(found, commits_of_night(package("fake-lib"), found), where)
    return found


def healed(result: Result) -> Result:
    return replace(result, verdict=Verdict.PASS, error=None, differences=(), explanations=())


FOUND = {"last_good": "git:aaa", "first_bad": "git:HEAD", "skipped": [], "out_of_time": False}


def test_a_night_that_changes_nothing_of_the_library_runs_nothing(clone: Path, tmp_path: Path) -> None:
    walks = Walks(tmp_path / "out")
    found = ran(tmp_path / "out", "good", "notes", walks)
    assert (walks.said, found.status) == ([], ExitStatus.OK)
    assert "nothing was run" in (tmp_path / "out" / "summary.md").read_text()
    assert "1 commit" in (tmp_path / "out" / "summary.md").read_text()


def test_only_what_something_of_ours_names_is_ported(clone: Path, tmp_path: Path) -> None:
    fake, library = system_named("fake"), package("fake-lib")
    assert changed_files(library, "good", "wrong") == ["fakelib/core/__init__.py", "fakelib/core/other.py"]
    assert touched(fake, library, "good", "wrong") == ["fakelib/core/__init__.py"]
    walks = Walks(tmp_path / "out", samples.passing(1))
    assert ran(tmp_path / "out", "good", "other", walks).port is None
    assert walks.names() == ["run"]
    walks = Walks(tmp_path / "out", samples.passing(1), port=3)
    assert ran(tmp_path / "out", "other", "wrong", walks).status is ExitStatus.HARNESS
    assert walks.names() == ["port", "run"]
    assert "something does not fit" in (tmp_path / "out" / "summary.md").read_text()


def test_a_new_failure_is_bisected_and_what_is_unknown_is_not(clone: Path, tmp_path: Path) -> None:
    out, crash = tmp_path / "out", samples.crash()
    walks = Walks(out, crash, samples.unknown(), samples.passing(1), bisect=FOUND)
    found = ran(out, "good", "wrong", walks)
    assert walks.names() == ["port", "run", "bisect"]
    (came,) = found.appeared
    assert (came.cause, came.good, came.bad, found.status) == (cause_of(crash), "git:aaa", "git:HEAD", 1)
    assert came.subject.endswith("mended <b>commit</b>")
    text = (out / "issues" / f"{came.cause}.md").read_text()
    assert text.splitlines()[0].endswith(f"[shardproof {came.cause}]")
    assert "    first bad  HEAD" in text
    assert (out / "tonight.txt").read_text() == f"issues/{came.cause}.md\n"


def test_the_next_nights_know_what_is_still_there_and_what_went(clone: Path, tmp_path: Path) -> None:
    out, crash = tmp_path / "out", samples.crash()
    ran(out, "good", "wrong", Walks(out, crash, samples.passing(1), bisect=FOUND))
    walks = Walks(out, crash, samples.passing(1), bisect=FOUND)
    second = ran(out, "", "later", walks)
    assert (second.appeared, [seen.bad for seen in second.still], second.status) == ((), ["git:HEAD"], ExitStatus.OK)
    assert walks.names() == ["run"], "what is still there is not bisected again"
    third = ran(out, "", "mended", Walks(out, healed(crash), samples.passing(1)))
    assert [seen.cause for seen in third.disappeared] == [cause_of(crash)]
    assert "Status: gone on" in (out / "issues" / f"{cause_of(crash)}.md").read_text()
    again = ran(out, "mended", "wrong", Walks(out, crash, samples.passing(1), bisect="not good: it fails there"))
    (came,) = again.appeared
    assert came.note == "the commits of the night do not say where it came: not good: it fails there"


def test_a_spent_budget_is_said(clone: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    walks = Walks(out, samples.crash(), samples.mismatch(), bisect=FOUND)
    found = ran(out, "good", "wrong", walks, budget_s=0.0)
    assert walks.names() == ["port", "run"]
    assert {seen.note for seen in found.appeared} == {"not bisected: the budget of 0 s was spent on other causes"}
    cut = {**FOUND, "skipped": ["git:b", "git:c"], "out_of_time": True}
    found = ran(tmp_path / "cut", "good", "wrong", Walks(tmp_path / "cut", samples.crash(), bisect=cut))
    assert found.appeared[0].note == "it may be any of 3 commits, up to the first bad one: the budget was spent"


def test_what_a_library_says_cannot_leave_its_place_in_an_issue() -> None:
    seen = Seen(
        "1a2b3c4d", "A *title* <b>", "", "boom\n# heading\x1b[31m", "a = 1\n", "c" * 40, "d" * 40, note="why @you"
    )
    text = issue(seen, "fake")
    assert text.splitlines()[0] == r"# A \*title\* &lt;b> [shardproof 1a2b3c4d]"
    assert "    boom\n    # heading[31m\n" in text
    assert r"Why \@you." in text


def test_a_folder_with_another_state_is_refused(clone: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / STATE).write_text("[]")
    with pytest.raises(UsageError, match="a file that `shardproof night` wrote"):
        ran(tmp_path / "out", "", "wrong", Walks(tmp_path / "out"))


@pytest.mark.nightly
@pytest.mark.real
def test_a_night_with_real_commands_names_the_commit(clone: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    Path("fake.toml").write_text(FAKE.to_toml())

    def command(words: Sequence[str]) -> Ran:
        return Ran(0) if words[0] == "port" else Ran(entry([*words, *PLUGIN]))

    found = ran(out, "good", "later", command)
    (came,) = found.appeared
    assert came.subject.endswith("wrong <b>commit</b>")
    assert found.status is ExitStatus.FAILURE


def test_the_command_refuses_a_system_without_a_library(capsys: pytest.CaptureFixture[str]) -> None:
    assert entry(["night", "reference"]) == ExitStatus.USAGE
    assert "given 'reference'" in capsys.readouterr().err
    assert preflight.clone_variable_of("fake") == "SHARDPROOF_CLONE_FAKE_LIB"
