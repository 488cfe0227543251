"""A job's supervisor: forks its ranks, enforces the deadline, and ends only when nothing of the job is left alive.

One supervisor a job, forked from the warm server. It adopts the orphans of its ranks, so that whatever a rank leaves
behind, daemons included, is known to belong to this job and is killed with it, while other jobs go on.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import tempfile
import textwrap
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from shardproof.observe.courses import MOST_MARKS, MOST_SAID, RankCourse
from shardproof.observe.stacks import in_one_text, stack_in
from shardproof.world import process, wire
from shardproof.world.job import STAGES, TRACEBACK_CHARACTERS, Job, JobOutcome, RankError, RankPlace
from shardproof.world.rank import DUMP_SIGNAL, RankSeat, run_rank

DUMP_S = 0.2  # how long a rank has to write its stack
SOCKET_PATH_BYTES = 107  # the longest path of a Unix socket (sun_path, less its final zero)
# the longest that multiprocessing puts below the temporary folder
SOCKET_NAME_BYTES = len("/pymp-12345678/listener-12345678")
GRACE_S = 1.0  # after a rank failed, the others get this long to report their own errors


@dataclass
class _Ranks:
    """The live ranks and what was heard of the others. failed_ns: rank → when it raised or died."""

    pidfds: dict[int, int] = field(default_factory=dict)  # pidfd → rank
    pids: dict[int, int] = field(default_factory=dict)  # rank → pid
    errors: list[RankError] = field(default_factory=list)
    died: list[tuple[int, str]] = field(default_factory=list)
    failed_ns: dict[int, int] = field(default_factory=dict)
    reported: set[int] = field(default_factory=set)
    first_failed: int | None = None

    @property
    def silent(self) -> list[int]:
        """Live ranks that have not said that they are done, or failed."""
        return sorted(set(self.pidfds.values()) - self.reported)


def supervise(job: Job, outcome_channel: socket.socket) -> None:
    """Run the job and send its outcome; called in the supervisor's own process."""
    process.adopt_orphans()
    wire.send(outcome_channel, run_job(job).to_json())


def run_job(job: Job) -> JobOutcome:
    """Fork the ranks of a job and wait for their end. This process must have no other children."""
    started_ns = time.monotonic_ns()
    world = job.ops[0].mesh.world
    board = process.Board(world)
    ours, theirs = wire.packet_pair()
    ranks = _fork_ranks(job, world, board, theirs)
    timed_out = _wait(ranks, ours, started_ns / 1e9, job)
    stopped_ns = time.monotonic_ns()
    stuck = [_place(job, board, rank) for rank in ranks.silent]
    stack = _dump_stacks(job, ranks) if timed_out else ""
    strays = _end(ranks, ours)
    theirs.close()  # only now: a channel without writers would be readable all the time
    ended_ns = time.monotonic_ns()
    failed = bool(ranks.errors or ranks.died or timed_out)
    return JobOutcome(
        errors=tuple(ranks.errors),
        died=tuple(ranks.died),
        first_failed=ranks.first_failed,
        timed_out=timed_out,
        stuck=tuple(stuck),
        strays=strays,
        duration_s=(ended_ns - started_ns) / 1e9,
        cpu_s=sum(os.times()[:4]),
        profile=_profile(job, board, world, started_ns, ended_ns),
        observations=tuple(job.observation(rank) for rank in range(world)),
        stack=stack,
        shared_gpus=bool(ranks.died) and _gpus_are_shared(job, world),
        courses=tuple(_course(ranks, board, rank, started_ns, stopped_ns) for rank in range(world) if failed),
    )


def _gpus_are_shared(job: Job, world: int) -> bool:
    if job.scenario.device != "cuda":
        return False
    import torch

    return torch.cuda.device_count() < world


def _fork_ranks(job: Job, world: int, board: process.Board, channel: socket.socket) -> _Ranks:
    ranks = _Ranks()
    supervisor = os.getpid()
    with socket.create_server(("127.0.0.1", 0), backlog=4 * world) as store:
        port = store.getsockname()[1]
        for rank in range(world):
            seat = RankSeat(job, rank, world, board, channel, store.fileno(), port)
            group = ranks.pids.get(0, 0)
            pid = process.fork(lambda seat=seat, group=group: _become_rank(seat, group, supervisor))  # type: ignore[misc]
            _join_process_group(pid, group or pid)
            ranks.pids[rank] = pid
            ranks.pidfds[os.pidfd_open(pid)] = rank
    return ranks


