"""Frozen dataclasses to JSON types and back, driven by their annotations.

Handles dataclasses, named tuples, tuples, mappings with string keys, enums, bytes (as hex), optional
values and JSON's own types. Floats that JSON cannot express become the strings `nan`, `inf`, `-inf`.
"""

from __future__ import annotations

import math
import types
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
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
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        return None if data is None else from_plain(_member(kind, data), data)
    if origin is tuple:
        return _tuple(get_args(kind), data)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        of_key, of_value = get_args(kind)
        return {of_key(key): from_plain(of_value, item) for key, item in data.items()}
    if kind is float:
        return float(data)
    if kind is bytes:
        return bytes.fromhex(data)
    if isinstance(kind, type) and (is_dataclass(kind) or hasattr(kind, "_fields")):
        hints = _hints(kind)
        return kind(**{name: from_plain(hints[name], item) for name, item in data.items() if name in hints})
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind(data)
    if kind in _SCALARS and (not isinstance(data, kind) or (kind is int and isinstance(data, bool))):
        raise TypeError(f"{data!r} is no {kind.__name__}"[:200])
    return data


_SCALARS = (str, int, bool)


def fields_from_plain(kind: Any, data: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Some fields of a dataclass, by their annotations; those that the data lack are left out.

    Raises:
        TypeError, ValueError: as `from_plain`.
    """
    hints = _hints(kind)
    return {name: from_plain(hints[name], data[name]) for name in names if name in data}


def _member(kind: Any, data: Any) -> Any:
    """Which type of a union `data` came from; unions are `X | None` or of JSON scalars."""
    members = [member for member in get_args(kind) if member is not type(None)]
    if len(members) == 1:
        return members[0]
    return next((m for m in members if isinstance(m, type) and type(data) is m), members[0])


def _tuple(items: tuple[Any, ...], data: Any) -> tuple[Any, ...]:
    if len(items) == 2 and items[1] is Ellipsis:
        return tuple(from_plain(items[0], item) for item in data)
    return tuple(from_plain(of, item) for of, item in zip(items, data, strict=True))


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)
