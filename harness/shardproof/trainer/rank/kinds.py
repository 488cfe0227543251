"""What an object is to a search for state, told from what it has and not from whose it is.

Attributes are looked up without running any code of the object (`inspect.getattr_static`): an object that answers to
every name, such as a wrapper that passes on what it does not know, would otherwise be an optimizer and a scheduler at
once, and a property may do work.
"""

from __future__ import annotations

import dataclasses
import inspect
import io
import random
import re
import types
import weakref
from collections import deque
from collections.abc import Iterator
from enum import Enum
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler

PLAIN = (bool, int, float, complex, str, bytes, bytearray, type(None))

_PASSIVE = (
    *PLAIN, Enum, range, slice, type, partial, property, types.FunctionType, types.BuiltinFunctionType,
    types.MethodType, types.ModuleType, types.MethodWrapperType, types.CodeType, types.FrameType, types.TracebackType,
    types.GenericAlias, types.UnionType, type(Ellipsis), type(NotImplemented),
    staticmethod, classmethod, memoryview, weakref.ReferenceType,
    torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format, np.dtype, np.generic, BaseException,
)  # fmt: skip

_PASSIVE_ROOMS = frozenset({
    "logging", "threading", "_thread", "multiprocessing", "concurrent", "asyncio", "queue", "_queue", "weakref",
    "typing", "inspect", "importlib", "ast", "re", "pathlib", "datetime", "argparse", "contextlib", "abc", "warnings",
    "decimal", "fractions", "uuid", "time", "zoneinfo", "operator", "tempfile", "subprocess", "socket", "ssl", "signal",
    "contextvars", "_contextvars", "string", "json", "pickle", "tokenizers", "sentencepiece", "tiktoken", "rich",
    "tqdm", "tensorboard", "wandb", "packaging",
})  # fmt: skip
"""Packages of whose objects none is state of a training."""

_PASSIVE_PARTS = (
    "torch._C", "torch._dynamo", "torch._inductor", "torch._functorch", "torch._ops", "torch.fx", "torch.profiler",
    "torch.autograd", "torch.futures", "torch.cuda", "torch.jit", "torch.hub", "torch.utils.tensorboard",
    "torch.utils.hooks", "torch.distributed.device_mesh", "torch.distributed.distributed_c10d", "torch.distributed.rpc",
)  # fmt: skip

