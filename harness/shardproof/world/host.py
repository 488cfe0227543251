"""The warm server's process: imports torch and the library once, then forks a supervisor for each job.

Why: importing torch takes seconds, a scenario of two forked ranks 0.2 s. What was imported or computed before the first
fork is shared with all ranks, copy-on-write. The process is single-threaded in its own code, holds no result, and ends
when the parent's socket closes.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib.metadata
import os
import re
import selectors
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from shardproof.entry import resolve
from shardproof.errors import CANNOT_IMPORT
from shardproof.ownership import folders_of, in_one_line, of_users_file, with_callable
from shardproof.protocol.plugin_modules import import_plugin
from shardproof.protocol.registry import system_named
from shardproof.world import cure_import_hook, process, rehearsal, shapes, wire
from shardproof.world.job import Job, shortened
from shardproof.world.supervisor import supervise
from shardproof.world.worker import serve

_PACKAGE = re.compile(r".*site-packages/(\w+)/")
"""The package that a file of a library belongs to."""


@dataclass
class _Supervised:
    """A job in progress, as the server sees it."""

    job_id: int
    job: Job
    pid: int
    pidfd: int
    channel: socket.socket
    give_up: float


@dataclass
class _Host:
    control: socket.socket
    selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)
    jobs: dict[int, _Supervised] = field(default_factory=dict)  # pidfd → job
    workers: dict[int, tuple[int, int]] = field(default_factory=dict)  # pidfd → (worker id, pid)


def main(
    control_fd: int, parent: int, warm_up: Sequence[str], plugins: Sequence[str], scratch: str, device: str,
    ranks: bool, beside: str,
) -> None:  # fmt: skip
    """Warm up, prove that ranks can run, say so, and serve until the parent is gone.

    Args:
        scratch: the parent's folder, which a parent that was killed cannot remove itself; may be empty. device: of the
            scenarios. ranks: whether ranks will be forked. beside: the user's folder, where modules that he named may
            lie; it is searched last.
    """
    process.adopt_orphans()
    process.take_long_turns()
    process.die_with_parent(parent, lambda: _leave(parent, scratch))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    control = socket.socket(fileno=control_fd)
    if beside:
        sys.path.append(beside)
    try:
        cure_import_hook.install(os.environ.pop(cure_import_hook.VARIABLE, ""))
        warm([*(RANKS_IMPORT if ranks else ()), *plugins], warm_up if ranks else (), device)
        if ranks:
            rehearsal.prove(device, Path(scratch or tempfile.gettempdir()))
    except rehearsal.UnfitError as error:
        _give_up(control, f"ranks cannot run here: {error}")
    except BaseException as error:
        message = with_callable(str(error)) if isinstance(error, TypeError) else str(error)
        text = traceback.format_exc()
        line = in_one_line(type(error).__name__, message, text)
        if told := of_users_file(error):
            _give_up(control, shortened(told))
        if where := _of_import(error):
            first = message.strip().partition("\n")[0]
            _give_up(control, f"{where}: {type(error).__name__}: {first}\n{shortened(text)}")
        if ranks and (lacks := _unfit(device, scratch)):  # which is why a library's own warm-up fails
            _give_up(control, f"ranks cannot run here: {lacks}")
        _give_up(control, f"{line}, while a server warmed up\n{shortened(text)}")
    wire.send(control, {"kind": "ready"})
    _serve(_Host(control))
    _leave(parent, scratch)
    os._exit(0)


def _unfit(device: str, scratch: str) -> str:
    """Why ranks cannot run on this machine at all; empty where they can."""
    try:
        rehearsal.prove(device, Path(scratch or tempfile.gettempdir()))
    except rehearsal.UnfitError as error:
        return str(error)
    except Exception:  # the error in hand is told all the same
        return ""
    return ""


def _of_import(error: BaseException) -> str:
    """For an error that a library raised while it was being imported: that it cannot be imported, and with which
    package the statement that failed comes; empty for any other."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = max((n for n, frame in enumerate(frames) if frame.filename.startswith(folders_of("shardproof"))), default=-1)
    theirs = frames[ours + 1 :]
    if not any(frame.filename.startswith("<frozen importlib") for frame in theirs):
        return ""
    packages = [found[1] for frame in theirs if (found := _PACKAGE.search(frame.filename))]
    if len(set(packages)) > 1:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return f"{CANNOT_IMPORT} with {packages[-1]} {importlib.metadata.version(packages[-1])}"
    return f"{CANNOT_IMPORT} here"


def _give_up(control: socket.socket, reason: str) -> NoReturn:
    wire.send(control, {"kind": "failed", "reason": reason})
    os._exit(1)


def _leave(parent: int, scratch: str) -> None:
    """End everything that was started here, and remove what a parent that is gone has left behind."""
    process.kill_children()
    if scratch and (os.getppid() != parent or process.is_ending(parent)):
        shutil.rmtree(scratch, ignore_errors=True)


RANKS_IMPORT = (
    "torch.distributed", "torch.distributed.checkpoint", "torch.distributed.fsdp", "shardproof.protocol.registry",
    "shardproof.observe.ambient", "shardproof.world.rank",
)  # fmt: skip
"""What every rank would otherwise import for itself."""


