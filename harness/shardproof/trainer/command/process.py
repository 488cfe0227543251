"""One run of a command: a session of processes of its own, with a deadline, whose output goes into a file.

Whatever the command starts ends with it, also what has called setsid, as the workers of torchrun do, and all of it ends
with this process, however that ends: `shardproof.world.supervised` stands between the two.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from shardproof.errors import UsageError
from shardproof.trainer.command.asked import FORM
from shardproof.world.process import adopt_orphans, children_of, kill_children

PORTS = ("MASTER_PORT", "PET_MASTER_PORT")
"""Where torch and torchrun look for the port of the process group."""
LAST_LINES = 8
LAST_BYTES = 1 << 16
EXCEPTION = re.compile(r"^(?:\[rank\d+\]: ?)?((?:\w+\.)*\w+(?:Error|Exception|Interrupt|Exit)\b(?:: .*)?)$")
"""The line of a Python traceback that names the exception; torchrun's workers say which rank they are before it."""
ECHO = re.compile(r"Connection (?:closed|reset|refused)|Broken pipe|remote (?:worker|process)|[Tt]imed out waiting")
"""What ranks say whose peer has failed: why it did stands elsewhere."""
LAUNCHERS = ("ChildFailedError", "CalledProcessError")
"""What a launcher raises because its workers failed: why they did stands above."""


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
    environment = {**dict.fromkeys(PORTS, str(_free_port())), **os.environ}
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "shardproof.world.supervised", str(os.getpid()), *words],
            stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, env=environment, start_new_session=True,
        )  # fmt: skip
    status: int | None = None
    try:
        with suppress(subprocess.TimeoutExpired):
            status = process.wait(deadline_s)
    finally:
        kill_children(spare)
        process.poll()  # which it has been reaped for
    return Ended(status, time.monotonic() - started)


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


def _lines_of(log: Path) -> list[str]:
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - LAST_BYTES))
        lines = file.read().decode("utf-8", "replace").splitlines()
    return [line for line in lines if line.strip()]
