"""Linux process control: dying with the parent, adopting orphans, and a progress board shared with ranks.

A harness that starts thousands of processes must leave none behind, whatever a library does: a rank that starts a
daemon, a supervisor that is killed, a parent that is gone. The kernel does the work (`PR_SET_PDEATHSIG`,
`PR_SET_CHILD_SUBREAPER`); this module asks it to.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import platform
import signal
import struct
import time
import traceback
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import NoReturn

LONGEST_DEADLINE = 4
"""How many times its deadline something may take on a machine that leaves its processes no CPU."""

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PF_EXITING = 4
_MADV_COLLAPSE = 25
_HUGE_PAGE = 1 << 21
_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}
_SCHED_ATTR_BYTES = 48
_TURN_NS = 50_000_000
_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent(parent: int, clean_up: Callable[[], object] | None = None) -> None:
    """Have the kernel end this process when its parent, process `parent`, ends (strictly, when the thread ends that
    forked it).

    Args:
        clean_up: called then, and at any other SIGTERM, wherever the process is. Without it, the process is killed.
    """

    def end(*_: object) -> NoReturn:
        try:
            if clean_up is not None:
                clean_up()
        finally:
            os._exit(128 + signal.SIGTERM)

    if clean_up is not None:
        signal.signal(signal.SIGTERM, end)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL if clean_up is None else signal.SIGTERM)
    if os.getppid() != parent:
        end()


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent ends, also of those that called setsid."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def fork(child: Callable[[], None]) -> int:
    """Fork; run `child` in the new process, which then ends without any clean-up of its own. Returns its pid."""
    pid = os.fork()
    if not pid:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # and not the handler that `die_with_parent` gave this process
        _run_and_exit(child)
    return pid


def start_autograd() -> None:
    """Run one plain backward pass, so that autograd decides now, for good, that it needs no threads for devices.

    A CUDA build of torch on a machine without a GPU has no device, until something enters a FakeTensorMode, as
    DTensor's sharding propagation does: that installs a stand-in for the CUDA device guard, which counts eight
    devices. The first backward pass of a process starts one thread for each device that it finds, and autograd refuses
    every backward pass in a child forked after that ("Unable to handle autograd's threading in combination with
    fork-based multiprocessing"). The decision is made once in a process. Made here, before anything else has run, it
    finds no device.
    """
    import torch

    torch.ones(1, requires_grad=True).sum().backward()  # type: ignore[no-untyped-call]


def close_all_but(keep: Iterable[int]) -> None:
    """Close every inherited descriptor but standard input, output and error and `keep`."""
    kept = sorted(keep)
    for low, high in zip([2, *kept], [*kept, 1 << 20], strict=True):
        os.closerange(low + 1, high)


def collapse_memory() -> int:
    """Move this process's private memory into huge pages, so that a fork copies hundreds of entries, not 60,000.

    Returns how many MiB were moved; 0 on kernels without MADV_COLLAPSE (before Linux 6.1). Contents do not change.
    """
    moved = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, access, *_, inode = line.split()[:5]
        first, last = (int(address, 16) for address in span.split("-"))
        if access != "rw-p" or inode != "0" or "[stack" in line:
            continue
        for address in range(-(-first // _HUGE_PAGE) * _HUGE_PAGE, last - _HUGE_PAGE + 1, _HUGE_PAGE):
            moved += not _libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(_HUGE_PAGE), _MADV_COLLAPSE)
    return moved * (_HUGE_PAGE >> 20)


def take_long_turns() -> None:
    """Ask Linux for few, long turns on a core for this process and those it will fork, instead of many short ones.

    Ranks of a world outnumber the cores and wait for each other. In the usual policy each message wakes a rank that
    takes the core from the one that sent it, whose half-done work holds a lock that the next one spins on, and each
    change empties the caches. As batch work, turns of 50 ms need a sixth less time on two cores (`docs/decisions.md`);
    with a core for each rank it makes no difference. Kernels before Linux 6.12 ignore the length, and what is refused,
    by a container say, is left as it is: only time is lost. So is what the user has chosen himself, `nice` or
    another policy.
    """
    if os.sched_getscheduler(0) != os.SCHED_OTHER:
        return
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    number = _SCHED_SETATTR.get(platform.machine())
    asked = struct.pack("IIQiIQQQ", _SCHED_ATTR_BYTES, os.SCHED_BATCH, 0, nice, 0, _TURN_NS, 0, 0)
    if number is None or _libc.syscall(number, 0, asked, 0):
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def kill_children(spare: Collection[int] = ()) -> int:
    """Kill and reap this process's children, and theirs as they are adopted, until none is left but `spare`.

    Needs `adopt_orphans`. Returns the number of processes that were still alive.
    """
    killed: set[int] = set()
    while remaining := [pid for pid in children_of(os.getpid()) if pid not in spare]:
        for pid in remaining:
            if pid not in killed and not is_ending(pid):
                killed.add(pid)
            _kill(pid)
        for pid in remaining:
            os.waitpid(pid, 0)
    return len(killed)


def ended_how(status: int) -> str:
    """A wait status in words: `signal SIGKILL` or `exit 7`."""
    code = os.waitstatus_to_exitcode(status)
    return f"exit {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"


class Board:
    """Progress marks of a job's ranks in shared memory: readable after a rank was killed, and no disk can be full.

    Each rank owns 4 KiB: the number of marks, then marks of (op index, stage, monotonic nanoseconds). Of a longer
    program than fits, the last mark is overwritten.
    """

    _MARK = struct.Struct("<hhxxxxq")
    _COUNT = struct.Struct("<q")
    _BYTES = 4096
    _CAPACITY = (_BYTES - _COUNT.size) // _MARK.size

    def __init__(self, world: int) -> None:
        self._memory = mmap.mmap(-1, world * self._BYTES)

    def mark(self, rank: int, op_index: int, stage: int) -> None:
        """Note that `rank` enters a stage of an op now."""
        base = rank * self._BYTES
        (count,) = self._COUNT.unpack_from(self._memory, base)
        slot = min(count, self._CAPACITY - 1)
        position = base + self._COUNT.size + slot * self._MARK.size
        self._MARK.pack_into(self._memory, position, op_index, stage, time.monotonic_ns())
        self._COUNT.pack_into(self._memory, base, slot + 1)

    def marks(self, rank: int) -> list[tuple[int, int, int]]:
        """The rank's marks so far: (op index, stage, monotonic nanoseconds)."""
        base = rank * self._BYTES
        (count,) = self._COUNT.unpack_from(self._memory, base)
        start = base + self._COUNT.size
        return [self._MARK.unpack_from(self._memory, start + i * self._MARK.size) for i in range(count)]


def _run_and_exit(child: Callable[[], None]) -> NoReturn:
    status = 70
    try:
        child()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def children_of(process: int) -> list[int]:
    """The process ids of a process's children, read from `/proc`: thread by thread, oldest child first."""
    pids: list[int] = []
    for task in Path(f"/proc/{process}/task").iterdir():
        pids += map(int, (task / "children").read_text().split())
    return pids


def is_ending(pid: int) -> bool:
    """Whether a process is a zombie or on its way to become one; the kernel says so before it closes its sockets."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return True
    return fields[0] == "Z" or bool(int(fields[6]) & _PF_EXITING)


def is_stopped(pid: int) -> bool:
    """Whether a process was stopped by a signal, as SIGSTOP does; not by a debugger."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False


def cpu_s(pid: int) -> float:
    """Seconds of processor time that a process, its threads and its reaped children have had; 0 once it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def starved_s(pid: int) -> float:
    """Seconds that a process was ready to run and waited for a CPU; 0 where the kernel does not say."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0


def in_session(session: int) -> list[int]:
    """The processes of the session that process `session` leads."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == session:
            found.append(int(folder.name))
    return found


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value}) failed")
