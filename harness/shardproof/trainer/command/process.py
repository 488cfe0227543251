"""One run of a command: a session of processes of its own, with a deadline, whose output goes into a file.

Whatever the command starts ends with it, also what has called setsid, as the workers of torchrun do, and all of it ends
with this process, however that ends: `shardproof.world.supervised` stands between the two.
"""

from __future__ import annotations

import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from shardproof.errors import UsageError
from shardproof.observe.stacks import Frame, stacks_in
from shardproof.trainer.command.asked import FORM
from shardproof.world.process import adopt_orphans, children_of, is_ending, kill_children

PORTS = ("MASTER_PORT", "PET_MASTER_PORT")
"""Where torch and torchrun look for the port of the process group."""
LAST_LINES = 8
LAST_BYTES = 1 << 16
EXCEPTION = re.compile(
    r"^(?:\[rank\d+\]: ?)?((?:\w+\.)*\w+(?:Error|Exception|Interrupt|Exit)\b(?:: .*)?|what\(\): .*)$"
)
"""The line of a Python traceback that names the exception; torchrun's workers say which rank they are before it.
Beside it, what C++ says of an exception that nobody caught."""
ECHO = re.compile(r"Connection (?:closed|reset|refused)|Broken pipe|remote (?:worker|process)|[Tt]imed out waiting")
"""What ranks say whose peer has failed: why it did stands elsewhere."""
LAUNCHERS = ("ChildFailedError", "CalledProcessError")
"""What a launcher raises because its workers failed: why they did stands above."""

STACKS = b"\nshardproof: the deadline is over, and every process is asked for its stack:\n"
"""What the log of a hung run has between the run's own output and the stacks of its processes."""
STACK_S = 2.0
"""How long one process may take to write its stack."""
OWN = {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}
"""What a run's Python is told, unless the user says otherwise: to keep no output back, and to write its stack on
SIGABRT."""
LAUNCHER = re.compile(r"/torch/distributed/(?:run|launch|elastic/)|/launcher/|/commands/launch")
LIBRARY = re.compile(r"/(?:site|dist)-packages/|/lib/python\d|^<frozen ")

NO_SCRIPT = re.compile(r"can't open file '(.+)': \[Errno 2\]")
"""What Python says of a script that is not there."""


@dataclass(frozen=True)
class Ended:
    """How a command ended. status: its exit status, negative for a signal; None where the deadline ended it."""

    status: int | None
    seconds: float


def run(words: Sequence[str], log: Path, deadline_s: float) -> Ended:
    """Run a command to its end, or to its deadline; nothing that it started is left.

    Raises:
        UsageError: the program cannot be started.
    """
    if shutil.which(words[0]) is None:
        raise UsageError.of("--command: program", words[0], "a program that can be started", FORM)
    adopt_orphans()
    spare = children_of(os.getpid())
    started = time.monotonic()
    environment = {**OWN, **dict.fromkeys(PORTS, str(_free_port())), **os.environ}
    log.unlink(missing_ok=True)
    with log.open("ab") as out:  # to whose end the run and we append
        process = subprocess.Popen(
            [sys.executable, "-m", "shardproof.world.supervised", str(os.getpid()), *words],
            stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, env=environment, start_new_session=True,
        )  # fmt: skip
    status: int | None = None
    try:
        status = process.wait(deadline_s)
    except subprocess.TimeoutExpired:
        with log.open("ab") as ours:
            ours.write(STACKS)
        _write_stacks(process.pid)
    finally:
        kill_children(spare)
        process.poll()  # which it has been reaped for
    return Ended(status, time.monotonic() - started)


def _write_stacks(supervised: int) -> None:
    """Have every process below `supervised` write its stack and end, one after the other: all are stopped before, so
    that no parent kills what is still writing, and no two write at once."""
    found = [supervised]
    for pid in found:  # which grows
        with suppress(OSError):
            os.kill(pid, signal.SIGSTOP)
            found += children_of(pid)
    for pid in found[1:]:
        with suppress(OSError):
            resource.prlimit(pid, resource.RLIMIT_CORE, (0, 0))
            os.kill(pid, signal.SIGABRT)
            os.kill(pid, signal.SIGCONT)
            latest = time.monotonic() + STACK_S
            while not is_ending(pid) and time.monotonic() < latest:
                time.sleep(0.01)


def places_in(log: Path) -> list[str]:
    """Where the processes of a hung run stood, each place once: the innermost call, and the line of the script that led
    to it. Launchers, which only wait for others, are left out."""
    _, _, after = log.read_bytes().partition(STACKS)
    stacks = [one for one in stacks_in(after.decode("utf-8", "replace"))
              if not any(LAUNCHER.search(frame.file) for frame in one)]  # fmt: skip
    return list(dict.fromkeys(map(_place, stacks)))


def _place(stack: tuple[Frame, ...]) -> str:
    inner = stack[0]
    own = next((frame for frame in stack if not LIBRARY.search(frame.file)), inner)
    led = "" if own is inner else f"; from {Path(own.file).name}, line {own.line}"
    return f"{inner.function} ({Path(inner.file).name}, line {inner.line}{led})"


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def last_lines(log: Path) -> list[str]:
    """The last lines of a run's output that are not empty."""
    return _lines_of(log)[-LAST_LINES:]


def said_last(log: Path) -> str:
    """Why a run failed, in its own words: the last exception that is neither a launcher's nor that of a rank which lost
    its peer, as far as there is one; else the last line of text."""
    lines = _lines_of(log)
    raised = [found[1] for line in lines if (found := EXCEPTION.match(line.strip()))]
    own = [line for line in raised if not line.partition(":")[0].endswith(LAUNCHERS)]
    own = [line for line in own if not ECHO.search(line)] or own
    words = [line for line in lines if any(char.isalnum() for char in line)]
    return next(reversed(own or words), "it said nothing")


def absent_script(log: Path) -> str:
    """The script that Python did not find, as a run's output says it; empty where it says no such thing."""
    found = (NO_SCRIPT.search(line) for line in _lines_of(log))
    return next((one[1] for one in found if one), "")


def _lines_of(log: Path) -> list[str]:
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - LAST_BYTES))
        lines = file.read().partition(STACKS)[0].decode("utf-8", "replace").splitlines()
    return [line for line in lines if line.strip()]
