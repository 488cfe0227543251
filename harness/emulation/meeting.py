"""Ranks that run one suite side by side stay together, test by test.

Each rank is a pytest process of its own. Where a test fails on one rank only, the others wait in a collective until
its time is up, and the next test would find groups of which some ranks have left: every later test failed, too. So the
ranks meet after every test. If they saw different outcomes, or an error of communication, each destroys all its groups
and takes another port for the next default group.

Rank 0 holds the meeting place, a store at the address in SHARDPROOF_MEETING (`host:port`). Without it, or with one
rank, nothing is done.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

VARIABLE = "SHARDPROOF_MEETING"
WAIT_S = 240.0
_BROKEN = ("DistBackendError", "DistNetworkError", "DistStoreError", "DistError")


@dataclass
class Meeting:
    """Where ranks meet; `store` is None for one that is alone."""

    store: Any = None
    rank: int = 0
    ranks: int = 1
    met: int = field(default=0)

    @classmethod
    def of_environment(cls) -> Meeting:
        """The meeting that torchrun's variables and SHARDPROOF_MEETING describe."""
        ranks, address = int(os.environ.get("WORLD_SIZE", "1")), os.environ.get(VARIABLE, "")
        if ranks == 1 or not address:
            return cls()
        from torch._C._distributed_c10d import TCPStore

        host, _, port = address.rpartition(":")
        rank = int(os.environ["RANK"])
        store = TCPStore(host, int(port), ranks, rank == 0, timeout=timedelta(seconds=WAIT_S))
        return cls(store, rank, ranks)

    def after(self, test: str, outcomes: list[str]) -> None:
        """Wait for all ranks at the end of a test, and start afresh where it left them apart.

        Raises:
            RuntimeError: a rank did not come; the caller's process has to end.
        """
        if self.store is None:
            return
        self.met += 1
        self.store.set(f"{self.met}/{self.rank}", " ".join([test, *outcomes]))
        if self.rank == 0:
            self.store.set(f"{self.met}/port", str(free_port()))
        seen = {self.store.get(f"{self.met}/{rank}") for rank in range(self.ranks)}
        port = self.store.get(f"{self.met}/port").decode()
        if len(seen) > 1 or any(word in outcome for word in _BROKEN for outcome in outcomes):
            from harness.emulation import groups

            groups.drop_all()
            os.environ["MASTER_PORT"] = port


def free_port() -> int:
    """A TCP port of this machine that nobody uses now."""
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        return int(place.getsockname()[1])
