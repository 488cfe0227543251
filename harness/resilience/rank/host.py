"""A process that has imported a stack's library once, and forks a child for each save and each load.

    python -m harness.resilience.rank.host MODULE:DRIVER OPTIONS FOLDER

Requests come as lines of JSON on stdin, and an answer to each goes to stdout. A child has a session, a deadline and a
bound of memory of its own; when it ends, or its time is up, its whole session is killed. What a checkpoint makes the
library do, it does in that child. When there are no more requests, also because the process that asked was killed, the
folder in which the trials lay is removed.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import resource
import select
import shutil
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from harness.entry import resolve
from harness.resilience.stacks import Driver

MEMORY = 4 << 30
"""Bytes of address space that a child may have beyond those of this process."""
MOST_SAID = 300
_ALLOW_TRACING, _BY_ANYONE, _END_WITH_PARENT = 0x59616D61, ctypes.c_ulong(-1), 1
"""Of prctl(2): PR_SET_PTRACER, PR_SET_PTRACER_ANY, PR_SET_PDEATHSIG."""

Answer = dict[str, Any]


class Host:
    """Forks a child for each request."""

    def __init__(self, driver: Driver, answers: TextIO) -> None:
        self.driver, self._answers = driver, answers
        self.memory = _address_space() + MEMORY

    def serve(self) -> None:
        """Answer requests until there are no more."""
        for line in sys.stdin:
            asked = json.loads(line)
            self.say(self.answer(asked))

    def say(self, answer: Answer) -> None:
        """Tell the asker."""
        self._answers.write(json.dumps(answer) + "\n")
        self._answers.flush()

    def answer(self, asked: dict[str, Any]) -> Answer:
        """The answer to one request."""
        folder, deadline_s = Path(asked["folder"]), asked["deadline_s"]
        if asked["do"] == "load":
            return self.run(lambda: self.driver.digests(self.driver.load(folder)), deadline_s, False)
        generation, run = asked["generation"], asked["run"]

        def save() -> Any:
            state = self.driver.state(generation, run)
            known = self.driver.digests(state)
            if asked["wait"]:
                _wait_for_tracer()
            self.driver.save(folder, state, generation, run)
            return known

        return self.run(save, deadline_s, asked["wait"])

    def run(self, what: Callable[[], Any], deadline_s: float, waits: bool) -> Answer:
        """Let a child do something, and say how it ended.

        Args:
            waits: tell the asker the child's number first, and go on when it answers.
        """
        told, tells = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(told)
            self._be_child(what, tells)
        os.close(tells)
        if waits:
            os.waitpid(child, os.WUNTRACED)
            self.say({"pid": child})
            sys.stdin.readline()
            os.kill(child, signal.SIGCONT)
        said, late = _read(told, deadline_s)
        os.close(told)
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        _, status, used = os.wait4(child, 0)
        if late:
            return {"ended": "hang"}
        if not said:
            return {"ended": "crash", "why": _how(status)}
        answer: Answer = json.loads(said)
        return {**answer, "cpu_s": used.ru_utime + used.ru_stime}

    def _be_child(self, what: Callable[[], Any], tells: int) -> None:
        """Do it, say how it went, and end without any clean-up of the parent's."""
        os.setsid()
        ctypes.CDLL(None).prctl(_END_WITH_PARENT, signal.SIGKILL, 0, 0, 0)
        resource.setrlimit(resource.RLIMIT_AS, (self.memory, self.memory))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        nothing = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1, 2):
            os.dup2(nothing, number)
        try:
            answer: Answer = {"ended": "ok", "found": dict(what())}
        except BaseException as error:
            answer = {"ended": "error", "why": f"{type(error).__name__}: {error}"[:MOST_SAID]}
        data = json.dumps(answer).encode()
        while data:
            data = data[os.write(tells, data) :]
        os._exit(0)


def _wait_for_tracer() -> None:
    """Let any process of this user trace this one, and stop until it does."""
    ctypes.CDLL(None).prctl(_ALLOW_TRACING, _BY_ANYONE, 0, 0, 0)
    os.kill(os.getpid(), signal.SIGSTOP)


def _read(told: int, deadline_s: float) -> tuple[bytes, bool]:
    """What a child says until it ends, and whether it was too late."""
    end, said = time.monotonic() + deadline_s, b""
    while True:
        ready, _, _ = select.select([told], [], [], max(0.0, end - time.monotonic()))
        if not ready:
            return said, True
        data = os.read(told, 1 << 16)
        if not data:
            return said, False
        said += data


def _how(status: int) -> str:
    if os.WIFSIGNALED(status):
        return f"killed by {signal.Signals(os.WTERMSIG(status)).name}"
    return f"ended with status {os.waitstatus_to_exitcode(status)} and said nothing"


def _address_space() -> int:
    pages = int(Path("/proc/self/statm").read_text("ascii").split()[0])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is no answer
    driver: Driver = resolve(sys.argv[1])(**dict(json.loads(sys.argv[2])))
    driver.warm()
    host = Host(driver, answers)
    gc.collect()
    gc.freeze()  # children copy fewer pages
    host.say({"ready": True})
    host.serve()
    shutil.rmtree(sys.argv[3], ignore_errors=True)  # who asked is gone, or has removed it already


if __name__ == "__main__":
    _main()
