"""Bytes that are a pickle of plain data, as a data loader's state may be: which entry differs between two of them.

Nothing is executed: a pickle is read as data (`shardproof.readers.symbolic`), and what it would call is compared by its
name and its arguments.
"""

from __future__ import annotations

from collections.abc import Iterator

from shardproof.errors import UsageError
from shardproof.observe.logical import Value
from shardproof.readers.symbolic import Mapping, Name, Node, parse

MOST_ENTRIES = 100_000
"""A small pickle can describe a structure without an end."""

_PLAIN = (bool, int, float, str, type(None))
_LONGEST = 60


def entry_apart(expected: Value, observed: Value) -> str:
    """The first entry in which two pickles differ, such as `sampler.yielded is 5, and should be 4`; empty where the
    bytes are no pickles that can be read, or their entries are alike.

    Args:
        expected, observed: bytes, as a flat tensor of uint8.
    """
    if any((value.dtype, len(value.shape), value.data[:1]) != ("uint8", 1, b"\x80") for value in (expected, observed)):
        return ""
    try:
        one, other = (parse(value.data, "a value of the trainer's own") for value in (expected, observed))
    except UsageError:
        return ""
    apart = list(_apart(one, other))
    if not apart:
        return ""
    more = f", and {len(apart) - 1} more entr{'ies differ' if len(apart) > 2 else 'y differs'}" if apart[1:] else ""
    return f"{apart[0]}{more}"


def _apart(one: object, other: object) -> Iterator[str]:
    """A sentence without its full stop for each entry that differs, in the order of the pickle."""
    stack, seen = [("", one, other)], set[tuple[int, int]]()
    while stack and len(seen) < MOST_ENTRIES:
        path, left, right = stack.pop()
        children = _children(left), _children(right)
        if type(left) is not type(right) or not (children[0] or children[1]):
            if type(left) is not type(right) or (_is_plain(left) and repr(left) != repr(right)):
                yield f"{path or 'the whole'} is {_shown(right)}, and should be {_shown(left)}"
            continue
        if (id(left), id(right)) in seen:
            continue
        seen.add((id(left), id(right)))
        names = dict.fromkeys([*children[0], *children[1]])
        absent = [name for name in names if name not in children[0] or name not in children[1]]
        for name in absent:
            be = "is not there" if name in children[0] else "is there, and should not be"
            yield f"{_joined(path, name)} {be}"
        there = [name for name in names if name not in absent]
        stack += [(_joined(path, name), children[0][name], children[1][name]) for name in reversed(there)]


def _children(value: object) -> dict[str, object]:
    """Name → entry of a container; a plain value has no entries."""
    match value:
        case Mapping(pairs):
            return {_word(key): each for key, each in pairs}
        case list() | tuple():
            return {str(index): each for index, each in enumerate(value)}
        case Node(_, args, state, pairs, items):
            named = {_word(key): each for key, each in pairs}
            return {"type": value.function, "arguments": args, "state": state, "items": items} | named
    return {}


def _is_plain(value: object) -> bool:
    return isinstance(value, (*_PLAIN, bytes, Name))


def _word(key: object) -> str:
    return str(key) if isinstance(key, (*_PLAIN, Name)) else type(key).__name__


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _shown(value: object) -> str:
    """A value in a sentence, cut where it is long."""
    if not isinstance(value, (*_PLAIN, Name)):
        return f"a {type(value).__name__} of {len(value)}" if isinstance(value, (list, tuple, bytes)) else "an object"
    text = repr(value) if isinstance(value, str) else str(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
