"""A plugin that takes something away from every process forked after it was imported; SHARDPROOF_TAKES says what.

It stands in for machines on which a rank cannot run: see `shardproof.world.rehearsal`.
"""

from __future__ import annotations

import multiprocessing.synchronize
import os
import tempfile
import time
from typing import NoReturn


def _backward() -> None:
    import torch

    def refuse(*_: object, **__: object) -> NoReturn:
        raise RuntimeError("Unable to handle autograd's threading in combination with fork-based multiprocessing.")

    torch.Tensor.backward = refuse  # type: ignore[method-assign]


def _semaphores() -> None:
    def refuse(*_: object, **__: object) -> NoReturn:
        raise OSError(38, "Function not implemented")

    multiprocessing.synchronize.SemLock.__init__ = refuse  # type: ignore[assignment]


def _loopback() -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "no-such-interface"


def _temporary() -> None:
    tempfile.tempdir = "/nonexistent"


def _time() -> None:
    time.sleep(600)


def _life() -> None:
    os._exit(9)


_TAKES = {
    "backward": _backward, "semaphores": _semaphores, "loopback": _loopback, "temporary": _temporary, "time": _time,
    "life": _life,
}  # fmt: skip

if wanted := os.environ.get("SHARDPROOF_TAKES"):
    os.register_at_fork(after_in_child=_TAKES[wanted])
