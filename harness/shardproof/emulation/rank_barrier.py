"""Keeps ranks that run the same upstream test suite in step, test by test.

Each rank is a pytest process of its own. Where a test fails on one rank only, the others wait in a collective until
its time is up, and the next test would find groups of which some ranks have left: every later test failed, too. So the
ranks meet after every test. If they saw different outcomes, or an error of communication, each destroys all its groups
and takes another port for the next default group.

A rank whose test has failed hangs up some seconds later, unless all have ended the test by then: it shuts its
connections down, so that whoever waits for it in a collective sees an error at once and not when the collective's time
is up. That test has failed already, whatever becomes of the other ranks.

Rank 0 holds the meeting place, a store at the address in SHARDPROOF_MEETING (`host:port`). Without it, or with one
rank, nothing is done.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

VARIABLE = "SHARDPROOF_MEETING"
WAIT_S = 240.0
_BROKEN = ("DistBackendError", "DistNetworkError", "DistStoreError", "DistError", "gloo/")


@dataclass
class Meeting:
    """Where ranks meet; `store` is None for one that is alone. port: of the store.
    hang_up_s: how long after a failure a rank hangs up. met: how often they have met.
    leaving: what will hang up, of a rank whose test has failed. hung_up: whether it has."""

    store: Any = None
    rank: int = 0
    ranks: int = 1
    port: int = 0
    hang_up_s: float = 15.0
    met: int = field(default=0)
    leaving: threading.Timer | None = None
    hung_up: bool = False

    @classmethod
    def of_environment(cls, hang_up_s: float) -> Meeting:
        """The meeting that torchrun's variables and SHARDPROOF_MEETING describe."""
        ranks, address = int(os.environ.get("WORLD_SIZE", "1")), os.environ.get(VARIABLE, "")
        if ranks == 1 or not address:
            return cls()
        from torch._C._distributed_c10d import TCPStore

        host, _, port = address.rpartition(":")
        rank = int(os.environ["RANK"])
        store = TCPStore(host, int(port), ranks, rank == 0, timeout=timedelta(seconds=WAIT_S))
        return cls(store, rank, ranks, int(port), hang_up_s)

    def failed(self) -> None:
        """The test has failed on this rank: hang up after a while, unless all ranks have met by then."""
        if self.store is not None and self.leaving is None:
            self.leaving = threading.Timer(self.hang_up_s, self._hang_up)
            self.leaving.daemon = True
            self.leaving.start()

    def after(self, test: str, outcomes: list[str]) -> None:
        """Wait for all ranks at the end of a test, and start afresh where it left them apart.

        Raises:
            RuntimeError: a rank did not come; the caller's process has to end.
        """
        if self.store is None:
            return
        number = self.met + 1
        self.store.set(f"{number}/{self.rank}", " ".join([test, *outcomes]))
        if self.rank == 0:
            self.store.set(f"{number}/port", str(free_port()))
        seen = {self.store.get(f"{number}/{rank}") for rank in range(self.ranks)}
        self.met = number
        if self.leaving is not None:
            self.leaving.cancel()
            self.leaving.join()
            self.leaving = None
        port = self.store.get(f"{number}/port").decode()
        # From here on nobody hangs up; until here a rank might have, although its outcome is the others'.
        self.store.set(f"{number}/left/{self.rank}", "yes" if self.hung_up else "no")
        left = {self.store.get(f"{number}/left/{rank}") for rank in range(self.ranks)}
        self.hung_up = False
        broken = any(word in outcome for word in _BROKEN for outcome in outcomes)
        if len(seen) > 1 or broken or b"yes" in left:
            from shardproof.emulation import groups

            groups.drop_all()
            os.environ["MASTER_PORT"] = port

    def _hang_up(self) -> None:
        """Runs in a thread of its own, and leaves the store alone: it serves one caller at a time, who may be waiting
        in it."""
        self.hung_up = True
        shut_down(self.port)


def shut_down(but: int) -> int:
    """Shut down every TCP connection of this process but those to or from a port; tells how many there were.

    gloo offers no way to break off a collective: neither `abort` nor `shutdown` of a group ends one that waits.
    """
    count = 0
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as connection:
                if connection.family in (socket.AF_INET, socket.AF_INET6):
                    ends = connection.getsockname()[1], connection.getpeername()[1]
                    if but not in ends:
                        connection.shutdown(socket.SHUT_RDWR)
                        count += 1
    return count


PORTS = range(16_000, 32_000)
"""Below those that Linux hands out by itself (`net.ipv4.ip_local_port_range`, from 32768)."""


def free_port() -> int:
    """A TCP port of this machine that nobody uses now, and that the kernel gives to nobody who does not ask for it.

    A port that the kernel chose is one that it may choose for somebody else, before this one's owner listens on it.
    """
    while True:
        port = secrets.choice(PORTS)
        with socket.socket() as place, suppress(OSError):
            place.bind(("", port))
            return port
