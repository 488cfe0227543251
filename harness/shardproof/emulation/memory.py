"""Two memories on one machine: each storage carries the side that it lives on, host or device.

All views of a storage share its tag, so that no tensor is on both sides and only a copy crosses. A storage without a
tag was made where the emulation cannot look: inside autograd's C++, in another thread, or before it began. Its side is
unknown, and `resolve` says how such a tensor is read.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

_TAG = "shardproof_side"
_PINNED = "shardproof_pinned"
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_BYTES = ("_data", "_transpose", "_rowwise_data", "_columnwise_data")


class Side(enum.Enum):
    """A memory."""

    HOST = "host"
    DEVICE = "device"


class _Backward(threading.local):
    side = Side.DEVICE


_backward = _Backward()


def tensors_in(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """The tensors among arguments or results, lists and tuples of them opened."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(value)


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """The storage that holds the values: of the local shard, for a DTensor; of the bytes, for a quantised tensor of
    TransformerEngine's; None for a tensor that has none."""
    if type(tensor) not in _PLAIN:
        tensor = getattr(tensor, "_local_tensor", tensor)
        tensor = next((inner for name in _BYTES if (inner := getattr(tensor, name, None)) is not None), tensor)
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None


def tag_of(tensor: torch.Tensor) -> Side | None:
    """The side of a tensor, or None where it is unknown."""
    own: Side | None = None if type(tensor) in _PLAIN else vars(tensor).get(_TAG)
    return own or getattr(storage_of(tensor), _TAG, None)


def put_wrapper(tensor: torch.Tensor, side: Side) -> None:
    """Say where a tensor subclass lies that holds its values in tensors which it does not have yet."""
    setattr(tensor, _TAG, side)


def put(tensor: torch.Tensor, side: Side) -> None:
    """Say where a new storage lives. One that has a side keeps it, since memory does not move; meta tensors have
    none."""
    storage = storage_of(tensor)
    if storage is not None and getattr(storage, _TAG, None) is None and storage.device.type == "cpu":
        setattr(storage, _TAG, side)


def resolve(tensor: torch.Tensor) -> Side:
    """The side that a tensor is taken to be on: its tag's; without a tag the backward pass's, and the host outside
    of one."""
    return tag_of(tensor) or unknown_side()


def unknown_side() -> Side:
    """The side of tensors without a tag. Gradients are born inside autograd's C++, and lie where the loss does."""
    return _backward.side if torch._C._current_graph_task_id() >= 0 else Side.HOST


@contextmanager
def backward_of(roots: Iterable[torch.Tensor]) -> Iterator[None]:
    """A backward pass from `roots` runs inside: it is the host's where every root is."""
    outer = _backward.side
    _backward.side = Side.HOST if all(tag_of(root) is Side.HOST for root in roots) else Side.DEVICE
    try:
        yield
    finally:
        _backward.side = outer


def put_storage(storage: torch.UntypedStorage, side: Side) -> None:
    """As `put`, for a storage that no tensor has yet."""
    setattr(storage, _TAG, side)


def storage_side(storage: Any) -> Side | None:
    """The side of a storage, or None where it is unknown."""
    return getattr(storage, _TAG, None)


def is_pinned(tensor: torch.Tensor) -> bool:
    """Whether a host tensor's memory is page-locked (a label here: there is no other effect)."""
    return getattr(storage_of(tensor), _PINNED, False)


def pin(tensor: torch.Tensor) -> None:
    """Label a tensor's memory as page-locked."""
    setattr(storage_of(tensor), _PINNED, True)