def warm(modules: Sequence[str], warm_up: Sequence[str], device: str) -> None:
    """Import modules, and call the entries `warm_up`, once for all processes that are forked from this one."""
    import torch

    torch.set_num_threads(1)
    if device == "cpu":
        process.start_autograd()
    torch.sqrt(torch.ones(64))  # MKL initialises itself in its first call, in which two threads may race
    for module in modules:
        import_plugin(module)
    shapes.install()
    for entry in warm_up:
        resolve(entry)()
    shapes.keep_warm_up()
    _forget_meshes()
    gc.collect()
    gc.freeze()
    process.collapse_memory()


def _forget_meshes() -> None:
    """Empty the caches of DTensor that the warm-up filled.

    Their entries are keyed by mesh and shapes but keep the *caller's* mesh, with its coordinate and groups: a rank that
    found an entry of another rank's, or of a group that is gone, would compute wrong chunks. Measured: after a
    rehearsal as rank 0 of a fake world of 2, real worlds of 2 saved overlapping boxes.
    """
    if "torch.distributed.tensor" not in sys.modules:
        return
    import torch

    torch._C._clear_DTensor_sharding_propagator_cache()
    cached_type = type(functools.lru_cache(int))
    for found in gc.get_objects():
        if type(found) is cached_type and str(found.__module__).startswith("torch.distributed.tensor"):
            found.cache_clear()


def _serve(host: _Host) -> None:
    host.selector.register(host.control, selectors.EVENT_READ)
    while True:
        ready = {key.fd for key, _ in host.selector.select(_time_left(host))}
        for pidfd in ready & host.workers.keys():
            _worker_ended(host, pidfd)
        for pidfd in ready & host.jobs.keys():
            _job_ended(host, pidfd)
        _kill_overdue(host)
        if host.control.fileno() in ready and not _obey(host):
            return


def _time_left(host: _Host) -> float | None:
    return min((max(0.0, job.give_up - time.monotonic()) for job in host.jobs.values()), default=None)


def _obey(host: _Host) -> bool:
    """Carry out one request of the parent; False when it is gone."""
    message, fds = wire.receive(host.control, max_fds=1)
    if message is None:
        return False
    match message["kind"]:
        case "job":
            _start_job(host, message["id"], Job.from_json(message["job"]))
        case "worker":
            _start_worker(host, message["id"], fds[0])
        case "kill_worker":
            for worker_id, pid in host.workers.values():
                if worker_id == message["id"]:
                    os.kill(pid, signal.SIGKILL)
        case other:
            raise ValueError(f"unknown request {other!r}")
    return True


def _start_job(host: _Host, job_id: int, job: Job) -> None:
    with contextlib.suppress(Exception):  # if the library cannot be imported, the ranks report that as their own error
        system = system_named(job.scenario.system)
        resolve(system.entry(system.rank))
    ours, theirs = wire.packet_pair()
    pid = _fork(theirs, lambda: supervise(job, theirs), process.kill_children)
    pidfd = os.pidfd_open(pid)
    host.selector.register(pidfd, selectors.EVENT_READ)
    host.jobs[pidfd] = _Supervised(job_id, job, pid, pidfd, ours, time.monotonic() + job.answered_s)


def _start_worker(host: _Host, worker_id: int, fd: int) -> None:
    channel = socket.socket(fileno=fd)
    pid = _fork(channel, lambda: serve(channel))
    pidfd = os.pidfd_open(pid)
    host.selector.register(pidfd, selectors.EVENT_READ)
    host.workers[pidfd] = (worker_id, pid)


def _fork(channel: socket.socket, run: Callable[[], None], clean_up: Callable[[], object] | None = None) -> int:
    """Fork a child that keeps nothing of ours open but `channel`, which is closed here.

    Args:
        clean_up: what the child does before it ends with this process.
    """
    parent = os.getpid()

    def child() -> None:
        process.die_with_parent(parent, clean_up)
        process.close_all_but([channel.fileno()])
        run()

    pid = process.fork(child)
    channel.close()
    return pid


def _job_ended(host: _Host, pidfd: int) -> None:
    """Pass the outcome on, or say that there is none, and clean up behind a supervisor that failed."""
    job = host.jobs.pop(pidfd)
    status = _forget(host, pidfd, job.pid)
    message, _ = wire.receive(job.channel)
    job.channel.close()
    shapes.read(job.job.shapes)
    if message is None:
        process.kill_children(spare=[*(j.pid for j in host.jobs.values()), *(pid for _, pid in host.workers.values())])
    answer: dict[str, Any] = {"outcome": message} if message else {"lost": process.ended_how(status)}
    wire.send(host.control, {"kind": "outcome", "id": job.job_id, **answer})


def _worker_ended(host: _Host, pidfd: int) -> None:
    _, pid = host.workers.pop(pidfd)
    _forget(host, pidfd, pid)


def _forget(host: _Host, pidfd: int, pid: int) -> int:
    host.selector.unregister(pidfd)
    os.close(pidfd)
    return os.waitpid(pid, 0)[1]


def _kill_overdue(host: _Host) -> None:
    now = time.monotonic()
    for job in host.jobs.values():
        if job.give_up <= now:
            os.kill(job.pid, signal.SIGKILL)
            job.give_up = float("inf")
