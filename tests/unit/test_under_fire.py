"""The harness gets what it gives checkpoints: its run is killed, or its disk fails, at every call that changes a file.

A run of four scenarios, one of which fails, is made over and over, in a process of its own whose judges answer by heart
(`fire_driver`). strace counts its writes, syncs, renames and the like, and kills it right before the n-th of a
kind (SIGKILL), or gives that one ENOSPC or EIO, alone or with all later ones. Then the same command is given again,
without a fault.

* No result is lost: what was committed before is there afterwards, and did not run again.
* None is there twice: the folder holds one run, which has each scenario once, and the reports have each once, as
  without a fault. (Killed after its end was stored, a run has nothing to go on with, and the command begins another.)
* Nothing is left: no scratch, and no half file.
* A disk that fails is told as such, with exit status 3 and without a traceback, unless the run could do without what
  failed, and then it ends as it should.

Each point is a kind of call, a number and what happens there, so that all of them are enumerated, and each can be made
again. CI makes some of them, drawn by a seed, and the night all.

*Does not verify*: what a power cut leaves of the database (`test_store_crashes.py`), nor servers and ranks, which other
tests kill (tests/README.md, "Under fire").
"""

from __future__ import annotations

import base64
import json
import os
import random
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from shardproof.laboratory import judge
from shardproof.resilience.trace import attached
from shardproof.scenario import Scenario
from shardproof.space.files import load_space
from shardproof.store import DATABASE
from shardproof.verdict import ExitStatus

pytestmark = pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")

ROOT = Path(__file__).parents[2]
SCENARIO = '[[scenario]]\nsystem = "reference"\nmodel = "short"\n'
FILE = "schema = 1\n" + "".join(
    SCENARIO + rest
    for rest in (
        'program = "train"\n', 'program = "restart"\nfaults = "no-op-load"\n', 'program = "train"\nmesh = "1x2x1"\n',
        'program = "restart"\nmesh = "1x2x1"\n',
    )
)  # fmt: skip
CALLS = (
    "pwrite64", "write", "fdatasync", "fsync", "ftruncate", "rename", "unlink", "mkdir", "rmdir", "flock", "link",
)  # fmt: skip
"""What changes a file or a folder, in the order in which points are counted."""
FAILS = {
    "ENOSPC": ("pwrite64", "write", "ftruncate", "rename", "mkdir"),
    "EIO": ("pwrite64", "write", "fdatasync", "fsync", "ftruncate", "rename", "unlink", "mkdir"),
}
DRAWN = 6
SEED = 0


@dataclass(frozen=True)
class Point:
    """Where a run is struck: at the `number`-th call of a kind of its first thread to come so far. how: `SIGKILL`, or
    an error. onwards: so are all later ones."""

    call: str
    number: int
    how: str
    onwards: bool = False

    def __str__(self) -> str:
        return f"{self.how}@{self.call}-{self.number}{'+' if self.onwards else ''}"

    @property
    def strace(self) -> list[str]:
        """What strace is told."""
        what = "signal=SIGKILL" if self.how == "SIGKILL" else f"error={self.how}"
        return ["-e", f"inject={self.call}:{what}:when={self.number}{'+' if self.onwards else ''}"]


@dataclass(frozen=True)
class Course:
    """A run that nothing strikes: what it comes to, and how many calls of each kind its first thread makes. driver: the
    process that makes all runs."""

    driver: subprocess.Popen[str]
    results: dict[str, tuple[str, str]]
    calls: dict[str, int]

    def points(self, how: str, calls: Sequence[str], *, onwards: bool = False) -> list[Point]:
        return [Point(call, n + 1, how, onwards) for call in calls for n in range(self.calls.get(call, 0))]


@pytest.fixture(scope="module")
def course(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Course]:
    folder = tmp_path_factory.mktemp("course")
    answers = folder / "answers.json"
    (folder / "fire.toml").write_text(FILE)
    answers.write_text(json.dumps(dict(map(recorded, load_space(str(folder / "fire.toml")).scenarios))))
    with subprocess.Popen(
        [sys.executable, "-m", "tests.unit.fire_driver", str(answers), str(folder)],
        cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    ) as driver:  # fmt: skip
        (folder / "whole").mkdir()
        done = driven(driver, folder / "whole", folder / "record")
        assert done.status == ExitStatus.FAILURE, done.said
        lines = (folder / "record").read_text().splitlines()
        first = lines[0].split()[0]
        calls = Counter(match[1] for line in lines if (match := re.match(rf"{first} +(\w+)\(", line)))
        said = stored(folder / "whole").said
        assert sorted(verdict for verdict, _ in said.values()) == ["mismatch", "pass", "pass", "pass"]
        yield Course(driver, said, calls)
        assert driver.stdin is not None
        driver.stdin.close()


def recorded(scenario: Scenario) -> tuple[str, str]:
    """What a judge is asked about a scenario, and its answer."""
    request = json.dumps({"scenario": scenario.axis_values(only_changed=True)})
    return request, base64.b64encode(judge.serve_reference(request.encode())).decode()


@dataclass(frozen=True)
class Ended:
    """How a run ended, and what it said."""

    status: int
    said: str


def driven(driver: subprocess.Popen[str], folder: Path, record: Path | None = None, *strace: str) -> Ended:
    """The run in a folder; where a record is asked for, under strace."""
    assert driver.stdin is not None
    assert driver.stdout is not None
    (folder / "fire.toml").write_text(FILE)
    driver.stdin.write(json.dumps({"folder": str(folder), "waits": record is not None}) + "\n")
    driver.stdin.flush()
    child = int(driver.stdout.readline())
    with attached(child, record, *strace, calls=CALLS) if record else nullcontext():
        if record:
            os.kill(child, signal.SIGCONT)
        status = int(driver.stdout.readline())
    return Ended(status, (folder / "said").read_text())


