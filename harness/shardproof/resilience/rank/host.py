"""A process that has imported a stack's library once, and forks a child for each save and each load.

    python -m shardproof.resilience.rank.host MODULE:DRIVER OPTIONS FOLDER LANES PARENT

The host forks a lane for each pair of descriptors in LANES. To a lane requests come as lines of JSON, and it answers
each. A lane's child has a session, a deadline and a bound of memory of its own; when it ends, or its time is up, its
whole session is killed. What a checkpoint makes the library do, it does in that child.

When process PARENT ends, however it does, or has nothing more to ask, the host kills all its descendants, also those
that have left their session, and removes the folder in which the trials lay.
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
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from shardproof.entry import resolve
from shardproof.resilience.rank.tracer import let_trace
from shardproof.resilience.stacks import Driver
from shardproof.world import cure_import_hook
from shardproof.world.process import (
    LONGEST_DEADLINE,
    adopt_orphans,
    children_of,
    die_with_parent,
    fork,
    in_session,
    kill_children,
    start_autograd,
    starved_s,
)

MEMORY = 4 << 30
"""Bytes of address space that a child may have beyond those of this process."""
MOST_SAID = 300
_END = b"\n"
"""What ends an answer, which is a line of JSON."""
_END_WITH_PARENT = 1
"""Of prctl(2): PR_SET_PDEATHSIG."""

Answer = dict[str, Any]


class Lane:
    """Forks a child for each request."""

    def __init__(self, driver: Driver, requests: TextIO, answers: TextIO) -> None:
        self.driver, self._requests, self._answers = driver, requests, answers
        self.memory = _address_space() + MEMORY

    def serve(self) -> None:
        """Answer requests until there are no more."""
        self.say({"ready": True})
        while line := self._requests.readline():
            asked = json.loads(line)
            try:
                self.say(self.answer(asked))
            except BrokenPipeError:
                return  # who asked has gone

    def say(self, answer: Answer) -> None:
        """Tell the asker."""
        self._answers.write(json.dumps(answer) + "\n")
        self._answers.flush()

    def answer(self, asked: dict[str, Any]) -> Answer:
        """The answer to one request."""
        folder, deadline_s = Path(asked["folder"]), asked["deadline_s"]
        if asked["do"] == "load":

            def load() -> Any:
                if asked["wait"]:
                    let_trace(asked["rank"])
                return self.driver.digests(self.driver.load(folder))

            return self.run(load, folder, deadline_s, asked)
        generation, run = asked["generation"], asked["run"]

        def save() -> Any:
            state = self.driver.state(generation, run)
            known = self.driver.digests(state)
            if asked["wait"]:
                let_trace(asked["rank"])
            if asked.get("most_bytes"):
                resource.setrlimit(resource.RLIMIT_FSIZE, (asked["most_bytes"],) * 2)
            return self.driver.save(folder, state, generation, run) or known

        return self.run(save, folder, deadline_s, asked)

    def run(self, what: Callable[[], Any], folder: Path, deadline_s: float, asked: dict[str, Any]) -> Answer:
        """Let a child do something, and say how it ended.

        Args:
            folder: in which it does it; messages call it `FOLDER`, so that they are the same in every lane.
            asked: with `wait`, tell the asker first which process stands still, the child or the rank that it has
                forked, and go on when it answers.
        """
        told, tells = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(told)
            self._be_child(what, folder, tells)
        os.close(tells)
        if asked["wait"]:
            os.waitpid(child, os.WUNTRACED)
            self.say({"pid": child if asked["rank"] is None else children_of(child)[asked["rank"]]})
            self._requests.readline()
            os.kill(child, signal.SIGCONT)
        said, late = _read(told, deadline_s, child)
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

    def _be_child(self, what: Callable[[], Any], folder: Path, tells: int) -> None:
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
            answer = {"ended": "error", "why": _error_line(error).replace(str(folder), "FOLDER")[:MOST_SAID]}
        data = json.dumps(answer).encode() + _END
        while data:
            data = data[os.write(tells, data) :]
        os._exit(0)


def _error_line(error: BaseException) -> str:
    """An error in one line: of a message that holds a traceback, as those of several ranks do, the last one."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1] if lines else ''}"


def _read(told: int, deadline_s: float, child: int) -> tuple[bytes, bool]:
    """What a child says until its answer is whole or it ends, and whether it was too late. Workers that a library has
    started, and that live on, have the descriptor too.

    What a process of its session waited for a CPU does not count, up to `LONGEST_DEADLINE` times the deadline: on a
    busy machine a slow load is not a hang.
    """
    began, said = time.monotonic(), b""
    end = began + deadline_s
    while True:
        ready, _, _ = select.select([told], [], [], max(0.0, end - time.monotonic()))
        if not ready:
            starved = max(map(starved_s, in_session(child)), default=0.0)
            end = began + min(deadline_s + starved, deadline_s * LONGEST_DEADLINE)
            if end > time.monotonic():
                continue
            return said, True
        data = os.read(told, 1 << 16)
        if not data:
            return said, False
        said += data
        if said.endswith(_END):
            return said, False


def _how(status: int) -> str:
    if os.WIFSIGNALED(status):
        return f"killed by {signal.Signals(os.WTERMSIG(status)).name}"
    return f"ended with status {os.waitstatus_to_exitcode(status)} and said nothing"


def _address_space() -> int:
    pages = int(Path("/proc/self/statm").read_text("ascii").split()[0])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _main() -> None:
    driver_name, options, folder, lanes, parent = sys.argv[1:]

    def clean_up() -> None:
        kill_children()
        shutil.rmtree(folder, ignore_errors=True)  # who asked is gone, or will remove it, too

    adopt_orphans()
    die_with_parent(int(parent), clean_up)
    cure_import_hook.install(os.environ.pop(cure_import_hook.VARIABLE, ""))
    driver = warmed(driver_name, dict(json.loads(options)))
    gc.collect()
    gc.freeze()  # children copy fewer pages
    ends: list[tuple[int, int]] = json.loads(lanes)
    host = os.getpid()
    for process in [fork(partial(_lane, driver, own, ends, host)) for own in ends]:
        os.waitpid(process, 0)
    clean_up()


def warmed(name: str, options: dict[str, Any]) -> Driver:
    """A driver that has imported and computed what its children will need."""
    made: Callable[..., Driver] = resolve(name)
    if "torch" in sys.modules:  # a driver of plain files does without
        start_autograd()
    driver = made(**options)
    driver.warm()
    return driver


def _lane(driver: Driver, own: tuple[int, int], ends: list[tuple[int, int]], host: int) -> None:
    die_with_parent(host)
    for number in {number for two in ends for number in two} - set(own):
        os.close(number)
    Lane(driver, os.fdopen(own[0], "r"), os.fdopen(own[1], "w")).serve()


if __name__ == "__main__":
    _main()
