"""The fork server with a stub system: what goes wrong in a job costs that job only, and is described truthfully."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
from shardproof.errors import HarnessError
from shardproof.laboratory.run_verdict import ranks_verdict
from shardproof.observe.record import Record
from shardproof.scenario import Mesh, Scenario
from shardproof.verdict import Verdict
from shardproof.world.job import Job, JobOutcome, shortened
from shardproof.world.observations import read_observations
from shardproof.world.process import Board, is_ending, starved_s, take_long_turns
from shardproof.world.server import NOT_INHERITED, ForkServer

BASE = Scenario(system="stub", mesh=Mesh(1, 2, 1), program="build step build")
ROOT = Path(__file__).parents[3]


def own(path: Path) -> list[Record]:
    """What the system itself recorded."""
    return [record for record in read_observations(path) if record.role not in ("rng", "warning")]


def stub_server(**options: object) -> ForkServer:
    return ForkServer(
        path_prefix=[ROOT], plugins=["tests.unit.world_stub"], warm_up=["tests.unit.world_stub:warm_up"], **options  # type: ignore[arg-type]
    )  # fmt: skip


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    with stub_server(workers=2) as running:
        yield running


def run(server: ForkServer, directory: Path, *faults: str, deadline_s: float = 30.0, **axes: object) -> JobOutcome:
    scenario = replace(BASE, faults=faults, **axes)  # type: ignore[arg-type]
    return server.submit(Job(scenario, 0, directory, deadline_s)).result(timeout=60)


def descendants(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in map(int, (task / "children").read_text().split()):
            found += [child, *descendants(child)]
    return found


def settled(pid: int, count: int) -> list[int]:
    """The descendants, when there are `count` of them and the same ones a moment later (a daemon forks twice)."""
    before: list[int] = []
    while True:
        try:
            now = descendants(pid)
        except FileNotFoundError:  # one ended while we looked
            now = []
        if len(now) == count and now == before:
            return now
        before = now
        time.sleep(0.05)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_a_job_runs_its_session_on_every_rank(server: ForkServer, tmp_path: Path, world: int) -> None:
    outcome = run(server, tmp_path, mesh=Mesh(1, world, 1))
    assert outcome.ok, outcome
    assert outcome.errors == outcome.died == outcome.stuck == ()
    assert outcome.first_failed is None
    assert outcome.strays == 0
    assert [len(own(path)) for path in outcome.observations] == [3] * world
    records = [r for path in outcome.observations for r in read_observations(path)]
    assert records[-1] == Record(2, world - 1, "live", "param", "w", "uint8", (2,), (0,), (2,), bytes([2, world - 1]))
    assert (tmp_path / "session0.rank0.log").read_text() == "building 0\nbuilding 0\n"
    phases = [phase for phase, _ in outcome.profile]
    assert phases[0] == "fork"
    assert phases[-1] == "exit"
    assert "1 step op" in phases
    assert all(seconds >= 0 for _, seconds in outcome.profile)


def test_the_rank_with_the_store_stays_until_the_others_are_done(server: ForkServer, tmp_path: Path) -> None:
    outcome = run(server, tmp_path, "late")
    assert outcome.ok, outcome


def test_only_the_session_asked_for_runs(server: ForkServer, tmp_path: Path) -> None:
    scenario = replace(BASE, program="build step step restart build", load="grow")
    outcome = server.submit(Job(scenario, 1, tmp_path, 30)).result(timeout=60)
    assert [path.name for path in outcome.observations] == [f"session1.rank{rank}.obs" for rank in range(4)]
    assert [record.op for record in own(outcome.observations[3])] == [3]


def test_a_rank_that_raises_is_described(server: ForkServer, tmp_path: Path) -> None:
    outcome = run(server, tmp_path, "raise")
    assert not outcome.timed_out
    assert outcome.first_failed == 1
    first = outcome.errors[0]
    assert (first.rank, first.op_index, first.op, first.stage) == (1, 1, "step", "op")
    assert (first.type, first.message, first.errno) == ("KeyError", "'absent'", None)
    assert "world_stub.py" in first.traceback


@pytest.mark.parametrize(
    ("fault", "how"),
    [("kill", "signal SIGKILL"), ("segfault", "signal SIGSEGV"), ("exit", "exit 7"), ("exit0", "exit 0")],
)
def test_a_rank_that_ends_without_a_word_died(server: ForkServer, tmp_path: Path, fault: str, how: str) -> None:
    outcome = run(server, tmp_path, fault)
    assert outcome.died == ((1, how),)
    assert outcome.first_failed == 1
    assert not outcome.timed_out
    assert outcome.duration_s < 10


def test_a_hang_names_the_op_each_rank_was_in(server: ForkServer, tmp_path: Path) -> None:
    outcome = run(server, tmp_path, "hang", deadline_s=1.0)
    assert outcome.timed_out
    assert [(p.rank, p.op_index, p.op, p.stage) for p in outcome.stuck] == [(0, 1, "step", "op"), (1, 1, "step", "op")]
    assert not outcome.ok
    assert outcome.died == outcome.errors == ()


def test_a_rank_that_waits_for_a_failed_one_is_no_hang(server: ForkServer, tmp_path: Path) -> None:
    outcome = run(server, tmp_path, "daemon", "raise", deadline_s=60)
    assert outcome.first_failed == 1
    assert not outcome.timed_out
    assert outcome.duration_s < 10


def test_the_courses_of_ranks_say_who_was_where_when_one_failed(server: ForkServer, tmp_path: Path) -> None:
    assert run(server, tmp_path).courses == ()
    outcome = run(server, tmp_path, "raise")
    other, first = outcome.courses
    assert (first.rank, first.end, first.what, first.first) == (1, "raised", "KeyError: 'absent'", True)
    assert first.marks[-1][:2] == (1, "op")
    assert not other.first
    for course in outcome.courses:
        times = [at for _, _, at in course.marks]
        assert times == sorted(times)
        assert times[-1] <= course.end_s <= outcome.duration_s
    assert [(c.end, c.what) for c in run(server, tmp_path, "kill").courses][1] == ("died", "signal SIGKILL")
    stuck = run(server, tmp_path, "hang", deadline_s=1.0)
    assert [(c.end, c.marks[-1][:2], c.first) for c in stuck.courses] == [("stuck", (1, "op"), False)] * 2
    assert JobOutcome.from_json(json.loads(json.dumps(stuck.to_json()))) == stuck


@pytest.mark.parametrize(("fault", "strays"), [("daemon", 1), ("fork_bomb", 6)])
def test_what_a_rank_leaves_behind_is_killed(server: ForkServer, tmp_path: Path, fault: str, strays: int) -> None:
    outcome = run(server, tmp_path, fault)
    assert outcome.ok
    assert outcome.strays == strays
    assert server.pid
    assert descendants(server.pid) == []


def test_a_rank_that_signals_its_process_group_hits_its_job_only(server: ForkServer, tmp_path: Path) -> None:
    outcome = run(server, tmp_path, "killpg")
    assert (1, "signal SIGKILL") in outcome.died
    assert run(server, tmp_path).ok


def test_system_exit_and_a_very_long_message_are_errors(server: ForkServer, tmp_path: Path) -> None:
    assert run(server, tmp_path, "system_exit").errors[0].type == "SystemExit"
    long = run(server, tmp_path, "long").errors[0]
    assert len(long.message) < 20_000
    assert "characters left out" in long.message


@pytest.mark.parametrize("stage", ["construct", "observe"])
def test_the_stage_of_an_error(server: ForkServer, tmp_path: Path, stage: str) -> None:
    assert run(server, tmp_path, stage).errors[0].stage == stage


def test_a_library_without_space_differs_from_us_without_space(server: ForkServer, tmp_path: Path) -> None:
    library = run(server, tmp_path, "disk").errors[0]
    assert (library.stage, library.type, library.errno) == ("op", "OSError", 28)
    for rank in range(2):
        (tmp_path / f"session0.rank{rank}.obs").unlink()
        (tmp_path / f"session0.rank{rank}.obs").symlink_to("/dev/full")
    ours = run(server, tmp_path).errors[0]
    assert (ours.stage, ours.type, ours.errno) == ("record", "OSError", 28)


@pytest.mark.parametrize(("fault", "error"), [("descriptors", "OSError"), ("memory", "MemoryError")])
def test_a_rank_that_uses_up_what_it_may_have_crashes_alone(
    server: ForkServer, tmp_path: Path, fault: str, error: str
) -> None:
    outcome = run(server, tmp_path, fault)
    verdict, failure = ranks_verdict([outcome])
    assert (verdict, outcome.timed_out, outcome.first_failed) == (Verdict.CRASH, False, 1)
    assert failure is not None
    assert (failure.type, failure.rank, failure.op) == (error, 1, 1)
    assert run(server, tmp_path).ok, "it cost its own job only"


@pytest.mark.parametrize("fault", ["no_descriptors", "no_memory"])
def test_a_rank_that_may_have_nothing_more_ends_and_harms_no_other(
    server: ForkServer, tmp_path: Path, fault: str
) -> None:
    """Whether the rest of its session needs any, and so whether it ends well, is not said; that it ends is."""
    (tmp_path / "beside").mkdir()
    beside = server.submit(Job(BASE, 0, tmp_path / "beside", 30))
    assert not run(server, tmp_path, fault).timed_out
    assert beside.result(timeout=60).ok
    assert run(server, tmp_path).ok


def test_a_system_that_cannot_be_imported_is_the_jobs_error(server: ForkServer, tmp_path: Path) -> None:
    error = run(server, tmp_path, system="missing").errors[0]
    assert (error.stage, error.type) == ("construct", "ModuleNotFoundError")


def test_jobs_run_side_by_side_and_do_not_harm_each_other(server: ForkServer, tmp_path: Path) -> None:
    faults = ["hang", "", "kill", "", "raise", "", "daemon", ""]
    folders = [tmp_path / str(i) for i in range(len(faults))]
    for folder in folders:
        folder.mkdir()
    jobs = [
        server.submit(Job(replace(BASE, faults=(fault,) if fault else ()), 0, folder, 3))
        for fault, folder in zip(faults, folders, strict=True)
    ]
    outcomes = [future.result(timeout=60) for future in jobs]
    assert [o.ok for o in outcomes] == [False, True, False, True, False, True, True, True]
    assert [o.timed_out for o in outcomes] == [True, *[False] * 7]


def test_call_answers_and_keeps_its_worker(server: ForkServer) -> None:
    big = bytes(range(256)) * 4096
    assert server.call("tests.unit.world_stub:echo", big, 30) == big
    assert server.call("tests.unit.world_stub:echo", b"", 30) == b""
    assert server.call("tests.unit.world_stub:pid", b"", 30) == server.call("tests.unit.world_stub:pid", b"", 30)


def test_a_server_without_ranks_imports_and_warms_up_nothing_for_them() -> None:
    modules = b"torch shardproof.laboratory.judge torch.distributed.checkpoint"
    with ForkServer(path_prefix=[ROOT], plugins=["shardproof.laboratory.judge"], ranks=False,
                    warm_up=["tests.unit.world_stub:broken_warm_up"]) as server:  # fmt: skip
        assert server.call("tests.unit.world_stub:imported", modules, 60) == b"torch shardproof.laboratory.judge"


def test_workers_and_ranks_have_the_deterministic_environment(server: ForkServer) -> None:
    answer = server.call("tests.unit.world_stub:environment", b"", 30).decode()
    assert answer == f"default 1 ['yes'] {ROOT}" or answer.startswith("default 1 ['yes'] ")


def lets_policies_be_chosen() -> bool:
    code = "import os; os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))"
    free = os.sched_getscheduler(0) == os.SCHED_OTHER  # and not a policy that the tests were started with
    return free and not subprocess.run([sys.executable, "-c", code], capture_output=True).returncode


CHOOSES_POLICIES = pytest.mark.skipif(not lets_policies_be_chosen(), reason="this machine refuses another policy")


@CHOOSES_POLICIES
def test_what_is_forked_from_the_server_computes_as_batch_work(server: ForkServer) -> None:
    worker = int(server.call("tests.unit.world_stub:pid", b"", 30))
    assert os.sched_getscheduler(worker) == os.SCHED_BATCH
    assert os.sched_getscheduler(0) == os.SCHED_OTHER


@CHOOSES_POLICIES
def test_the_users_own_priority_stays() -> None:
    then = "from shardproof.world.process import take_long_turns; take_long_turns(); "
    then += "print(os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, 0))"
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    for chosen, expected in (
        ("os.nice(7)", f"{os.SCHED_BATCH} {min(nice + 7, 19)}"),
        ("os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))", f"{os.SCHED_IDLE} {nice}"),
    ):
        code = f"import os; {chosen}; {then}"
        seen = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        assert seen.strip() == expected


def test_a_machine_that_refuses_another_policy_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardproof.world.process._SCHED_SETATTR", {})
    monkeypatch.setattr(os, "sched_setscheduler", Mock(side_effect=PermissionError))
    before = os.sched_getscheduler(0)
    take_long_turns()
    assert os.sched_getscheduler(0) == before


def test_call_reports_a_traceback_and_goes_on(server: ForkServer) -> None:
    with pytest.raises(HarnessError, match="ValueError: because"):
        server.call("tests.unit.world_stub:fail", b"because", 30)
    with pytest.raises(HarnessError, match="no_such_module"):
        server.call("tests.unit.no_such_module:f", b"", 30)
    assert server.call("tests.unit.world_stub:echo", b"again", 30) == b"again"


def test_a_worker_that_hangs_or_dies_is_replaced(server: ForkServer) -> None:
    with pytest.raises(HarnessError, match=r"no answer within 0\.5 s"):
        server.call("tests.unit.world_stub:act", b"hang", 0.5)
    with pytest.raises(HarnessError, match="ended in the middle"):
        server.call("tests.unit.world_stub:act", b"kill", 30)
    assert server.call("tests.unit.world_stub:echo", b"again", 30) == b"again"


def test_calls_from_several_threads(server: ForkServer) -> None:
    with ThreadPoolExecutor(8) as threads:
        payloads = [str(i).encode() for i in range(200)]
        answers = list(threads.map(lambda p: server.call("tests.unit.world_stub:echo", p, 30), payloads))
    assert answers == payloads


def test_a_call_costs_little(server: ForkServer) -> None:
    server.call("tests.unit.world_stub:echo", b"x" * 1000, 30)
    times = []
    for _ in range(300):
        start = time.perf_counter()
        server.call("tests.unit.world_stub:echo", b"x" * 1000, 30)
        times.append(time.perf_counter() - start)
    assert sorted(times)[len(times) // 10] < 0.001


def test_a_server_that_dies_fails_its_jobs_and_is_replaced(tmp_path: Path) -> None:
    with stub_server() as server:
        assert run(server, tmp_path).ok
        first = server.pid
        assert first
        future = server.submit(Job(replace(BASE, faults=("hang",)), 0, tmp_path, 60))
        ranks = settled(first, 3)
        os.kill(first, signal.SIGKILL)
        with pytest.raises(HarnessError, match="fork server died"):
            future.result(timeout=30)
        assert run(server, tmp_path).ok
        assert server.call("tests.unit.world_stub:echo", b"x", 30) == b"x"
        assert server.pid != first
        assert all(map(is_ending, ranks))


def test_close_ends_everything(tmp_path: Path) -> None:
    server = stub_server()
    future = server.submit(Job(replace(BASE, faults=("hang", "daemon")), 0, tmp_path, 60))
    server.call("tests.unit.world_stub:echo", b"x", 30)
    pid = server.pid
    assert pid
    processes = [pid, *settled(pid, 4)]
    server.close()
    with pytest.raises(HarnessError):
        future.result(timeout=10)
    assert all(map(is_ending, processes))


def test_time_without_a_cpu_is_told_from_time_asleep() -> None:
    busy = "import os, time\nos.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\nprint(flush=True)\n"
    spin, sleep = (
        busy + f"end = time.monotonic() + 30\nwhile time.monotonic() < end: {what}"
        for what in ("pass", "time.sleep(1)")
    )
    running = [subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE) for text in (spin, spin, sleep)]
    try:
        for each in running:
            assert each.stdout
            assert each.stdout.readline()
        before = [starved_s(each.pid) for each in running]
        time.sleep(1.5)
        waited = [starved_s(each.pid) - earlier for each, earlier in zip(running, before, strict=True)]
    finally:
        for each in running:
            with each:
                each.kill()
    assert max(waited[:2]) > max(0.2, waited[2])
    assert starved_s(running[0].pid) == 0.0


def test_a_warm_up_that_fails_says_why(tmp_path: Path) -> None:
    with ForkServer(path_prefix=[ROOT], warm_up=["tests.unit.world_stub:broken_warm_up"]) as server:
        with pytest.raises(HarnessError, match="the library does not start"):
            server.submit(Job(BASE, 0, tmp_path, 30)).result(timeout=60)
        with pytest.raises(HarnessError, match="the library does not start"):
            server.call("tests.unit.world_stub:echo", b"", 30)


def test_an_interpreter_that_does_not_exist_says_so(tmp_path: Path) -> None:
    with ForkServer(python="/nonexistent/python") as server, pytest.raises(HarnessError, match="could not be started"):
        server.submit(Job(BASE, 0, tmp_path, 30)).result(timeout=60)


@pytest.mark.parametrize("ended", ["os.getpid()", "server.pid"])
def test_everything_ends_with_the_parent_and_with_the_server(tmp_path: Path, ended: str) -> None:
    """Also what a rank has left behind, which the kernel ends with nobody; and the parent's scratch folder, which it
    cannot remove itself."""
    program = (
        "import sys, os, signal\n"
        "from tests.unit.world.test_world import *\n"
        "server = stub_server(scratch=Path(sys.argv[1]))\n"
        "server.submit(Job(replace(BASE, faults=('daemon', 'hang')), 0, Path(sys.argv[1]), 60))\n"
        "while server.pid is None: time.sleep(0.01)\n"
        "print(server.pid, *settled(server.pid, 4), flush=True)\n"
        f"os.kill({ended}, signal.SIGKILL)\n"
        "time.sleep(5)\n"
    )
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    ran = subprocess.run([sys.executable, "-c", program, str(scratch)], cwd=ROOT, capture_output=True, check=False)
    pids = ran.stdout.split()
    assert len(pids) == 5, ran.stderr
    give_up = time.monotonic() + 30
    killed = ended == "os.getpid()"
    while (left := [pid for pid in map(int, pids) if not is_ending(pid)]) and time.monotonic() < give_up:
        time.sleep(0.02)
    assert left == []
    assert scratch.exists() is not killed


def test_ranks_inherit_neither_what_torch_may_load_nor_the_users_own_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    left_out = [name.replace("*", "X") for name in NOT_INHERITED]
    for name in left_out:
        monkeypatch.setenv(name, "1")
    with stub_server() as server:
        names = server.call("tests.unit.world_stub:variables", b"", 60).decode().split("\0")
    assert "ATEN_CPU_CAPABILITY" in names
    assert not set(left_out) & set(names)


def test_the_parents_side_does_not_import_torch() -> None:
    program = "import sys, shardproof.world.server; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False).returncode == 0


def test_shortened_keeps_both_ends() -> None:
    assert shortened("short") == "short"
    text = shortened("a" * 50_000 + "z" * 50_000, 1000)
    assert len(text) < 1100
    assert text[0] == "a"
    assert text[-1] == "z"


def test_the_board_keeps_the_last_mark_of_a_program_that_is_too_long() -> None:
    board = Board(2)
    for index in range(1000):
        board.mark(1, index, 2)
    marks = board.marks(1)
    assert board.marks(0) == []
    assert [mark[0] for mark in marks[:3]] == [0, 1, 2]
    assert marks[-1][:2] == (999, 2)


def test_a_truncated_observation_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "session0.rank0.obs"
    assert list(read_observations(path)) == []
    path.write_bytes((100).to_bytes(8, "little") + b"short")
    with pytest.raises(ValueError, match="truncated: an observation of 100 bytes, 5 of them there"):
        list(read_observations(path))
