"""The parent's side of the warm fork server: submit sessions to fresh ranks, call functions in warm workers.

There is one `ForkServer` for each environment: an interpreter, a path, a release of a library. Importing this module or
using the class never imports torch; the server process does, once. A job that hangs, dies or leaves processes behind
costs itself only. When the server process itself dies, its jobs raise ServerLostError, and the next job starts another
server. One that is stopped or silent is killed (`shardproof.world.watchdog`).
"""

from __future__ import annotations

import itertools
import json
import os
import queue
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from types import TracebackType

from shardproof.errors import CANNOT_IMPORT, HarnessError, NotImportableError, ServerLostError
from shardproof.world import extension_locks, watchdog, wire
from shardproof.world.job import Job, JobOutcome

NO_GPU = {"CUDA_VISIBLE_DEVICES": "", "TORCH_CUDA_ARCH_LIST": "8.0"}
"""Environment of a process whose GPU is emulated: it sees none, and an extension would be built for the emulated one
(`shardproof.emulation.machine.Kind`). A library that builds one while it is imported, as Megatron-Core 0.15 does where
there is an nvcc, would be told by torch that it has no GPU to build for (`IndexError: list index out of range`)."""

DETERMINISM = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "MKL_CBWR": "COMPATIBLE",
    "OPENBLAS_NUM_THREADS": "1",
    "ATEN_CPU_CAPABILITY": "default",
    "GLOO_SOCKET_IFNAME": "lo",
    "PYTHONHASHSEED": "0",
    **NO_GPU,
}
"""Environment of every rank, twin and reference: one thread, and kernels whose bits do not depend on the CPU's vector
width or on an element's position in its shard. Torch takes fp32 square roots from MKL, whose code for a newer Intel CPU
rounds other elements wrongly than its code for an older one; `COMPATIBLE` is the same on all of Intel's. On AMD's it is
not (measured: the approximation of a reciprocal root in hardware is another one), so that ranks and judges that are
compared run on one machine."""

CUDA_DETERMINISM = {
    **{name: value for name, value in DETERMINISM.items() if name not in NO_GPU},
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
}
"""The same of a server whose ranks have GPUs, all that the user's environment shows. Whether there is one is asked of
NVML: asking CUDA would initialise it, and no fork could use it."""

NOT_INHERITED = (
    "TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD",
    "RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE",
    "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_*",
    "OMPI_COMM_WORLD_*", "PMI_*", "PMIX_*", "MPI_LOCALRANKID", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS*",
    "PYTEST_*",
)  # fmt: skip
"""Variables that ranks do not have of the user's, as shell patterns. The first two change what a library can load, and
a scenario says itself which of them it wants. The others say which rank of some job the user's process is, as under
`torchrun -m pytest` or `srun`, or which test it runs: libraries ask for them, and would find themselves in that job."""

CLOSE_S = 10.0  # a server that has not ended this long after its socket was closed is killed

_HOST_PROGRAM = "import sys, json; from shardproof.world.host import main; main(int(sys.argv[1]), int(sys.argv[2]), *json.loads(sys.argv[3]))"  # noqa: E501


@dataclass
class _Worker:
    """The parent's end of one worker, and the server that it belongs to."""

    worker_id: int
    channel: socket.socket
    host: _Host