def _become_rank(seat: RankSeat, group: int, supervisor: int) -> None:
    process.die_with_parent(supervisor)
    os.setpgid(0, group)
    _redirect_output(seat)
    _keep_temporary_files(seat.job.directory)
    process.close_all_but([seat.channel.fileno(), seat.store_fd][: 2 if seat.rank == 0 else 1])
    run_rank(seat)


def _redirect_output(seat: RankSeat) -> None:
    """Standard input from nowhere, output into the rank's log; into nowhere when the log cannot be created."""
    null = os.open(os.devnull, os.O_RDWR)
    try:
        log = os.open(seat.job.log(seat.rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError:
        log = null
    os.dup2(null, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)


def _keep_temporary_files(folder: Path) -> None:
    """Have a rank's temporary files where the job's are, so that those of a killed rank go with them: the folder of a
    library's manager process outlives it otherwise. Not where its sockets' paths would be too long."""
    if len(os.fsencode(folder)) + SOCKET_NAME_BYTES <= SOCKET_PATH_BYTES:
        tempfile.tempdir = os.environ["TMPDIR"] = str(folder)


def _join_process_group(pid: int, group: int) -> None:
    try:
        os.setpgid(pid, group)
    except (ProcessLookupError, PermissionError):
        return  # the rank has joined it by itself, and may have ended since


def _wait(ranks: _Ranks, channel: socket.socket, started: float, job: Job) -> bool:
    """Until every rank has said its last, the deadline passes, or the grace after a failure; True for the deadline.

    What a rank waited for a CPU does not count: on a busy machine a slow scenario is not a hang.
    """
    poll = select.poll()
    poll.register(channel, select.POLLIN)
    for pidfd in ranks.pidfds:
        poll.register(pidfd, select.POLLIN)
    give_up, failed = started + job.deadline_s, False
    while ranks.silent:
        remaining = give_up - time.monotonic()
        if remaining <= 0 and ranks.first_failed is None:
            starved = max(process.starved_s(ranks.pids[rank]) for rank in ranks.pidfds.values())
            give_up = started + min(job.deadline_s + starved, job.longest_s)
            remaining = give_up - time.monotonic()
        if remaining <= 0:
            return ranks.first_failed is None
        ready = [fd for fd, _ in poll.poll(remaining * 1000 + 1)]
        _hear(ranks, channel)
        for pidfd in ready:
            if pidfd in ranks.pidfds:
                poll.unregister(pidfd)
                _bury(ranks, pidfd)
        if ranks.first_failed is not None and not failed:
            failed, give_up = True, min(give_up, time.monotonic() + GRACE_S)
    return False


def _dump_stacks(job: Job, ranks: _Ranks) -> str:
    """Have the ranks that are still alive write their Python stacks into their logs; these stacks."""
    if not ranks.silent:
        return ""
    for rank in ranks.silent:
        os.kill(ranks.pids[rank], DUMP_SIGNAL)
    time.sleep(DUMP_S)
    stacks: dict[int, str] = {}
    for rank in ranks.silent:
        with suppress(OSError):  # on a full disk there are no logs
            stacks[rank] = stack_in(job.log(rank).read_text(errors="replace"))
    return in_one_text(stacks, TRACEBACK_CHARACTERS)


def _hear(ranks: _Ranks, channel: socket.socket) -> None:
    """Read what ranks said, and decide who failed first.

    The first error may be the echo of another rank's silent death, whose end we have not seen yet. But that rank was
    ending before the echo was sent, and a rank that is ending has said all it will ever say.
    """
    _drain(ranks, channel)
    if ranks.errors and ranks.first_failed is None:
        ending = {rank for rank in ranks.pidfds.values() if process.is_ending(ranks.pids[rank])}
        _drain(ranks, channel)
        silent = sorted(ending - ranks.reported)
        ranks.first_failed = silent[0] if silent else ranks.errors[0].rank


def _drain(ranks: _Ranks, channel: socket.socket) -> None:
    while select.select([channel], [], [], 0)[0]:
        message, _ = wire.receive(channel)
        if message is None:
            return
        ranks.reported.add(message["rank"])
        if "error" in message:
            ranks.errors.append(RankError(**message["error"]))
            ranks.failed_ns[message["rank"]] = message["at_ns"]


def _bury(ranks: _Ranks, pidfd: int) -> None:
    """Reap a rank that has ended. One that ended without a word has died."""
    rank = ranks.pidfds.pop(pidfd)
    os.close(pidfd)
    _, status = os.waitpid(ranks.pids[rank], 0)
    if rank not in ranks.reported:
        ranks.failed_ns[rank] = time.monotonic_ns()
        ranks.died.append((rank, process.ended_how(status)))
        ranks.first_failed = rank if ranks.first_failed is None else ranks.first_failed


def _end(ranks: _Ranks, channel: socket.socket) -> int:
    """Kill what is left of the job; the number of live processes killed that were not ranks."""
    for pidfd, rank in ranks.pidfds.items():
        os.kill(ranks.pids[rank], signal.SIGKILL)
        os.close(pidfd)
    for rank in ranks.pidfds.values():
        os.waitpid(ranks.pids[rank], 0)
    strays = process.kill_children()
    _hear(ranks, channel)
    channel.close()
    return strays


def _place(job: Job, board: process.Board, rank: int) -> RankPlace:
    marks = board.marks(rank)
    op_index, stage, _ = marks[-1] if marks else (-1, 0, 0)
    return RankPlace(rank, op_index, _kind(job, op_index), STAGES[stage])


def _kind(job: Job, op_index: int) -> str:
    return next((op.kind for op in job.ops if op.index == op_index), "")


def _course(ranks: _Ranks, board: process.Board, rank: int, started_ns: int, stopped_ns: int) -> RankCourse:
    """The course of a rank. `stopped_ns` says when those began to be killed that had not ended by themselves."""
    marks = [(op, STAGES[stage], _seconds(at_ns - started_ns)) for op, stage, at_ns in board.marks(rank)]
    raised, died = {error.rank: _said(error) for error in ranks.errors}, dict(ranks.died)
    end_ns = ranks.failed_ns.get(rank, stopped_ns)
    if rank in raised:
        end = "raised"
    elif rank in died:
        end = "died"
        if rank == ranks.first_failed:  # no later than what followed from it, which was heard before it was buried
            end_ns = min(ranks.failed_ns.values())
    elif rank in ranks.reported:
        end, end_ns = "done", board.marks(rank)[-1][2]
    else:
        end = "killed" if ranks.failed_ns else "stuck"
    kept = marks[:-1] if end == "done" else marks
    end_s = max(_seconds(end_ns - started_ns), marks[-1][2] if marks else 0.0)
    what = raised.get(rank) or died.get(rank, "")
    return RankCourse(rank, tuple(kept[-MOST_MARKS:]), end, end_s, what, rank == ranks.first_failed)


def _said(error: RankError) -> str:
    """The type of an error with the beginning of its message, on one line."""
    message = error.message.strip().partition("\n")[0]
    return textwrap.shorten(f"{error.type}: {message}", MOST_SAID, placeholder=" …") if message else error.type


def _seconds(nanoseconds: int) -> float:
    return round(nanoseconds / 1e9, 6)


def _profile(
    job: Job, board: process.Board, world: int, started_ns: int, ended_ns: int
) -> tuple[tuple[str, float], ...]:
    """Seconds of each phase on the rank where it took longest; `fork` before the first mark, `exit` after the last."""
    slowest: dict[str, int] = {}
    for rank in range(world):
        previous, name = started_ns, "fork"
        for op_index, stage, at_ns in [*board.marks(rank), (-1, -1, ended_ns)]:
            slowest[name] = max(slowest.get(name, 0), at_ns - previous)
            previous = at_ns
            where = f"{op_index} {_kind(job, op_index)} " if op_index >= 0 else ""
            name = "exit" if STAGES[stage] == "done" else where + STAGES[stage]
    return tuple((name, nanoseconds / 1e9) for name, nanoseconds in slowest.items())
