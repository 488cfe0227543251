"""How many devices the emulated machine has, and which of them this process uses.

A rank of a suite for GPUs calls `torch.cuda.set_device(LOCAL_RANK)` and keeps to that device. So a process has one
device memory, and the ordinal is its name. The ordinal of a device that another rank uses is refused: there is no
second memory for it.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardproof.ownership import refused


@dataclass(frozen=True)
class Kind:
    """The properties that an emulated CUDA device reports: its compute capability, and its memory in bytes. Free memory
    always equals total memory, because allocations are not counted."""

    capability: tuple[int, int] = (8, 0)
    memory_bytes: int = 1 << 34


kind = Kind()
devices = 1
"""How many the machine has: `torch.cuda.device_count()`."""

current = 0
"""The ordinal of this process's device: `torch.cuda.current_device()`."""


def set_up(count: int, of: Kind) -> None:
    """A machine of so many devices of a kind, whose first this process uses until it chooses another."""
    global devices, current, kind
    devices, current, kind = count, 0, of


def check(index: int | None) -> None:
    """Whether an ordinal names the device of this process; None stands for it whatever its ordinal.

    Raises:
        RuntimeError: the machine has no such device, as CUDA says it. NotImplementedError: it is another rank's.
    """
    _known(index)
    if index is not None and index != current:
        raise NotImplementedError(
            f"cuda:{index} was asked for; this process uses cuda:{current} (torch.cuda.set_device), and a second "
            "device memory is not emulated"
        )


def move_to(index: int) -> None:
    """Use another device from now on. What lies on the device is from now on under the new ordinal."""
    global current
    _known(index)
    current = index


def _known(index: int | None) -> None:
    if index is not None and not 0 <= index < devices:
        there = "cuda:0 only" if devices == 1 else f"cuda:0 to cuda:{devices - 1}"
        raise refused(
            RuntimeError(
                f"CUDA error: invalid device ordinal\ncuda:{index} was asked for; the emulated machine has {there}"
            )
        )
