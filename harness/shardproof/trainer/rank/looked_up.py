"""What a frame of a trainer has under a path, as a text: looked up without calling anything that could change it."""

from __future__ import annotations

import ast
import ctypes
import sys
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardproof.trainer.base import Cell
from shardproof.trainer.lines.statements import BEHIND, TENSOR
from shardproof.trainer.rank.statements import own_statements

MOST_PARTS, MOST_TEXT, MOST_BYTES = 100, 80, 1 << 16
"""Of a container with those in it, of a text, of a tensor: what is larger is told by a digest, or not at all."""

MOST_EXTENT = 1 << 18
"""Bytes from the first to the last element of a tensor that is a part of a larger one."""


class _Unknown(Exception):  # noqa: N818 (what cannot be looked up is no error)
    """Raised by a look-up of what is not there, or that only a call could tell."""


def looked_up(path: ast.expr, names: Mapping[str, Any], globally: Mapping[str, Any], frame: int) -> tuple[Any, int]:
    """A value and the number of its owner.

    Raises:
        _Unknown: it is not there, or only a call could tell it.
    """
    match path:
        case ast.Name(id=name):
            if name in names:
                return names[name], frame
            if name in globally:
                return globally[name], id(globally)
        case ast.Attribute(value=held, attr=name):
            owner, _ = looked_up(held, names, globally, frame)
            return _attribute(owner, name), id(owner)
        case ast.Subscript(value=held, slice=index):
            owner, _ = looked_up(held, names, globally, frame)
            key = index.value if isinstance(index, ast.Constant) else looked_up(index, names, globally, frame)[0]
            if type(owner) in CONTAINERS and type(key) in (int, str):
                return owner[key], id(owner)
            if type(key) is str and key.isidentifier():  # as of `getattr`
                return _attribute(owner, key), id(owner)
    raise _Unknown


CONTAINERS = (dict, OrderedDict, list, tuple)


def called(text: str, path: ast.expr, names: Mapping[str, Any], globally: Mapping[str, Any], frame: int) -> str:
    """What a path is called: its text or, of an attribute that is named by a value, the attribute with this name.

    Raises:
        _Unknown: as `looked_up`.
    """
    if not isinstance(path, ast.Subscript) or isinstance(path.slice, ast.Constant):
        return text
    owner, _ = looked_up(path.value, names, globally, frame)
    if type(owner) in CONTAINERS:
        return text
    return f"{ast.unparse(path.value)}.{looked_up(path.slice, names, globally, frame)[0]}"


def _attribute(owner: Any, name: str) -> Any:
    if isinstance(owner, Cell) and name in owner.values:
        return owner.values[name]
    if isinstance(owner, torch.Tensor):
        if name == "data":
            return owner
        if name == "grad" and owner.is_leaf:
            return owner.grad
        raise _Unknown
    own = object.__getattribute__(owner, "__dict__")
    if name in own:
        return own[name]
    if isinstance(owner, nn.Module):
        for kind in ("_parameters", "_buffers", "_modules"):
            if name in own.get(kind, ()):
                return own[kind][name]
    for base in type(owner).__mro__:
        if name in vars(base) and type(vars(base)[name]) in (bool, int, float, str, tuple):
            return vars(base)[name]
    raise _Unknown


def told(value: Any) -> str:
    """The text of a plain value, of a container of such, or a digest of a tensor; empty of anything else."""
    return _told(value, iter(range(MOST_PARTS)))


def _told(value: Any, left: Iterator[int]) -> str:
    """The same. left: counts the parts that may still be looked at."""
    if value is None or type(value) in (bool, int, float, complex):
        return repr(value)
    if type(value) in (str, bytes):
        return _shortened(repr(value))
    if isinstance(value, torch.Tensor):
        said = _of_tensor(value)
        return f"DTensor {said}" if said and isinstance(value, DTensor) else said
    if isinstance(value, (np.ndarray, np.number)):
        return _of_array(value)
    if isinstance(value, torch.Generator):
        return f"generator {digest(bytes(value.get_state().tolist()))}"
    if type(value) not in (list, tuple, dict, OrderedDict, set, frozenset, deque):
        return ""
    texts = list[str]()
    for part in sorted(value.items(), key=repr_of_key) if isinstance(value, dict) else value:
        text = _told(part, left) if next(left, None) is not None else ""
        if not text:
            return ""
        texts.append(text)
    return _shortened(f"{type(value).__name__} [{', '.join(texts)}]")


def repr_of_key(item: tuple[Any, Any]) -> str:
    """By what the entries of a mapping are put in order, which two equal ones need not have alike."""
    return repr(item[0]) if type(item[0]) in (str, int, tuple) else ""


def _shortened(text: str) -> str:
    return text if len(text) <= MOST_TEXT else f"{text[:MOST_TEXT]}… {digest(text.encode())}"