_OF_MODULES = frozenset({"_modules", "_parameters", "_buffers", "_non_persistent_buffers_set"})
_CONTAINERS = (dict, list, tuple, deque, set, frozenset, types.MappingProxyType)
_OF_SCHEDULERS = ("last_epoch", "optimizer", "optimizers", "get_last_lr", "schedulers")
_LOOKS = re.compile(r"(?:loader|sampler|optimi[sz]er|scaler|sched|(?:^|[^a-z])ema(?:$|[^a-z]))", re.IGNORECASE)
_WORDS = re.compile(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
_CONFIG = re.compile(
    r"(?:config|cfg|args|arguments|params|options|settings|tokeni[sz]er)|(?:type|name|cls|class|fn)s?$", re.IGNORECASE
)
_OF_DATA = re.compile(r"(?:loader|sampler|dataset|data|iter|shuffl)", re.IGNORECASE)

MODULE, OPTIMIZER, SCHEDULER, SCALER, GENERATOR = "module", "optimizer", "scheduler", "scaler", "generator"
LOADER, STATEFUL, TENSOR, VALUE = "loader", "stateful", "tensor", "value"
PASSIVE, CONTAINER, ITERATOR, FILE, DATASET, OPAQUE, OBJECT = (
    "passive", "container", "iterator", "file", "dataset", "opaque", "object",
)  # fmt: skip


def kind_of(value: Any, name: str) -> str:
    """One of the kinds above; `name` is the last word of its path."""
    if type(value) in weakref.ProxyTypes:  # says that it is of the class of what it stands for
        return PASSIVE
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return TENSOR
    if isinstance(value, nn.Module):
        return MODULE
    if isinstance(value, (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)):
        return GENERATOR
    if isinstance(value, _PASSIVE) or facts_of(type(value)).passive:
        return PASSIVE
    return _with_state(value, name) or _without_state(value)


def _with_state(value: Any, name: str) -> str | None:
    if has(value, "param_groups") and any(has(value, other) for other in ("state", "optimizer", "optimizers")):
        return OPTIMIZER
    if facts_of(type(value)).steps:
        return OPTIMIZER  # a wrapper that passes on what it does not know
    if not has(value, "state_dict"):
        return CONTAINER if isinstance(value, _CONTAINERS) else None
    if has(value, "step") and any(has(value, other) for other in _OF_SCHEDULERS):
        return SCHEDULER
    if has(value, "get_scale") or has(value, "loss_scale") or (has(value, "scale") and has(value, "update")):
        return SCALER
    words = (name, *(base.__name__ for base in type(value).__mro__[:-1]))
    return LOADER if any(map(_OF_DATA.search, words)) else STATEFUL


def _without_state(value: Any) -> str:
    if isinstance(value, DataLoader):
        return OBJECT
    if isinstance(value, io.IOBase):
        return FILE
    if hasattr(type(value), "__next__"):
        return ITERATOR
    if isinstance(value, Dataset):
        return DATASET
    if hasattr(value, "__dict__") or facts_of(type(value)).slots:
        return OBJECT
    return OPAQUE


def has(value: object, name: str) -> bool:
    """Whether an object has an attribute, of its own or of its class, without running anything of it."""
    if name in facts_of(type(value)).names:
        return True
    try:
        return name in object.__getattribute__(value, "__dict__")
    except AttributeError:
        return False


@dataclasses.dataclass(frozen=True)
class Facts:
    """What is true of every object of a class, found out once, since all that hangs on a trainer is looked at after
    each operation.

    * names: of the class's attributes, inherited ones too. slots: of attributes that objects keep without a `__dict__`.
    * steps: whether it has the methods of an optimizer. passive: whether it comes from a package without state.
    """

    names: frozenset[str]
    slots: tuple[str, ...]
    steps: bool
    passive: bool


_FACTS: dict[type, Facts] = {}


def facts_of(kind: type) -> Facts:
    """The facts of a class."""
    if kind not in _FACTS:
        names = frozenset(name for base in kind.__mro__ for name in vars(base))
        steps = all(callable(inspect.getattr_static(kind, method, None)) for method in ("step", "zero_grad"))
        _FACTS[kind] = Facts(names, _slots(kind), steps, _of_passive_room(kind))
    return _FACTS[kind]


def children_of(value: Any) -> Iterator[tuple[str, Any]]:
    """Name → object of what a container holds, or of an object's attributes."""
    if isinstance(value, (dict, types.MappingProxyType)):
        yield from ((name_of(key, index), child) for index, (key, child) in enumerate(list(value.items())))
    elif isinstance(value, (list, tuple, deque)):
        yield from ((str(index), child) for index, child in enumerate(list(value)))
    elif isinstance(value, (set, frozenset)):
        ordered = sorted(value, key=lambda child: type(child).__name__)
        yield from ((str(index), child) for index, child in enumerate(ordered))
    own = list(getattr(value, "__dict__", {}).items())
    if isinstance(value, nn.Module):
        own = [
            *value._modules.items(),
            *(pair for pair in own if pair[0] not in _OF_MODULES and "_hooks" not in pair[0]),
        ]
    yield from own
    for name in facts_of(type(value)).slots:
        try:
            yield name, object.__getattribute__(value, name)
        except AttributeError:
            continue


def is_value(value: object) -> bool:
    """Whether an object is a number, a text or bytes."""
    return isinstance(value, (*PLAIN, np.generic)) and value is not None


def name_of(key: object, index: int) -> str:
    """The name of a mapping's entry: its key, or its position where the key is no text or number, such as a tensor."""
    return str(key) if isinstance(key, (str, int, float, tuple)) else str(index)


def _slots(kind: type) -> tuple[str, ...]:
    bases = (base for base in kind.__mro__ if base.__module__ != "builtins")
    slots = ((name, slot) for base in bases for name, slot in vars(base).items())
    return tuple(name for name, slot in slots if isinstance(slot, types.MemberDescriptorType))


def looks_like_state(name: str, value: object) -> bool:
    """Whether name or class of an object promise state, so that finding none in it deserves a word."""
    kind = type(value).__name__
    if _CONFIG.search(name) or _CONFIG.search(kind) or dataclasses.is_dataclass(value) or isinstance(value, DataLoader):
        return False
    if isinstance(value, Sampler) and type(value).__module__.startswith("torch."):
        return False  # draws from a generator, and counts nothing
    if isinstance(value, _CONTAINERS) and not any(type(child) in (int, float) for _, child in children_of(value)):
        return False  # objects in it are judged by themselves
    return bool(_LOOKS.search(name) or _LOOKS.search(_WORDS.sub("_", kind)))


def of_data(name: str, value: object) -> bool:
    """Whether an object is, by its name or class, one that gives data: what it holds is no state of training."""
    return bool(re.search(r"dataset|corpus|tokeni[sz]er", f"{name} {type(value).__name__}", re.IGNORECASE))


def _of_passive_room(kind: type) -> bool:
    room = kind.__module__
    return room.partition(".")[0] in _PASSIVE_ROOMS or any(
        room == part or room.startswith(f"{part}.") for part in _PASSIVE_PARTS
    )


def waits(loader: Any) -> bool:
    """Whether a loader would have to begin an epoch to tell its position: it keeps its iterator, and has none yet."""
    return vars(loader).get("_iterator", loader) is None if hasattr(loader, "__dict__") else False
