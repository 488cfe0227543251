"""Has a GPU lag behind the program that drives it, so that a missing wait shows more often.

A program queues work for a GPU and goes on. Where it copies a result to the CPU with `non_blocking=True` and reads the
copy without waiting, it reads what was in that memory before, if the GPU is late, and the right value, if the GPU is
idle. Tiny models leave a GPU idle, so that such a read seldom goes wrong. With a GPU that is busy when the optimizer's
step begins it goes wrong unless that memory happens to hold the right value from before. Nothing changes for a program
that waits as it has to.
"""

from __future__ import annotations

import torch

CYCLES = 20_000_000
"""How long a GPU is busy: 10 ms at 2 GHz, far longer than the optimizer's step of a tiny model on a CPU."""


def keep_busy(device: str) -> None:
    """Queue work that computes nothing on the current stream of a GPU. device: `cuda`; nothing is done on a `cpu`."""
    if device == "cuda":
        torch.cuda._sleep(CYCLES)  # type: ignore[no-untyped-call]
