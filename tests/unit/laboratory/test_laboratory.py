"""The laboratory: from scenario to confirmed verdict, and that whatever fails on our side is `unknown`, never a pass.

One laboratory serves all tests; its server has the plugin `tests.unit.flow_faults`, which makes ranks and judges fail.
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest
from shardproof.errors import ServerLostError
from shardproof.faults.boundary import BOUNDARY
from shardproof.laboratory import laboratory
from shardproof.laboratory.laboratory import Laboratory
from shardproof.laboratory.run_verdict import NEVER_STRUCK
from shardproof.observe.record import unpack
from shardproof.report.text import render_result
from shardproof.result import Reproduced, Result
from shardproof.scenario import Mesh, Scenario
from shardproof.store import StoreFull
from shardproof.verdict import Verdict
from shardproof.world import watchdog

from tests.boundary_fault_scenarios import REORDER, strikes_with
from tests.unit.flow_system import ECHO
from tests.unit.world_stub import ACTIONS

PLUGINS = ("tests.unit.world_stub", "tests.unit.flow_system", "tests.unit.flow_faults")
DIES, HANGS, RAISES, DISAGREES, KILLS_SERVER = 101, 102, 103, 104, 105
"""Seeds, as in `flow_faults`, which the parent does not import."""
SMALL = Scenario(model="short", checkpoint="sharded", mesh=Mesh(1, 2, 1))


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Laboratory]:
    folder = tmp_path_factory.mktemp("lab")
    os.environ["SHARDPROOF_TEST_MARKERS"] = str(folder)
    with Laboratory(jobs=2, deadline_s=30.0, plugins=PLUGINS, keep=folder / "logs") as running:
        yield running
    del os.environ["SHARDPROOF_TEST_MARKERS"]


def with_faults(scenario: Scenario, *faults: str) -> Scenario:
    return replace(scenario, faults=faults)


# --- verdicts about systems ---------------------------------------------------------------------------


@pytest.mark.parametrize(("scenario", "kept"), [(ECHO, 1), (SMALL, 0)], ids=["ranks", "lockstep"])
def test_what_is_right_passes(lab: Laboratory, scenario: Scenario, kept: int) -> None:
    seen: list[bytes] = []
    result = lab.examine_one(scenario, lambda s, blob: seen.append(blob))
    assert (result.verdict, result.differences, result.reason) == (Verdict.PASS, (), "")
    assert result.duration_s > 0
    assert [bool(blob) for blob in seen] == [True] * kept


def test_a_fault_is_a_mismatch_that_was_reproduced(lab: Laboratory) -> None:
    seen: list[bytes] = []
    result = lab.examine_one(with_faults(SMALL, "no-op-load"), lambda s, blob: seen.append(blob))
    assert result.verdict is Verdict.MISMATCH
    assert [bool(list(unpack(blob))) for blob in seen] == [True]
    assert result.reproduced == Reproduced(1, 1)
    assert result.failed_op is not None
    assert result.failed_op.name == "load"
    assert result.explanations


def test_what_a_system_refuses_is_unsupported_with_its_reason(lab: Laboratory) -> None:
    result = lab.examine_one(replace(ECHO, mesh=Mesh(1, 2, 1)))
    assert (result.verdict, result.reason) == (Verdict.UNSUPPORTED, "the echo has one rank")


def test_an_exception_in_a_rank_is_a_crash_with_its_place(lab: Laboratory) -> None:
    result = lab.examine_one(with_faults(ECHO, "boundary.broken"))
    assert result.verdict is Verdict.CRASH
    assert result.error is not None
    assert (result.error.type, result.error.rank, result.error.op) == ("ZeroDivisionError", 0, 1)
    assert "flow_faults.py" in result.error.traceback
    assert result.reproduced == Reproduced(1, 1)


def test_a_failure_that_does_not_come_again_is_nondeterministic(lab: Laboratory) -> None:
    result = lab.examine_one(with_faults(ECHO, "boundary.flaky"))
    assert result.verdict is Verdict.NONDETERMINISTIC
    assert result.reproduced == Reproduced(0, 1)
    assert "did not come again" in result.reason
    assert result.error is not None
    assert result.error.type == "ConnectionError"
    again = lab.examine_one(with_faults(ECHO, "boundary.flaky"))
    assert again.verdict is Verdict.PASS


@pytest.mark.parametrize("fault", ["kill", "segfault", "exit", "exit0", "system_exit", "killpg"])
def test_a_rank_that_dies_is_a_crash(lab: Laboratory, fault: str) -> None:
    assert fault in ACTIONS
    result = lab.examine_one(Scenario(system="stub", mesh=Mesh(1, 2, 1), program="train", faults=(fault,)))
    assert result.verdict is Verdict.CRASH
    assert result.error is not None
    assert result.error.rank in (0, 1)


def test_a_rank_that_hangs_is_a_hang_that_says_where(lab: Laboratory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lab, "deadline_s", 0.6)
    result = lab.examine_one(Scenario(system="stub", mesh=Mesh(1, 2, 1), program="train", faults=("hang",)))
    assert result.verdict is Verdict.HANG
    assert result.error is not None
    assert "rank 1 in step (op)" in result.error.message


def test_logs_of_failures_are_kept(lab: Laboratory) -> None:
    scenario = Scenario(system="stub", mesh=Mesh(1, 2, 1), program="train", faults=("raise",))
    lab.examine_one(scenario)
    assert lab.keep is not None
    assert (lab.keep / scenario.id / "session0.rank1.log").read_text().startswith("building 1")
    lab.examine_one(ECHO)
    assert not (lab.keep / ECHO.id).exists()


# --- failures of our own ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seed", "said"),
    [(DIES, "worker process ended"), (HANGS, "no answer within"), (RAISES, "KeyError"),
     (DISAGREES, "twin and reference disagree")],
)  # fmt: skip
@pytest.mark.parametrize("base", [ECHO, SMALL], ids=["ranks", "lockstep"])
def test_a_judge_that_fails_gives_unknown(
    lab: Laboratory, base: Scenario, seed: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab.examine_one(base)  # a warm worker, so that the deadline is the judge's alone
    monkeypatch.setattr(laboratory, "JUDGE_DEADLINE_S", 1.0 if seed == HANGS else 60.0)
    result = lab.examine_one(replace(base, seed=seed))
    assert result.verdict is Verdict.UNKNOWN
    assert said in result.reason
    assert result.signature.startswith(f"{base.system} unknown: ")
    monkeypatch.undo()
    assert lab.examine_one(base).verdict is Verdict.PASS, "the next scenario gets a new worker"


def test_a_server_that_dies_costs_what_was_running_only(lab: Laboratory) -> None:
    lab.examine_one(ECHO)
    pid = lab._servers["cpu"].pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    assert [lab.examine_one(ECHO).verdict for _ in range(2)] == [Verdict.PASS] * 2


@pytest.mark.parametrize(
    "scenario",
    [
        pytest.param(with_faults(ECHO, "boundary.kills-supervisor"), id="supervisor while ranks run"),
        pytest.param(
            with_faults(ECHO, "boundary.kills-server"), id="server while ranks run", marks=pytest.mark.nightly
        ),
        pytest.param(replace(ECHO, seed=KILLS_SERVER), id="server while a worker judges", marks=pytest.mark.nightly),
    ],
)
def test_what_is_killed_under_a_scenario_costs_one_more_run(lab: Laboratory, scenario: Scenario) -> None:
    """Beside it runs another one, which the end of a server costs one more run, too."""
    struck, beside = sorted(lab.examine([scenario, ECHO], lambda s, blob: None), key=lambda r: r.scenario == ECHO)
    assert (struck.verdict, beside.verdict) == (Verdict.PASS, Verdict.PASS)
    assert "died" in struck.restarted or "ended" in struck.restarted


@pytest.mark.nightly
def test_a_server_that_is_killed_while_it_imports_costs_one_more_start(lab: Laboratory) -> None:
    lab._servers["cpu"].close()
    lab._servers["cpu"].start()
    while (pid := lab._servers["cpu"].pid) is None:
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    assert lab.examine_one(ECHO).verdict is Verdict.PASS


@pytest.mark.nightly
def test_a_server_that_is_stopped_is_killed_and_started_again(lab: Laboratory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "STOPPED_S", 2.0)
    lab.examine_one(ECHO)
    pid = lab._servers["cpu"].pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    result = lab.examine_one(ECHO)
    assert result.verdict is Verdict.PASS
    assert "it was stopped by a signal for 2 s" in result.restarted
    assert "run a second time" in render_result(result)
    assert lab._servers["cpu"].pid != pid


def test_a_server_that_dies_twice_gives_unknown(lab: Laboratory, monkeypatch: pytest.MonkeyPatch) -> None:
    said = iter(["the first", "the second", "the third"])

    def lost(*arguments: object, **options: object) -> NoReturn:
        raise ServerLostError(next(said))

    monkeypatch.setattr(lab, "_attempt_once", lost)
    result = lab.examine_one(ECHO)
    assert (result.verdict, result.reason) == (Verdict.UNKNOWN, "the second; the one before it: the first")
    assert next(said) == "the third"


def test_a_result_says_that_a_server_was_started_again(lab: Laboratory, monkeypatch: pytest.MonkeyPatch) -> None:
    real, lost = lab._attempt_once, [ServerLostError("the job's supervisor died: signal SIGKILL")]

    def attempt(*arguments: Any, **options: Any) -> Result:
        if lost:
            raise lost.pop()
        return real(*arguments, **options)

    monkeypatch.setattr(lab, "_attempt_once", attempt)
    result = lab.examine_one(ECHO)
    assert (result.verdict, result.restarted) == (Verdict.PASS, "the job's supervisor died: signal SIGKILL")
    assert Result.from_json(result.to_json()) == result


@pytest.mark.parametrize("error", [KeyError("oops"), PermissionError(errno.EACCES, "not yours"), RecursionError()])
def test_any_error_of_ours_is_unknown_and_the_next_scenario_runs(
    lab: Laboratory, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def broken(*scenario: object, **options: object) -> NoReturn:
        raise error

    monkeypatch.setattr(lab, "_forked", broken)
    results = list(lab.examine([ECHO, SMALL], lambda s, blob: None))
    verdicts = {result.scenario: result.verdict for result in results}
    assert verdicts == {ECHO: Verdict.UNKNOWN, SMALL: Verdict.PASS}
    reason = next(result.reason for result in results if result.scenario == ECHO)
    assert type(error).__name__ in reason


def test_a_laboratory_ends_its_servers_and_its_scratch_whatever_fails_on_the_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails() -> NoReturn:
        raise OSError("no")

    running = Laboratory(jobs=1, deadline_s=5.0, plugins=PLUGINS)
    assert running.examine_one(ECHO).verdict is Verdict.PASS
    pid = running._servers["cpu"].pid
    monkeypatch.setattr(running._environments, "close", fails)
    with pytest.raises(OSError, match="no"):
        running.__exit__(None, None, None)
    assert not running._scratch.exists()
    assert not Path(f"/proc/{pid}").exists()


def test_a_start_that_fails_is_unknown_for_every_scenario(monkeypatch: pytest.MonkeyPatch) -> None:
    with Laboratory(jobs=1, deadline_s=5.0, plugins=["tests.unit.no_such_plugin"]) as broken:
        results = list(broken.examine([ECHO, SMALL], lambda s, blob: None))
    assert {result.verdict for result in results} == {Verdict.UNKNOWN}
    assert all("no_such_plugin" in result.reason for result in results)


# --- order, load and disks ----------------------------------------------------------------------------


def test_every_scenario_gets_one_result(lab: Laboratory) -> None:
    scenarios = [replace(SMALL, seed=seed) for seed in range(6)] + [replace(ECHO, seed=seed) for seed in range(6)]
    results = list(lab.examine(scenarios, lambda s, blob: None))
    assert sorted(result.id for result in results) == sorted(scenario.id for scenario in scenarios)
    assert {result.verdict for result in results} == {Verdict.PASS}


def test_a_store_that_is_full_stops_the_run(lab: Laboratory) -> None:
    def full(scenario: Scenario, blob: bytes) -> NoReturn:
        raise StoreFull("no space left")

    with pytest.raises(StoreFull):
        list(lab.examine([replace(ECHO, seed=seed) for seed in range(20)], full))
    assert lab.examine_one(ECHO).verdict is Verdict.PASS


def test_nothing_is_left_behind(lab: Laboratory) -> None:
    lab.examine_one(with_faults(ECHO, "boundary.broken"))
    deadline = time.monotonic() + 5.0
    while list(lab._scratch.iterdir()) and time.monotonic() < deadline:
        time.sleep(0.05)  # scenarios that a full store cut short end by themselves
    assert list(lab._scratch.iterdir()) == []


@pytest.fixture(scope="module")
def small_disk() -> Iterator[Path]:
    """A disk of 256 KiB."""
    folder = Path(tempfile.mkdtemp())
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "none", str(folder)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"mounting is not permitted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)
    folder.rmdir()


@pytest.fixture(scope="module")
def cramped(small_disk: Path) -> Iterator[Laboratory]:
    """A laboratory whose scratch folder is on the small disk."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(laboratory, "RAM_DISK", small_disk)
        patch.setattr(laboratory, "RAM_DISK_BYTES", 0)
        running = Laboratory(jobs=1, deadline_s=30.0, plugins=PLUGINS)
    with running:
        yield running


