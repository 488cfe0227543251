"""A plugin: Megatron-Core whose ranks end badly right after a save, when the library's manager process is there.

`megatron-core-raising` raises, `-stuck` never returns, `-killed` is killed.
"""

from __future__ import annotations

import os
import signal
import time

from shardproof.program import Op
from shardproof.protocol.registry import register
from shardproof.systems.megatron_core import SYSTEM
from shardproof.systems.megatron_core.rank import Rank

from tests.conformance.variants import with_ranks


class Raising(Rank):
    def save(self, op: Op) -> None:
        super().save(op)
        raise RuntimeError("after the save")


class Stuck(Rank):
    def save(self, op: Op) -> None:
        super().save(op)
        time.sleep(3600)


class Killed(Rank):
    def save(self, op: Op) -> None:
        super().save(op)
        os.kill(os.getpid(), signal.SIGKILL)


for kind in (Raising, Stuck, Killed):
    register(with_ranks(SYSTEM, f"{__name__}:{kind.__name__}", f"megatron-core-{kind.__name__.lower()}"))
