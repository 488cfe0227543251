"""Notes which axes of a scenario a function reads, so that nobody has to declare them.

Two things rest on it. A plan turns a rule such as "FSDP2 takes one storage dtype a unit" into a truth table over the
axes that the rule reads (`harness.space.constraints`). And what a contract works out of a scenario is remembered by
the axes that it was worked out of (`by_axes`): a hundred scenarios that differ in their checkpoint format alone share
one answer, and a dependency cannot be forgotten in a key, since the key is what was read.

A function must be pure: with equal values of what it has read so far, it reads the same axis next.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from harness.scenario import AXES, Scenario

P = ParamSpec("P")
T = TypeVar("T")
S = TypeVar("S")

_AXES = frozenset(AXES)
_MOST_REMEMBERED = 20_000
"""Answers of one function after which it forgets all of them: memory stays bounded in a long walk."""


class Noting(Scenario):
    """A scenario, without its checks, that notes which axes are read from it and in which order.

    reads: axis → its value, in the order of first reading.
    """

    reads: dict[str, Any]

    def __init__(self, values: dict[str, Any], reads: dict[str, Any]) -> None:
        object.__setattr__(self, "__dict__", {**values, "reads": reads})

    def __getattribute__(self, name: str) -> Any:
        value = object.__getattribute__(self, name)
        if name in _AXES:
            object.__getattribute__(self, "reads").setdefault(name, value)
        return value


class _Node:
    """The next axis to look at, and where each of its values leads: another node, or an answer in a one-tuple."""

    __slots__ = ("axis", "then")

    def __init__(self, axis: str) -> None:
        self.axis = axis
        self.then: dict[Any, _Node | tuple[Any]] = {}


def by_axes(
    method: Callable[Concatenate[S, Scenario, P], T],
) -> Callable[Concatenate[S, Scenario, P], T]:
    """Remember a method's answers by the axes of its scenario that it read, and by its other arguments.

    The object that has the method and all other arguments must be hashable; what it raises is not remembered.
    """
    roots: dict[Any, _Node | tuple[Any]] = {}
    count = 0

    @wraps(method)
    def remembered(self: S, scenario: Scenario, *args: P.args, **kwargs: P.kwargs) -> T:
        nonlocal count
        key = (self, args)
        node = roots.get(key)
        while isinstance(node, _Node):
            node = node.then.get(getattr(scenario, node.axis))
        if node is not None:
            answer: T = node[0]
            return answer
        reads: dict[str, Any] = {}
        found = method(self, Noting(vars(scenario), reads), *args, **kwargs)
        count += 1
        if count > _MOST_REMEMBERED:
            roots.clear()
            count = 1
        _insert(roots, key, reads, found)
        for axis in reads:  # whoever asked may be noting itself
            getattr(scenario, axis)
        return found

    return remembered  # type: ignore[return-value]


def _insert(roots: dict[Any, _Node | tuple[Any]], key: Any, reads: dict[str, Any], found: Any) -> None:
    table, at = roots, key
    for axis, value in reads.items():
        node = table.get(at)
        if not isinstance(node, _Node):
            node = table[at] = _Node(axis)
        table, at = node.then, value
    table[at] = (found,)