def _of_tensor(value: torch.Tensor) -> str:
    """The number of a tensor with one element, or dtype, shape and digest; empty of what does not lie in memory as it
    is."""
    value = value._local_tensor if isinstance(value, DTensor) else value
    data = bytes_of(value)
    if not data:
        return ""
    if value.numel() == 1 and value.dtype in _FORMATS:
        return f"{TENSOR}{np.frombuffer(data, _FORMATS[value.dtype])[0].item()!r}"
    numbers = np.frombuffer(data, _FORMATS[value.dtype]) if value.dtype in _FORMATS else None
    return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)} {_shown(numbers)}{digest(data)}"


def _shown(numbers: npt.NDArray[Any] | None) -> str:
    """The numbers of a tensor or an array in front of its digest, with a space behind; empty of many, or of none that
    can be read."""
    few = numbers is not None and numbers.size <= MOST_SHOWN
    return f"[{', '.join(f'{number:.6g}' for number in numbers.ravel())}] " if few and numbers is not None else ""


def _of_array(value: npt.NDArray[Any] | np.number[Any]) -> str:
    """The same of an array of numbers, or of one number of numpy's."""
    if value.dtype.kind not in "fiub" or not 0 < value.nbytes <= MOST_BYTES:
        return ""
    if value.ndim == 0:
        return repr(value.item())
    return f"{value.dtype} {value.shape} {_shown(np.asarray(value))}{digest(value.tobytes())}"


def bytes_of(value: torch.Tensor) -> bytes:
    """The bytes of a tensor, read from memory without asking torch for anything that a hook or a mode could see; empty
    of what is no plain tensor, or too large."""
    if type(value) not in (torch.Tensor, nn.Parameter) or torch.compiler.is_compiling():
        return b""
    size, itemsize = value.numel(), value.element_size()
    if value.layout is not torch.strided or value.device.type != "cpu" or not 0 < size * itemsize <= MOST_BYTES:
        return b""
    whole = value.is_contiguous()
    parts = () if whole else zip(value.shape, value.stride(), strict=True)
    extent = size if whole else 1 + sum((length - 1) * stride for length, stride in parts)
    within = value.untyped_storage().nbytes() >= (value.storage_offset() + extent) * itemsize
    if extent * itemsize > MOST_EXTENT or not within:
        return b""
    if torch._C._functorch.is_functorch_wrapped_tensor(value) or not value.data_ptr():
        return b""
    data = ctypes.string_at(value.data_ptr(), extent * itemsize)
    if whole:
        return data
    elements = np.frombuffer(data, f"V{itemsize}")
    strides = [stride * itemsize for stride in value.stride()]
    return np.lib.stride_tricks.as_strided(elements, tuple(value.shape), strides).tobytes()


def numbers_of(value: torch.Tensor, data: bytes) -> npt.NDArray[np.generic] | None:
    """The bytes of a tensor as numbers, in its shape; None where there are none, or they are of another kind."""
    if not data or value.dtype not in (*_FORMATS, torch.bfloat16):
        return None
    if value.dtype == torch.bfloat16:
        wide = np.frombuffer(data, np.uint16).astype(np.uint32) << 16
        return wide.view(np.float32).reshape(tuple(value.shape))
    return np.frombuffer(data, _FORMATS[value.dtype]).reshape(tuple(value.shape))


_FORMATS: dict[torch.dtype, type[np.generic]] = {
    torch.float64: np.float64, torch.float32: np.float32, torch.float16: np.float16, torch.int64: np.int64,
    torch.int32: np.int32, torch.bool: np.bool_,
}  # fmt: skip


def digest(data: bytes) -> str:
    """Twelve letters for some bytes, the same for the same."""
    return blake2b(data, digest_size=6).hexdigest()


MOST_SHOWN = 6
"""Elements of a tensor that its text shows beside the digest."""

MOST_BEHIND = 16
"""Plain values of an object, and of those that it asks, that are told with it."""

_ASKED = ("sampler", "batch_sampler", "_index_sampler", "dataset", "_dataset", "generator")
"""Attributes of loaders and their iterators that say which samples come."""


def behind(value: Any, path: str, depth: int = 0) -> Iterator[tuple[str, str, int]]:
    """The plain values that an object has behind it, each as [path, text, owner]: of torch's loaders and samplers, and
    of objects whose class stands in a file of the trainer's own."""
    kind = type(value)
    file = getattr(sys.modules.get(kind.__module__), "__file__", None) or ""
    ours = kind.__module__.startswith("torch.utils.data") or bool(file and own_statements(file))
    if depth > 2 or not ours or isinstance(value, (nn.Module, torch.Tensor)):
        return
    own = object.__getattribute__(value, "__dict__")
    for name, held in list(own.items()):
        if name[:1] != "_" and type(held) in (bool, int, float, str):
            yield f"{BEHIND}{path}.{name}", told(held), id(value)
    for name in _ASKED:
        if isinstance(own.get(name), torch.Generator):
            yield f"{BEHIND}{path}.{name}", told(own[name]), id(value)
        elif name in own:
            yield from behind(own[name], f"{path}.{name}", depth + 1)
