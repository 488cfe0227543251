"""Lists the system-call faults that can strike while a checkpoint is being saved or loaded.

A *strike* takes one system call of the recorded save (or load) and lets it go wrong once. strace does that by itself
(`-e inject`), without a library of ours between the program and the kernel:

* `ENOSPC`, `EIO`, `EACCES`: the call is not made, and gives that error. Which errors a call is given, `ERRORS` says: a
  write never gives EACCES, and a sync gives EIO, as after a failed write-back.
* `slow`: the call is made `SLOW_S` late.
* `short`: the file cannot grow beyond the middle of a write (the kernel's own RLIMIT_FSIZE): the write gives fewer
  bytes than were asked for, and the next one an error. A file of the same save that is larger would be struck earlier,
  and of several ranks each would be struck; there is no such strike then. strace could give a small number back, but
  then without writing anything, which no disk does.
* `killed-rank`, `stopped-rank`: of several ranks one is killed right before the call, or stopped right after it. The
  others go on as far as they can; those that still wait when the time is up are killed.
* `load-EIO`, `load-EACCES`, `load-slow`: the same for the calls of a load: opens, reads, questions for sizes and names.
  A file that several ranks read is bad for all of them. What a library maps into memory it reads without a call, and
  that cannot be struck.
* `load-killed-rank`, `load-stopped-rank`: one rank alone is killed or stopped at a call of its load, also where others
  make the same call; a process that loads alone is its only rank, and is not stopped. `load-EIO-rank`: a call that
  several ranks make alike gives EIO to one of them.

*Verifies* nothing; these are pure functions. `call_fault_runs` makes a strike, and checks that it struck once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shardproof.resilience.events import Call, Event, Trace

SLOW_S = 0.2
_OPENS = ("open", "openat", "creat")
_WRITES = ("write", "writev", "pwrite64", "pwritev", "pwritev2")
_READS = ("read", "readv", "pread64", "preadv", "preadv2", "getdents64")
_LOOKS = ("stat", "lstat", "newfstatat", "fstat", "statx", "access", "faccessat", "faccessat2")
LOAD_CALLS = (*_OPENS, *_READS, *_LOOKS, "clone", "clone3", "fork", "vfork")
"""What is recorded of a load."""
SYNCS = ("fsync", "fdatasync", "syncfs", "sync")

ERRORS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(_OPENS, ("ENOSPC", "EIO", "EACCES")),
    **dict.fromkeys(_WRITES, ("ENOSPC", "EIO")),
    **dict.fromkeys(SYNCS, ("ENOSPC", "EIO")),
    **dict.fromkeys(("truncate", "ftruncate"), ("EIO",)),
    **dict.fromkeys(("rename", "renameat", "renameat2", "link", "linkat"), ("ENOSPC", "EIO", "EACCES")),
    **dict.fromkeys(("mkdir", "mkdirat"), ("ENOSPC", "EIO", "EACCES")),
    **dict.fromkeys(("unlink", "unlinkat", "rmdir"), ("EIO", "EACCES")),
}
LOAD_ERRORS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(_OPENS, ("EIO", "EACCES")),
    **dict.fromkeys(_READS, ("EIO",)),
    **dict.fromkeys(_LOOKS, ("EIO", "EACCES")),
}

DISK = ("ENOSPC", "EIO", "EACCES", "short", "slow", "load-EIO", "load-EACCES", "load-slow")
_STRUCK_RANK = {"killed-rank": "killed before", "stopped-rank": "stopped after"}
_LOAD = "load-"
RANKS = (*_STRUCK_RANK, *(f"{_LOAD}{kind}" for kind in (*_STRUCK_RANK, "EIO-rank")))


@dataclass(frozen=True)
class Strike:
    """One call that goes wrong.

    Attributes:
        label: kind and number of the event (of a load: of the call), such as `ENOSPC@3`.
        call: the one that is struck. what: it in words.
        most: for `short`, how many bytes a file may have.
    """

    label: str
    kind: str
    call: Call
    what: str
    most: int = 0

    @property
    def of_load(self) -> bool:
        """Whether it strikes a load."""
        return self.kind.startswith(_LOAD)

    @property
    def injected(self) -> str:
        """What strace is told, without its `-e inject=`; empty where the kernel does it."""
        when = f"when={self.call.nth}"
        match self.kind.removeprefix(_LOAD):
            case "short":
                return ""
            case "slow":
                return f"{self.call.name}:delay_enter={round(SLOW_S * 1e6)}:{when}"
            case "killed-rank":
                return f"{self.call.name}:signal=SIGKILL:{when}"
            case "stopped-rank":
                return f"{self.call.name}:signal=SIGSTOP:{when}"
            case error:
                return f"{self.call.name}:error={error.removesuffix('-rank')}:{when}"


def strikes_of(trace: Trace, ranks: int) -> Iterator[Strike]:
    """Every strike at the calls of a recorded save: all errors first, then the others; ranks in order of events.

    Args:
        ranks: how many processes save. Only of several one alone is killed or stopped; of a single one, `killed` crash
            states say what is left.
    """
    recorded = list(enumerate(zip(trace.events, trace.calls, strict=True)))
    for error in ("ENOSPC", "EIO", "EACCES"):
        for number, (event, call) in recorded:
            if error in ERRORS.get(call.name, ()):
                yield Strike(f"{error}@{number}", error, call, f"{event} gives {error}")
    for number, (event, call) in recorded if ranks == 1 else ():
        if (most := _middle(trace.events, number)) is not None:
            yield Strike(f"short@{number}", "short", call, f"of {event} the disk takes all below byte {most}", most)
    for number, (event, call) in recorded:
        yield Strike(f"slow@{number}", "slow", call, f"{event} takes {SLOW_S} s longer")
    for kind, how in _STRUCK_RANK.items():
        for number, (event, call) in recorded if ranks > 1 else ():
            yield Strike(f"{kind}@{number}", kind, call, f"rank {call.rank} {how} event {number}, {event}")


def _middle(events: Sequence[Event], number: int) -> int | None:
    """How large a file may get for a write to be the first one that is cut in half; None if there is no such size."""
    event = events[number]
    if event.kind != "write" or len(event.data) < 2:
        return None
    most = event.offset + len(event.data) // 2
    larger = [e for e in events[:number] if e.kind in ("write", "truncate") and e.offset + len(e.data) > most]
    return None if larger else most


def load_strikes_of(calls: Sequence[Call]) -> Iterator[Strike]:
    """Every strike at the calls of a recorded load, one rank after the other. What several ranks do alike is struck
    once, on all of them, but by what strikes one rank alone."""
    first = list({_alike(call): call for call in reversed(calls)}.values())[::-1]
    for error in ("EIO", "EACCES"):
        for number, call in enumerate(first):
            if error in LOAD_ERRORS.get(call.name, ()):
                yield _load_strike(error, number, call, f"gives {error}")
    for number, call in enumerate(first):
        if call.name in LOAD_ERRORS:
            yield _load_strike("slow", number, call, f"takes {SLOW_S} s longer")
    yield from _load_strikes_of_ranks([call for call in calls if call.name in LOAD_ERRORS])


def _load_strikes_of_ranks(calls: Sequence[Call]) -> Iterator[Strike]:
    times = Counter(map(_alike, calls))
    several = len({call.rank for call in calls}) > 1
    for number, call in enumerate(calls):
        yield _load_strike("killed-rank", number, call, "is not made: the rank is killed before it")
    for number, call in enumerate(calls) if several else ():
        yield _load_strike("stopped-rank", number, call, "is the last: the rank is stopped after it")
    for number, call in enumerate(calls):
        if times[_alike(call)] > 1:
            yield _load_strike("EIO-rank", number, call, "gives EIO on this rank alone")


def _load_strike(kind: str, number: int, call: Call, what: str) -> Strike:
    of_rank = f" of rank {call.rank}" if call.rank or kind in _STRUCK_RANK or kind == "EIO-rank" else ""
    told = f"{call.name} of {call.path or '.'}, call {call.nth} on it{of_rank}, {what}"
    return Strike(f"{_LOAD}{kind}@{number}", f"{_LOAD}{kind}", call, f"while it is loaded, {told}")


def _alike(call: Call) -> tuple[str, str, int]:
    return call.name, call.path, call.nth
