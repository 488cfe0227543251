"""Frozen dataclasses to JSON types and back, driven by their annotations.

Handles dataclasses, named tuples, tuples, mappings with string keys, enums, bytes (as hex), optional
values and JSON's own types. Floats that JSON cannot express become the strings `nan`, `inf`, `-inf`.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache, partial
from typing import Any, Union, get_args, get_origin, get_type_hints


def to_plain(value: Any) -> Any:
    """`value` in JSON types.

    Raises:
        TypeError: it contains something without a JSON form.
    """
    match value:
        case None | bool() | str() | int():
            return value
        case float():
            return value if math.isfinite(value) else str(value)
        case Enum():
            return value.value
        case bytes():
            return value.hex()
        case tuple() if hasattr(value, "_asdict"):
            return {name: to_plain(item) for name, item in value._asdict().items()}
        case tuple() | list():
            return [to_plain(item) for item in value]
        case Mapping():
            return {str(key): to_plain(item) for key, item in value.items()}
        case _ if is_dataclass(value):
            return {f.name: to_plain(getattr(value, f.name)) for f in fields(value)}
        case _:
            raise TypeError(f"no JSON form for {type(value).__name__}")


def from_plain(kind: Any, data: Any) -> Any:
    """The value of annotation `kind` that `to_plain` turned into `data`.

    Keys that a dataclass lacks are ignored and fields without a key take their default, so that files of
    other releases stay readable.

    Raises:
        TypeError: a field without a default is absent, a scalar is of another type, or `kind` has no JSON form.
        ValueError: an enum or hex string is not valid.
    """
    return _reader(kind)(data)


_Reader = Callable[[Any], Any]
_SCALARS = (str, int, bool)


@cache
def _reader(kind: Any) -> _Reader:
    """What reads values of an annotation. It is worked out once for each: a report reads tens of thousands."""
    origin, of = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return _optional(of)
    if origin is tuple:
        return _tuple(of)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        of_key, read = of[0], _reader(of[1])
        return lambda data: {of_key(key): read(item) for key, item in data.items()}
    if kind is float:
        return float
    if kind is bytes:
        return bytes.fromhex
    if isinstance(kind, type) and (is_dataclass(kind) or hasattr(kind, "_fields")):
        return lambda data: kind(**fields_from_plain(kind, data, data))
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind
    return partial(_scalar, kind) if kind in _SCALARS else lambda data: data


def _scalar(kind: type, data: Any) -> Any:
    if not isinstance(data, kind) or (kind is int and isinstance(data, bool)):
        raise TypeError(f"{data!r} is no {kind.__name__}"[:200])
    return data


def fields_from_plain(kind: Any, data: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Some fields of a dataclass, by their annotations; those that the data lack are left out.

    Raises:
        TypeError, ValueError: as `from_plain`.
    """
    readers = _readers(kind)
    return {name: readers[name](data[name]) for name in names if name in readers and name in data}


def _optional(of: tuple[Any, ...]) -> _Reader:
    """What reads a union, which is `X | None` or one of JSON scalars."""
    members = [member for member in of if member is not type(None)]
    readers = {member: _reader(member) for member in members}
    first = readers[members[0]]
    if len(members) == 1:
        return lambda data: None if data is None else first(data)
    return lambda data: None if data is None else readers.get(type(data), first)(data)


def _tuple(of: tuple[Any, ...]) -> _Reader:
    readers = [_reader(kind) for kind in of if kind is not Ellipsis]
    if len(of) == 2 and of[1] is Ellipsis:
        return lambda data: tuple([readers[0](item) for item in data])
    return lambda data: tuple([read(item) for read, item in zip(readers, data, strict=True)])


@cache
def _readers(kind: type) -> dict[str, _Reader]:
    """Field of a dataclass or named tuple → what reads it."""
    return {name: _reader(hint) for name, hint in get_type_hints(kind).items()}
