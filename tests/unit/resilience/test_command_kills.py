"""`shardproof resilience --command`: which folders a kill leaves, and what scripts with one mistake make of them."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
from shardproof.resilience import commands
from shardproof.resilience.events import Event, Link, Trace, tree_of, write_tree
from shardproof.resilience.run import ResilienceRequest, StackResult
from shardproof.resilience.scorecard import exit_status
from shardproof.resilience.stack_processes import HostError
from shardproof.resilience.states import State, crash_states, states_called
from shardproof.trainer.command.asked import asked_command
from shardproof.trainer.command.runs import Runs

from tests.paths import PYTHONPATH, ROOT

SCRIPT = f"{sys.executable} {ROOT / 'tests/trainers/plain_script.py'} {{folder}} {{until}}"

traced = pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")


def runs_of(folder: Path, words: str) -> Runs:
    folder.mkdir(exist_ok=True)
    return Runs(asked_command(f"{SCRIPT} {words}", "2,4", "", ""), folder, 30.0, lambda said: None)


def tried(folder: Path, words: str, trials: int = 100) -> StackResult:
    runs = runs_of(folder, words)
    request = ResilienceRequest((), trials, 0, 30.0, out=folder)
    (found,) = commands.try_command(runs.asked, request, runs).found
    return found


night = partial(pytest.param, marks=pytest.mark.nightly)


@traced
@pytest.mark.parametrize(
    ("words", "outcomes"),
    [
        ("renames syncs", {"resumed"}),
        night("renames", {"resumed", "error", "silent"}),  # where the power fails: a name without its bytes, or zeros
        ("", {"resumed", "error", "silent"}),
        night("begins-anew", {"resumed", "anew", "silent"}),
        night("trusts", {"resumed", "error", "silent"}),
    ],
)
def test_what_a_kill_makes_of_a_script(tmp_path: Path, words: str, outcomes: set[str]) -> None:
    found = tried(tmp_path, words)
    assert {one.outcome for one in found.tried} == outcomes
    assert len(found.tried) == found.counts.states == found.planned
    lost = {one.kind for one in found.tried if one.outcome != "resumed"}
    assert lost == {"renames syncs": set(), "renames": {"lost"}}.get(words, {"killed", "torn", "lost"})


@traced
def test_a_run_that_was_cut_off_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    make = commands.CommandTrials.made

    def interrupted(self: commands.CommandTrials, state: State) -> object:
        made.append(state.label)
        if len(made) == 3:
            raise KeyboardInterrupt
        return make(self, state)

    monkeypatch.setattr(commands.CommandTrials, "made", interrupted)
    assert len(tried(tmp_path, "").tried) == 2
    found = tried(tmp_path, "")
    assert len(found.tried) == found.planned
    assert Counter(made)[made[2]] == 2
    assert max(Counter(label for label in made if label != made[2]).values()) == 1


@traced
@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("fails", "this script ends with an error"),
        ("hangs", "did not come to an end"),
    ],
)
def test_a_script_that_fails_by_itself_is_not_tried(tmp_path: Path, words: str, why: str) -> None:
    runs = runs_of(tmp_path, words)
    runs.deadline_s = 1.0 if words == "hangs" else 30.0
    with pytest.raises(HostError, match=f"no kill was tried: .*{why}"):
        commands.prepared(runs)


@traced
def test_one_trial_is_made_again(tmp_path: Path) -> None:
    one, trace = commands.replay_command("killed@1", runs_of(tmp_path, ""))
    assert (one.outcome, one.why) == (
        "error", "cannot read the checkpoint: unpack requires a buffer of 8 bytes"
    )  # fmt: skip
    assert trace.events[0] == Event("truncate", "last.safetensors", offset=0)
    assert (tmp_path / "state/last.safetensors").read_bytes() == b""


@traced
def test_a_link_to_the_latest_checkpoint_is_one_in_every_folder(tmp_path: Path) -> None:
    ready = commands.prepared(runs_of(tmp_path, "links syncs"))
    assert ready.trace.base["LATEST"] == Link(b"step_2")
    at = next(n for n, event in enumerate(ready.trace.events) if event.kind == "symlink")
    assert str(ready.trace.events[at]) == "symlink NEW to step_3"
    made = {}
    for state in states_called({f"killed@{at + n}" for n in range(3)}, ready.trace, commands.KINDS):
        made[state.tree["LATEST"]] = ready.made(state).outcome
    assert made == {b"step_2": "resumed", b"step_3": "resumed"}
    assert (tmp_path / "state/LATEST").readlink() == Path("step_3")


def test_a_link_out_of_the_folder_is_never_followed(tmp_path: Path) -> None:
    outside, folder = tmp_path / "outside", tmp_path / "folder"
    outside.write_bytes(b"kept")
    folder.mkdir()
    (folder / "out").symlink_to(outside)
    write_tree(tree := tree_of(folder), tmp_path / "made")
    assert tree == {"out": Link(os.fsencode(outside))}
    assert (tmp_path / "made/out").is_symlink()
    trace = Trace(tree, (Event("unlink", "out"), Event("symlink", "in", data=b"a")))
    assert [state.tree for state in crash_states(trace, ("killed",))] == [tree, {}, {"in": Link(b"a")}]


def test_an_error_of_a_command_is_a_failure_and_one_of_a_load_is_none() -> None:
    stack = {"trials": 1, "kind": {"killed": {"error": {"count": 1, "trial": "killed@1"}}}}
    assert exit_status({"stack": [stack]}) == 0
    assert exit_status({"stack": [stack | {"outcomes": ["resumed", "error"]}]}) == 1


def test_states_between_files_come_first() -> None:
    states = [(f"killed@{n}", "killed", n in (0, 5)) for n in range(6)] + [("torn@1", "torn", False)]
    assert commands.drawn(states, 2, 0) == {"killed@0", "killed@5"}
    assert {"killed@0", "killed@5", "torn@1"} < commands.drawn(states, 4, 0)
    assert len(commands.drawn(states, 100, 0)) == 7


def test_where_a_kill_is_between_two_files() -> None:
    events = [Event("create", "a"), Event("write", "a", data=b"1"), Event("write", "a", data=b"2"),
              Event("write", "b", data=b"3")]  # fmt: skip
    found = [commands.is_between_files(State("", "killed", crash, {}, {}), events) for crash in range(5)]
    assert found == [True, True, False, True, True]
    assert not commands.is_between_files(State("", "torn", 1, {}, {}), events)


def test_a_script_ends_with_a_shardproof_that_is_killed(tmp_path: Path) -> None:
    line = [sys.executable, "-m", "shardproof", "trainer", "--command", f"{SCRIPT} hangs", "--out", str(tmp_path)]
    process = subprocess.Popen(line, env=os.environ | {"PYTHONPATH": PYTHONPATH}, stderr=subprocess.DEVNULL)
    file, until = tmp_path / "folder/pid", time.monotonic() + 60
    while not (file.exists() and file.read_text()) and time.monotonic() < until:
        time.sleep(0.05)
    script = Path("/proc", file.read_text())
    assert script.exists()
    process.send_signal(signal.SIGKILL)
    process.wait()
    while script.exists() and time.monotonic() < until:
        time.sleep(0.05)
    assert not script.exists()
