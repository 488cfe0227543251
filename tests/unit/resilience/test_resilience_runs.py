"""A run of trials as a whole: side by side, cut off and gone on with, and what it leaves behind.

*Verifies*: on a stack of plain files, so that no library is imported; the command is a process of its own that is
interrupted and killed as a user's is.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from shardproof.errors import UsageError
from shardproof.resilience.planned_trials import FinishedTrial
from shardproof.resilience.rank import host
from shardproof.resilience.run import ResilienceRequest, try_stacks
from shardproof.resilience.scorecard import document_of
from shardproof.resilience.stack_processes import Bench
from shardproof.resilience.trial_store import NAME, TrialStore
from shardproof.store import StoreFull

from tests import plain_stack

traced = pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
PLAIN, SLOW, SILENT = plain_stack.STACKS
ROOT = Path(__file__).parents[3]
TRIALS = 24
PATIENCE_S = 400.0
"""Far more than any of this takes, also on a machine that is busy."""


def waited_for(what: Callable[[], bool], seconds: float = PATIENCE_S) -> bool:
    end = time.monotonic() + seconds
    while not what():
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True


def lines_in(folder: Path) -> int:
    path = folder / NAME
    return path.read_bytes().count(b"\n") if path.exists() else 0


def processes_with(mark: str) -> list[str]:
    """The processes in whose environment a mark is."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark.encode() in path.read_bytes():
                found.append(path.parent.name)
        except OSError:
            continue
    return found


class Cut:
    """The command as a process, in an environment by which what it starts is known."""

    def __init__(self, place: Path) -> None:
        self.out, self.scratch = place / "out", place / "scratch"
        self.scratch.mkdir()
        self.mark = f"SHARDPROOF_TEST_MARK={place}"

    def begun(self) -> subprocess.Popen[str]:
        name, _, value = self.mark.partition("=")
        words = ["resilience", "plain-slow", "--trials", str(TRIALS), "--out", str(self.out)]
        return subprocess.Popen(
            [sys.executable, "-m", "tests.plain_stack", *words], cwd=ROOT, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
            env={**os.environ, name: value, "TMPDIR": str(self.scratch)},
        )  # fmt: skip

    def cut(self, number: int, lines: int) -> tuple[int, str]:
        """Begin, and send a signal when the folder keeps so many lines."""
        with self.begun() as process:
            assert waited_for(lambda: lines_in(self.out) >= lines or process.poll() is not None)
            process.send_signal(number)
            _, said = process.communicate(timeout=PATIENCE_S)
        return process.returncode, said

    def nothing_left(self) -> bool:
        return waited_for(lambda: not processes_with(self.mark) and not list(self.scratch.iterdir()))


@traced
def test_a_run_that_is_killed_or_interrupted_leaves_nothing_and_is_gone_on_with(tmp_path: Path) -> None:
    run = Cut(tmp_path)
    status, _ = run.cut(signal.SIGKILL, 6)
    assert status == -signal.SIGKILL
    assert run.nothing_left()
    kept = lines_in(run.out)
    status, said = run.cut(signal.SIGINT, kept + 4)
    assert status == 130
    assert "resuming plain-slow: " in said
    assert "interrupted: the same command goes on from here" in said
    assert run.nothing_left()
    page = (run.out / "resilience.txt").read_text("utf-8")
    assert f" of {TRIALS} trials" in page
    with run.begun() as process:
        process.communicate(timeout=PATIENCE_S)
    assert run.nothing_left()
    trials = [line["label"] for line in map(json.loads, (run.out / NAME).read_text().splitlines()) if "label" in line]
    assert len(trials) == len(set(trials)) == TRIALS
    whole = document_of(try_stacks(ResilienceRequest([SLOW], TRIALS, 0, 30.0)).found, TRIALS, 0)
    assert {**whole, "stack": [tomllib.loads((run.out / "resilience.toml").read_text("utf-8"))["stack"][0]]} == whole


@traced
def test_side_by_side_comes_to_the_same_as_one_after_the_other() -> None:
    one, three = (try_stacks(ResilienceRequest([PLAIN], 40, 1, 30.0, jobs)).found for jobs in (1, 3))
    assert one[0].tried == three[0].tried
    assert len(one[0].tried) == 40