@contextmanager
def ballast(disk: Path, leaving: int) -> Iterator[None]:
    file = disk / "ballast"
    file.write_bytes(bytes(shutil.disk_usage(disk).free - leaving))
    try:
        yield
    finally:
        file.unlink()


def test_a_scratch_disk_that_fills_stops_the_run_and_is_no_crash_of_the_system(
    small_disk: Path, cramped: Laboratory
) -> None:
    assert cramped._scratch.parent == small_disk
    assert cramped.examine_one(ECHO).verdict is Verdict.PASS
    with ballast(small_disk, leaving=8 * 1024), pytest.raises(StoreFull):
        list(cramped.examine([ECHO], lambda s, blob: None))
    assert cramped.examine_one(ECHO).verdict is Verdict.PASS


REAL = Scenario(system="torch-fsdp2", mesh=Mesh(1, 2, 1), program="build step save step build load step")


@pytest.mark.real
@pytest.mark.parametrize("checkpoint", ["dcp", "dcp-async", "full"])
def test_a_disk_that_fills_under_a_librarys_save_is_no_crash_of_the_library(
    small_disk: Path, cramped: Laboratory, checkpoint: str
) -> None:
    with ballast(small_disk, leaving=32 * 1024), pytest.raises(StoreFull):
        cramped.examine_one(replace(REAL, checkpoint=checkpoint))


