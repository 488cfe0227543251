"""Stops a process until strace is attached to it: the process that was asked, or one of the ranks that the process
forks."""

from __future__ import annotations

import ctypes
import os
import signal

_ALLOW_TRACING, _BY_ANYONE = 0x59616D61, ctypes.c_ulong(-1)
"""Of prctl(2): PR_SET_PTRACER, PR_SET_PTRACER_ANY."""

_rank: list[int] = []


def let_trace(rank: int | None) -> None:
    """Stand still here; of several ranks, which are forked later, have one of them do so before it begins."""
    if rank is None:
        stand_still()
    else:
        _rank.append(rank)


def stand_still() -> None:
    """Allow any process of the same user to attach a tracer to this process, then stop until a SIGCONT arrives."""
    ctypes.CDLL(None).prctl(_ALLOW_TRACING, _BY_ANYONE, 0, 0, 0)
    os.kill(os.getpid(), signal.SIGSTOP)


def begins(rank: int) -> None:
    """A forked rank begins."""
    if rank in _rank:
        stand_still()


def have_begun(ranks: list[int]) -> None:
    """Called in the parent after all ranks are forked. Waits until the rank to be traced has stopped, stops too until
    the tracer is attached, then resumes the rank."""
    for rank in _rank:
        os.waitpid(ranks[rank], os.WUNTRACED)
        stand_still()
        os.kill(ranks[rank], signal.SIGCONT)