class _Host:
    """One server process and the thread that reads its answers.

    The thread also starts the process: the kernel ends a server whose *thread* of origin ends.
    """

    def __init__(self, command: Sequence[str], arguments: str, environment: Mapping[str, str]) -> None:
        self._control, self._theirs = wire.packet_pair()
        self._lock = threading.Lock()
        self._futures: dict[int, Future[JobOutcome]] = {}
        self._left_s: dict[int, float] = {}  # job → seconds until it is late
        self._ready, self._unwanted = False, False
        self._ended = threading.Event()
        self._popen: subprocess.Popen[bytes] | None = None
        self._failure, self._started = "", time.time()
        extension_locks.clear_stale()
        self.unfit = ""
        """Why no job can run here, as the server itself said it; what it imports would say it again."""
        self.closed = False
        self._thread = threading.Thread(
            target=self._run, args=(list(command), arguments, environment), name="shardproof-server", daemon=True
        )
        self._thread.start()

    @property
    def pid(self) -> int | None:
        return self._popen.pid if self._popen else None

    def submit(self, job_id: int, job: Job, future: Future[JobOutcome]) -> bool:
        """Send a job; False when the server is gone and nothing was sent."""
        with self._lock:
            if self.closed:
                return False
            self._futures[job_id] = future
            self._left_s[job_id] = job.answered_s + watchdog.LATE_S
            with suppress(OSError):  # then the reader thread will fail the future
                wire.send(self._control, {"kind": "job", "id": job_id, "job": job.to_json()})
        return True

    def start_worker(self, worker_id: int) -> _Worker:
        ours, theirs = socket.socketpair()
        with theirs, self._lock, suppress(OSError):  # if the server is gone, reading `ours` will show it
            wire.send(self._control, {"kind": "worker", "id": worker_id}, (theirs.fileno(),))
        return _Worker(worker_id, ours, self)

    def kill_worker(self, worker_id: int) -> None:
        with self._lock, suppress(OSError):
            wire.send(self._control, {"kind": "kill_worker", "id": worker_id})

    def why(self, what: str) -> HarnessError:
        """The error of a worker that ended: with this server, if that has ended a moment from now, or alone."""
        self._thread.join(0.5)
        if not self.closed:
            return ServerLostError(what)
        self._thread.join(CLOSE_S)
        return self.error(f"{what}: the fork server died")

    def close(self) -> None:
        """End the server and every process it started. One that still imports would not hear of it for seconds, and has
        nothing to lose."""
        self._unwanted = True
        if not self._ready and self._popen is not None:
            self._popen.kill()
            extension_locks.clear_since(self._started)
        with suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)
        self._thread.join(CLOSE_S)

    def _run(self, command: list[str], arguments: str, environment: Mapping[str, str]) -> None:
        with tempfile.TemporaryFile() as output:
            try:
                with self._theirs as theirs:
                    self._popen = subprocess.Popen(
                        [*command, str(theirs.fileno()), str(os.getpid()), arguments],
                        env=environment, pass_fds=(theirs.fileno(),), start_new_session=True,
                        stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                    )  # fmt: skip
                    pid = self._popen.pid
                if self._unwanted:  # closed while it was being started
                    self._popen.kill()
                watch = threading.Thread(target=lambda: self._watch(pid), name="shardproof-watchdog", daemon=True)
                watch.start()
                self._read()
                self._ended.set()
                watch.join()
                with self._lock:
                    self.closed = True
                self._failure += self._end(self._popen)
            except OSError as error:
                self._failure = f"it could not be started: {error}"
            output.seek(0)
            self._failure += output.read()[-4000:].decode(errors="replace")
        self._fail_all()

    def _read(self) -> None:
        while True:
            message, _ = wire.receive(self._control)
            if message is None:
                return
            match message["kind"]:
                case "ready":
                    self._ready = True
                case "failed":
                    self.unfit = message["reason"]
                case "outcome":
                    self._left_s.pop(message["id"], None)
                    future = self._futures.pop(message["id"])
                    if "outcome" in message:
                        outcome = JobOutcome.from_json(message["outcome"])
                        if outcome.timed_out:
                            extension_locks.clear_since(time.time() - outcome.duration_s)
                        future.set_result(outcome)
                    else:
                        future.set_exception(ServerLostError(f"the job's supervisor died: {message['lost']}"))

    def _watch(self, pid: int) -> None:
        why = watchdog.watch(pid, self._ended, self._late)
        if why:
            self._failure += f"killed, since {why}; "

    def _late(self, passed_s: float) -> str:
        """Count seconds for every job of a server that has started; what is said where one is late."""
        if not self._ready:
            return ""
        for job_id, left_s in list(self._left_s.items()):
            self._left_s[job_id] = left_s - passed_s
            if left_s <= passed_s:
                return f"a job had no answer {watchdog.LATE_S:.0f} s after it had to be over"
        return ""

    def _end(self, popen: subprocess.Popen[bytes]) -> str:
        try:
            status = popen.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            popen.kill()
            status = popen.wait()
        return f"it ended with status {status}\n"

    def _fail_all(self) -> None:
        with self._lock:
            self.closed = True
            self._control.close()
        for future in self._futures.values():
            future.set_exception(self.error("the fork server died"))

    def error(self, what: str) -> HarnessError:
        """What a caller gets whose job or worker ended with this server."""
        return unfit_error(self.unfit) if self.unfit else ServerLostError(f"{what}: {self._failure}".rstrip(": "))