# --- boundary faults on the real library --------------------------------------------------------------


IN_CI = ("boundary.kill-in-save", "boundary.memory-moment", "boundary.collective-drop")
"""One that ends a rank, one that changes a value, and one that leaves out a call. The canaries of CI plant all of them,
too, on the systems that name them."""


@pytest.mark.real
@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(name, marks=[] if name in IN_CI else pytest.mark.nightly)
        for name in BOUNDARY
        if name not in ("boundary.stuck-rank", REORDER)
    ],
)
def test_a_boundary_fault_comes_to_its_verdict(lab: Laboratory, fault: str) -> None:
    scenarios = strikes_with(fault)
    assert scenarios
    for scenario in scenarios:
        result = lab.examine_one(scenario)
        assert result.verdict.value == BOUNDARY[fault].verdict, result
        assert result.reason != NEVER_STRUCK
        assert result.reproduced == (None if result.verdict is Verdict.PASS else Reproduced(1, 1))


@pytest.mark.real
def test_a_stuck_rank_is_a_hang(lab: Laboratory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lab, "deadline_s", 10.0)  # so that cold ranks come to the step on a busy machine, too
    (scenario,) = strikes_with("boundary.stuck-rank")
    result = lab.examine_one(scenario)
    assert result.verdict is Verdict.HANG, result
    assert result.error is not None
    assert "rank 0 in step" in result.error.message


@pytest.mark.real
def test_the_real_library_without_a_fault_passes(lab: Laboratory) -> None:
    result = lab.examine_one(REAL)
    assert result.verdict is Verdict.PASS, result
