"""Runs a command of another program, such as pip, within a time limit, and tells what it said where it fails."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Sequence

from shardproof.errors import HarnessError
from shardproof.world.interpreter import SAFE_PATH
from shardproof.world.process import cpu_s

IDLE = 20  # how many times its limit of processor time a command may take by the clock
_LOOK_S = 0.5
_SHOWN_LINES, _SHOWN_CHARACTERS = 12, 300


class OverlayError(HarnessError):
    """A library could not be installed or imported; says which, and the last lines of what it said itself."""


def said(
    command: Sequence[str], limit_s: float, what: str, environment: dict[str, str], *, of_cpu: bool = False
) -> str:
    """Standard output of a command.

    Args:
        limit_s: how long it may take. of_cpu: this is processor time; what it waits, for a busy machine's processors
            or disks, does not count, up to `IDLE` times as long.

    Raises:
        OverlayError: it failed, with the last lines of what it said.
    """
    try:
        done = _run(command, limit_s, environment) if of_cpu else _run(command, limit_s, environment, idle=1)
    except subprocess.TimeoutExpired:
        raise OverlayError(f"{what}: no end after {limit_s:.0f} s{' of processor time' * of_cpu}") from None
    except OSError as error:
        raise OverlayError(f"{what}: {error}") from None
    if done.returncode:
        said = (done.stderr or done.stdout).splitlines()
        lines = [line for line in said if line.strip() and 'File "<frozen ' not in line]
        shown = (line if len(line) <= _SHOWN_CHARACTERS else f"{line[:_SHOWN_CHARACTERS]}…" for line in lines)
        asked = [f" {part.partition('==')[2]} Requires-Python" for part in command if "==" in part]
        hint = [_OTHER_PYTHON] if any(version in line for version in asked for line in lines) else []
        raise OverlayError("\n".join([f"{what}:", *list(shown)[-_SHOWN_LINES:], *hint]))
    return done.stdout


_OTHER_PYTHON = (
    "It asks for another Python than the ranks': give them one that has torch (--python PATH), or run its source as it "
    "lies in a clone or a folder (NAME@git:REF, NAME@path:DIR; of a trainer --version)."
)


def _run(
    command: Sequence[str], limit_s: float, environment: dict[str, str], idle: int = IDLE
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end.

    Raises:
        subprocess.TimeoutExpired: it had `limit_s` of processor time, or `idle` times as much by the clock; it is
            killed.
    """
    started = time.monotonic()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True,
        env={**environment, **SAFE_PATH}, errors="replace",
    ) as running:  # fmt: skip
        while True:
            try:
                out, err = running.communicate(timeout=_LOOK_S)
                return subprocess.CompletedProcess(command, running.returncode, out, err)
            except subprocess.TimeoutExpired:
                if cpu_s(running.pid) < limit_s and time.monotonic() - started < limit_s * idle:
                    continue
                running.kill()
                raise