class ForkServer:
    """A warm server, started by `start` or at the first use.

    Args:
        python: interpreter for server and ranks. path_prefix: directories that come first on its `sys.path`, such as an
            overlay with one release of the library under test. warm_up: `module:function` to call before the first
            fork. plugins: modules to import first, which may register systems. env: additions to the environment.
        ranks: whether ranks will be forked. Without, nothing is warmed up for them, and nothing is proven of them.
        workers: how many `call`s may run at once. scratch: folder that the server removes when this process is killed.
        device: `cuda` for ranks and workers that have GPUs; nothing may be run before the fork then, by a warm-up or
        on import, that initialises CUDA or starts autograd's threads.

    All methods may be called from several threads. Every submitted job starts at once: how many run side by side
    is up to the caller.
    """

    def __init__(
        self,
        *,
        python: str = sys.executable,
        path_prefix: Sequence[str | Path] = (),
        warm_up: Sequence[str] = (),
        plugins: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        ranks: bool = True,
        workers: int = 1,
        scratch: Path | None = None,
        device: str = "cpu",
    ) -> None:
        self._command = [python, "-P", "-c", _HOST_PROGRAM]  # -P: see `interpreter.SAFE_PATH`
        beside = os.getcwd() if {"", os.getcwd()} & set(sys.path) else ""  # as `load_plugins` has put it there
        self._arguments = json.dumps([list(warm_up), list(plugins), str(scratch or ""), device, ranks, beside])
        users = {name: value for name, value in os.environ.items() if not _is_left_out(name)}
        numerics = CUDA_DETERMINISM if device == "cuda" else DETERMINISM
        self._environment = {**users, **numerics, **(env or {}), "PYTHONPATH": _python_path(path_prefix)}
        self._lock = threading.Lock()
        self._host: _Host | None = None
        self._ids = itertools.count()
        self._idle: queue.LifoQueue[_Worker | None] = queue.LifoQueue()
        for _ in range(workers):
            self._idle.put(None)

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def pid(self) -> int | None:
        """Process id of the server now running, for measurements."""
        with self._lock:
            return self._host.pid if self._host else None

    def start(self) -> None:
        """Start the server now, and do not wait for it: it imports while its user does something else."""
        self._running_host()

    def submit(self, job: Job) -> Future[JobOutcome]:
        """Run a job in fresh ranks. The future raises HarnessError when the server or the job's supervisor died."""
        future: Future[JobOutcome] = Future()
        future.set_running_or_notify_cancel()
        while not self._running_host().submit(next(self._ids), job, future):
            pass  # that server has just died: the next turn starts another
        return future

    def call(self, target: str, payload: bytes, deadline_s: float) -> bytes:
        """`module:function`(payload) in a warm worker; the start of the server, at the first call, counts as well.

        Raises:
            HarnessError: the function raised (with its traceback), ended its process, or passed the deadline; after
                the last two the worker is replaced.
        """
        worker = self._idle.get()
        try:
            if worker and worker.host.closed:
                _discard(worker)
                worker = None
            worker = worker or self._running_host().start_worker(next(self._ids))
            worker.channel.settimeout(deadline_s)
            kind, result = _ask(worker, target, payload)
        except TimeoutError:
            _discard(worker)
            worker = None
            raise HarnessError(f"{target}: no answer within {deadline_s} s") from None
        except EOFError:
            what = f"{target}: the worker process ended in the middle of the call"
            error = worker.host.why(what) if worker else ServerLostError(what)
            _discard(worker)
            worker = None
            raise error from None
        finally:
            self._idle.put(worker)
        if kind == b"error":
            raise HarnessError(f"{target} failed in its worker:\n{result.decode()}")
        return result

    def close(self) -> None:
        """End the server, its jobs and its workers. A later use starts a new one."""
        with self._lock:
            host, self._host = self._host, None
        for worker in [self._idle.get() for _ in range(self._idle.qsize())]:
            _discard(worker)
            self._idle.put(None)
        if host:
            host.close()

    def _running_host(self) -> _Host:
        with self._lock:
            if self._host and self._host.unfit:
                raise unfit_error(self._host.unfit)
            if self._host is None or self._host.closed:
                self._host = _Host(self._command, self._arguments, self._environment)
            return self._host


def unfit_error(reason: str) -> HarnessError:
    """The error of a server that gave up before it had served anything."""
    first = reason.partition("\n")[0]
    return NotImportableError(reason) if CANNOT_IMPORT in first.partition(":")[0] else HarnessError(reason)


def _ask(worker: _Worker, target: str, payload: bytes) -> tuple[bytes, bytes]:
    try:
        wire.send_blobs(worker.channel, target.encode(), payload)
    except (BrokenPipeError, ConnectionResetError):
        raise EOFError from None
    answer = wire.receive_blobs(worker.channel)
    if answer is None:
        raise EOFError
    return answer


def _is_left_out(variable: str) -> bool:
    return any(fnmatchcase(variable, pattern) for pattern in NOT_INHERITED)


def _discard(worker: _Worker | None) -> None:
    if worker:
        worker.channel.close()
        worker.host.kill_worker(worker.worker_id)


def _python_path(prefix: Sequence[str | Path]) -> str:
    """PYTHONPATH of the server: the overlay first, then what the user has, then the folder that holds `shardproof`."""
    own = Path(__file__).resolve().parents[2]
    user = os.environ.get("PYTHONPATH", "")
    return os.pathsep.join(
        [*map(str, prefix), *filter(None, [user]), *([] if own.name == "site-packages" else [str(own)])]
    )
