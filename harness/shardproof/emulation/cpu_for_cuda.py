"""The CPU under CUDA's name: whatever is asked to be on the device is on the CPU. One memory, no sides.

It is for code that trains on CPUs, and only while it loads a model puts it on `torch.cuda.current_device()`: NeMo
Automodel. Nothing of a device is put to the test here; `shardproof.emulation.cuda` emulates one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

from shardproof.emulation.used_symbols import touch
from shardproof.ownership import hand_on

_MOVES: tuple[Any, ...] = (torch.Tensor.to, torch._C._nn._parse_to)


class _OnCpu(TorchFunctionMode):
    """Replaces every device argument that names CUDA."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        positions = range(len(args)) if func in _MOVES else ()
        moved = tuple(_cpu(arg) if index in positions else arg for index, arg in enumerate(args))
        named = {name: _cpu(value) if name == "device" else value for name, value in (kwargs or {}).items()}
        return hand_on(func, *moved, **named)


def _cpu(value: Any) -> Any:
    """The CPU where a CUDA device or an ordinal is given; any other value as it is."""
    named = isinstance(value, torch.device) and value.type == "cuda"
    ordinal = isinstance(value, int) and not isinstance(value, bool)
    if named or ordinal or (isinstance(value, str) and value in ("cuda", "cuda:0")):
        touch("device=cuda (the CPU)")
        return torch.device("cpu")
    return value


def _current_device() -> int:
    touch("torch.cuda.current_device")
    return 0


@contextmanager
def emulated() -> Iterator[None]:
    """Until the end of the block `torch.cuda.current_device()` is 0, and tensors that are asked to be there are on the
    CPU."""
    with mock.patch.object(torch.cuda, "current_device", _current_device), _OnCpu():
        yield
