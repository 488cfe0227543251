"""Ends a warm server that no longer answers: stopped by a signal, or silent long after its jobs had to be over.

A server watches its supervisors, and these watch their ranks; who watches the server? A thread of the parent, which
looks once a second. It counts its own looks and not the clock, so that a machine that slept, or a Ctrl-Z that stopped
the parent too, is no reason to end anything.

*Verifies*: that the server is not stopped (SIGSTOP) for `STOPPED_S` on end, and that every job has had its answer
`LATE_S` after the latest moment at which the server itself would have given one.
*Does not verify*: a server's start, which may install and compile; calls of workers, which have deadlines of their own.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress

from shardproof.world import process

LOOK_S = 1.0
STOPPED_S = 10.0
LATE_S = 20.0


def watch(pid: int, ended: threading.Event, late: Callable[[float], str], look_s: float = LOOK_S) -> str:
    """Look after a server until it has ended, and kill it where it must be. Why, or empty.

    Args:
        ended: set when it has. late: adds seconds to the age of every job; which one should have been answered, or
            empty.
    """
    stopped_s = 0.0
    while not ended.wait(look_s):
        stopped_s = stopped_s + look_s if process.is_stopped(pid) else 0.0
        why = f"it was stopped by a signal for {stopped_s:.0f} s" if stopped_s >= STOPPED_S else late(look_s)
        if why:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            return why
    return ""
