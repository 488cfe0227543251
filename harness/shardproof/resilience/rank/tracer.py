"""Standing still until somebody traces: the process that was asked, or one of the ranks that it forks."""

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
    """Let any process of this user trace this one, and stop until somebody lets it go on."""
    ctypes.CDLL(None).prctl(_ALLOW_TRACING, _BY_ANYONE, 0, 0, 0)
    os.kill(os.getpid(), signal.SIGSTOP)


def begins(rank: int) -> None:
    """A forked rank begins."""
    if rank in _rank:
        stand_still()


def have_begun(ranks: list[int]) -> None:
    """All ranks are forked, into these processes; this one stands still beside the one that is to be traced."""
    for rank in _rank:
        os.waitpid(ranks[rank], os.WUNTRACED)
        stand_still()
        os.kill(ranks[rank], signal.SIGCONT)
