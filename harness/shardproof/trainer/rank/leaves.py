"""Values that are no tensors, as lines of text, and nested values as their leaves.

A line has the type and the value, such as `int 3` or `float 0.015625`, so that a count that a load turns from an
integer into a float is seen. A value whose text holds an address in memory has no line: no two runs have the same.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator, Mapping, Sized
from hashlib import blake2b
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import nn

from shardproof.observe.record import Record, whole
from shardproof.observe.settings import line_of
from shardproof.trainer.rank.kinds import name_of
from shardproof.trainer.rank.pieces import At, Held, Unreadable, array_records, held, raw, records_of, whole_tensor
from shardproof.trainer.values.own_folders import without_folders

FUNCTIONS = (FunctionType, MethodType, BuiltinFunctionType)

_ADDRESS = re.compile(r"\b0x[0-9a-f]{6,}", re.IGNORECASE)
_DEPTH = 12
_SHOWN = 16
"""Elements of a tensor that a line shows; of more it has a digest."""


class _TooDeep:
    """Stands for what lies deeper in a nested state than is read."""


def _keeps_tensors(value: object) -> bool:
    """Whether a value is an object with tensors as attributes, such as the factors of a preconditioner, which its text
    would show in part."""
    if isinstance(value, (torch.Tensor, np.ndarray, nn.Module, type, *FUNCTIONS)):
        return False
    return any(isinstance(part, (torch.Tensor, np.ndarray)) for part in getattr(value, "__dict__", {}).values())


def leaves(value: Any, name: str, depth: int = 0) -> Iterator[tuple[str, Any]]:
    """The leaves of nested mappings, lists and tuples, each with its path. An empty one is a leaf itself, so that it is
    seen when it comes or goes."""
    children: Iterator[tuple[Any, Any]] | None = None
    if isinstance(value, Mapping):
        children = iter(value.items())
    elif isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        children = iter(enumerate(value))
    elif _keeps_tensors(value):
        children = iter(vars(value).items())
    if children is None or (isinstance(value, Sized) and not len(value)):
        yield name, value
        return
    if depth == _DEPTH:
        yield name, _TooDeep()
        return
    for index, (key, child) in enumerate(children):
        word = name_of(key, index)
        yield from leaves(child, f"{name}.{word}" if name else word, depth + 1)


def leaf_records(at: At, role: str, fqn: str, value: Any, *, own: bool = False) -> Iterator[Record]:
    """The records of one leaf. own: a plain tensor is this rank's alone; the name of anything else is the caller's.

    Raises:
        Unreadable: it has neither data nor a text of its own.
    """
    if isinstance(value, torch.Tensor):
        pieces: list[Held] = held(value, (fqn,), own=own)
        for piece in pieces:
            yield from records_of(at, role, piece)
    elif isinstance(value, (np.ndarray, np.generic)):
        yield from array_records(at, role, fqn, np.asarray(value))
    elif isinstance(value, (bytes, bytearray)):
        yield whole(at.op, at.rank, role, fqn, "uint8", (len(value),), bytes(value))
    else:
        yield text(at, role, fqn, line(value))


def text(at: At, role: str, fqn: str, words: str) -> Record:
    """A record of text, without the folders that another session does not have."""
    data = without_folders(words, at.folders).encode(errors="surrogateescape")
    return whole(at.op, at.rank, role, fqn, "utf8", (len(data),), data)


def line(value: Any) -> str:
    """A value's type and what it is, in one line.

    Raises:
        Unreadable: its text holds an address.
    """
    if isinstance(value, torch.Tensor):
        return f"{line_of(value)} {_elements(value)}"
    if isinstance(value, Mapping):
        parts = (f"{name_of(key, index)}: {line(part)}" for index, (key, part) in enumerate(value.items()))
        return f"{type(value).__name__} {{{', '.join(parts)}}}"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(line(part) for part in value)})"
    if isinstance(value, (set, frozenset)):
        return f"{type(value).__name__} {{{', '.join(sorted(line(part) for part in value))}}}"
    if isinstance(value, FUNCTIONS):
        return f"function {getattr(value, '__module__', '')}.{value.__qualname__}"
    if value is None or (isinstance(value, (bool, int, float, str, type)) and not isinstance(value, enum.Enum)):
        return line_of(value)
    if isinstance(value, _TooDeep):
        raise Unreadable(f"nested deeper than {_DEPTH} levels")
    words = repr(value)
    if _ADDRESS.search(words):
        raise Unreadable(f"an object of {type(value).__name__}, whose text holds an address in memory")
    return f"{type(value).__name__} {words}"


def _elements(tensor: torch.Tensor) -> str:
    """The elements of a setting that is a tensor, such as a learning rate."""
    (piece,) = held(tensor, ("",)) or (whole_tensor(torch.empty(0), ("",)),)
    local = piece.local.detach()
    if local.numel() <= _SHOWN and not local.is_meta:
        return str(local.reshape(-1).tolist())
    _, _, data = raw(local)
    return blake2b(data, digest_size=8).hexdigest()