@dataclass(frozen=True)
class Stored:
    """What a database holds. runs: how many. results: of the first run, scenario → verdict and content. ended: whether
    that run came to its end, so that the same command begins another."""

    runs: int = 0
    results: dict[str, tuple[str, str]] = field(default_factory=dict)
    ended: bool = False

    @property
    def said(self) -> dict[str, tuple[str, str]]:
        """The results without how long they took."""
        clock = r'"(duration_s|phases_s)":(\{[^}]*\}|[^,}]*)'
        return {key: (verdict, re.sub(clock, "", content)) for key, (verdict, content) in self.results.items()}


def stored(folder: Path) -> Stored:
    """What the database of a folder holds, read from a copy, so that the next run finds it as it was left."""
    if not (folder / "out" / DATABASE).exists():
        return Stored()
    copy = folder / "copy"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(folder / "out", copy)
    with closing(sqlite3.connect(copy / DATABASE)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        if not connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
            return Stored()
        runs = connection.execute("SELECT id, ended_at FROM runs ORDER BY sequence").fetchall()
        if not runs:
            return Stored()
        rows = connection.execute("SELECT scenario_id, verdict, content FROM results WHERE run_id = ?", runs[0][:1])
        return Stored(len(runs), {key: (verdict, content) for key, verdict, content in rows}, runs[0][1] is not None)


def struck(course: Course, point: Point, folder: Path) -> list[str]:
    """What is wrong after a run was struck and the same command was given again."""
    folder.mkdir()
    first = driven(course.driver, folder, folder.with_suffix(".strace"), *point.strace)
    noted = (folder / "notes").read_text().split() if (folder / "notes").exists() else []
    kept = stored(folder)
    wrong = [f"{key} was committed and is lost" for key in noted if key not in kept.results]
    if point.how == "SIGKILL":
        wrong += [f"the run was not killed: {first.status}"] * (first.status != -signal.SIGKILL)
    else:
        wrong += _ended_rightly(first, kept)
    second = driven(course.driver, folder)
    if second.status != ExitStatus.FAILURE:
        wrong.append(f"the second run ended with {second.status}: {second.said[-500:]}")
    after = stored(folder)
    wrong += [f"{key} ran again" for key, result in kept.results.items() if after.results.get(key) != result]
    if after.said != course.results:
        wrong.append(f"the results are {after.said}")
    if after.runs != 1 + kept.ended:
        wrong.append(f"there are {after.runs} runs")
    wrong += _left(folder)
    shutil.rmtree(folder)
    folder.with_suffix(".strace").unlink()
    return [f"{point}: {line}" for line in wrong]


def _ended_rightly(done: Ended, kept: Stored) -> list[str]:
    """What is wrong with the end of a run under which the disk failed. Before there is anything to lose, a folder that
    cannot be written is bad input."""
    if "Traceback" in done.said:
        return [f"a traceback: {done.said[-900:]}"]
    if done.status not in (ExitStatus.FAILURE, ExitStatus.HARNESS, *[ExitStatus.USAGE] * (not kept.runs)):
        return [f"exit status {done.status}: {done.said[-300:]}"]
    return []


def _left(folder: Path) -> list[str]:
    """What a killed run and the one after it left behind, which no run without a fault does."""
    found = [f"left behind: {path.name}" for path in (folder / "scratch").iterdir()]
    allowed = {"out", "scratch", "copy", "notes", "said", "fire.toml", "run.json"}
    found += [f"left behind: {path.name}" for path in folder.iterdir() if path.name not in allowed]
    ours = {"index.html", "summary.md", "failures", ".lock", DATABASE}
    found += [f"left behind: out/{path.name}" for path in (folder / "out").iterdir() if path.name not in ours]
    found += [f"left behind: {path.name}" for path in (folder / "out" / "failures").iterdir() if path.suffix != ".html"]
    reported = json.loads((folder / "run.json").read_text())["results"] if (folder / "run.json").exists() else []
    return [*found, *[f"{len(reported)} are reported"] * (len(reported) != 4)]


def all_struck(course: Course, points: Sequence[Point], folder: Path) -> None:
    assert points
    wrong = [line for point in points for line in struck(course, point, folder / str(point))]
    assert not wrong, "\n".join(wrong)


def drawn(points: Sequence[Point]) -> list[Point]:
    """Some of them, spread over the run and its kinds of calls."""
    return random.Random(SEED).sample(list(points), DRAWN)


def test_a_run_killed_at_some_calls_goes_on_as_if_nothing_had_been(course: Course, tmp_path: Path) -> None:
    all_struck(course, drawn(course.points("SIGKILL", CALLS)), tmp_path)


def test_a_disk_that_fails_at_some_calls_is_told_and_costs_no_result(course: Course, tmp_path: Path) -> None:
    once = [point for error, calls in FAILS.items() for point in course.points(error, calls)]
    full = course.points("ENOSPC", ("pwrite64", "write"), onwards=True)
    all_struck(course, [*drawn(once), *drawn(full)], tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize("call", CALLS)
def test_a_run_killed_at_every_call_goes_on_as_if_nothing_had_been(course: Course, tmp_path: Path, call: str) -> None:
    if points := course.points("SIGKILL", (call,)):
        all_struck(course, points, tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize(("error", "call"), [(error, call) for error, calls in FAILS.items() for call in calls])
def test_a_disk_that_fails_at_every_call_is_told_and_costs_no_result(
    course: Course, tmp_path: Path, error: str, call: str
) -> None:
    """A disk that is full stays so, in half of these."""
    for onwards in {False, error == "ENOSPC"}:
        if points := course.points(error, (call,), onwards=onwards):
            all_struck(course, points, tmp_path)