@traced
def test_a_lane_that_is_killed_takes_its_children_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDPROOF_TEST_MARK", str(tmp_path))
    with Bench(SLOW, 30.0) as bench:
        folder = tmp_path / "folder"
        folder.mkdir()
        bench.lanes[0].begun({"do": "save", "folder": str(folder), "generation": 1, "run": 1})
        assert len(processes_with(str(tmp_path))) >= 3  # host, lane, and the child that stands still
    assert waited_for(lambda: not processes_with(f"SHARDPROOF_TEST_MARK={tmp_path}"))
    assert not bench.root.exists()


def test_autograd_starts_before_a_driver_is_made_and_only_where_its_module_has_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else a CUDA build of torch without a GPU refuses every backward pass in the ranks, which are forked."""
    done: list[str] = []

    class Driver(plain_stack.Plain):
        def __init__(self, **_: object) -> None:
            done.append("made")

        def warm(self) -> None:
            done.append("warm")

    def started(*, torch: bool) -> list[str]:
        done.clear()
        monkeypatch.setattr(host.sys, "modules", {**sys.modules, "torch": None} if torch else {})
        host.warmed("a:Driver", {"silent": True})
        monkeypatch.undo()
        return list(done)

    for torch, expected in ((True, ["autograd", "made", "warm"]), (False, ["made", "warm"])):
        monkeypatch.setattr(host, "resolve", lambda name: Driver)
        monkeypatch.setattr(host, "start_autograd", lambda: done.append("autograd"))
        assert started(torch=torch) == expected


@pytest.mark.parametrize("starved", [0.0, 1000.0])
def test_what_a_child_waits_for_a_cpu_does_not_count_to_its_deadline(
    monkeypatch: pytest.MonkeyPatch, starved: float
) -> None:
    """It answers only when its time is up and somebody asks how long it had to wait."""
    told, tells = os.pipe()

    def asked(process: int) -> float:
        if starved:
            os.write(tells, b"{}\n")
        return starved

    monkeypatch.setattr(host, "starved_s", asked)
    monkeypatch.setattr(host, "in_session", lambda session: [session])
    assert host._read(told, 0.1, os.getsid(0)) == ((b"{}\n", False) if starved else (b"", True))
    os.close(told)
    os.close(tells)


TRIED = FinishedTrial("killed@1", "killed", "a crash", "old", "")


def test_trials_are_kept_and_those_of_another_record_are_not_taken_over(tmp_path: Path) -> None:
    with TrialStore(tmp_path, {"seed": 1}) as kept:
        assert kept.begun("s", "key") == {}
        kept.add("s", TRIED)
    with (tmp_path / NAME).open("a") as file:
        file.write('{"of": "s", "label": "torn')  # the process was killed while it wrote
    with TrialStore(tmp_path, {"seed": 1}) as kept:
        assert kept.begun("s", "key") == {"killed@1": TRIED}
        assert kept.begun("t", "key") == {}
    with TrialStore(tmp_path, {"seed": 1}) as kept:
        assert kept.begun("s", "another") == {}
    with TrialStore(tmp_path, {"seed": 1}) as kept:
        assert kept.begun("s", "another") == {}


@pytest.mark.parametrize("ended", [True, False])
def test_a_run_that_ended_or_was_another_is_begun_anew(tmp_path: Path, ended: bool) -> None:
    with TrialStore(tmp_path, {"seed": 1}) as kept:
        kept.begun("s", "key")
        kept.add("s", TRIED)
        if ended:
            kept.end()
    with TrialStore(tmp_path, {"seed": 1 if ended else 2}) as kept:
        assert kept.begun("s", "key") == {}
    assert lines_in(tmp_path) == 2


@pytest.mark.parametrize("text", ["notes of mine\n", '{"a": 1}\n', '{"written_by": "shardproof 1"}\nrot\n'])
def test_a_file_that_is_not_ours_or_damaged_is_refused_and_left_as_it_is(tmp_path: Path, text: str) -> None:
    (tmp_path / NAME).write_text(text)
    with pytest.raises(UsageError, match=NAME.replace(".", r"\.")), TrialStore(tmp_path, {}):
        pass
    assert (tmp_path / NAME).read_text() == text


def test_a_full_disk_costs_the_trial_that_is_written_and_none_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with TrialStore(tmp_path, {}) as kept:
        kept.begun("s", "key")
        kept.add("s", TRIED)
        write = os.write

        def full(handle: int, data: bytes) -> int:
            if len(data) > 9:
                return write(handle, data[:9])
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "write", full)
        with pytest.raises(StoreFull, match="kept"):
            kept.add("s", FinishedTrial("killed@2", "killed", "", "new", ""))
        monkeypatch.undo()
    with TrialStore(tmp_path, {}) as kept:
        assert list(kept.begun("s", "key")) == ["killed@1"]
