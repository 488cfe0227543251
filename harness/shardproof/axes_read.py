"""Records which axes of a scenario a function reads, so that the function's axes need not be declared by hand.

Two things rest on it. A plan turns a rule such as "FSDP2 takes one storage dtype a unit" into a truth table over the
axes that the rule reads: `explore` runs the rule once for every way that it can go. And what a contract works out of a
scenario is remembered by the axes that it was worked out of (`by_axes`): a hundred scenarios that differ in their
checkpoint format alone share one answer, and a dependency cannot be forgotten in a key, since the key is what was read.

`explore` walks a decision tree that it discovers on the way. Take the rule "the program saves nothing, and the
checkpoint is not `dcp`" on eleven programs and twelve formats. The first run is given the first program; where that one
saves, the rule returns after one read, and the answer holds for all twelve formats. The second run is given the second
program, and so on; only the programs that save nothing are crossed with the formats. A rule that asks for a *fact* of
an axis (`Scenario.fact`: "does the program save?") splits the axis into the groups of values that have the same answer,
and is run once a group. So what a rule costs is the number of its paths, not the product of the axes that it knows.

A function must be pure: with equal answers to what it has read so far, it reads the same thing next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from shardproof.errors import HarnessError
from shardproof.scenario import AXES, Scenario

P = ParamSpec("P")
T = TypeVar("T")
S = TypeVar("S")

_MOST_REMEMBERED = 20_000
"""Answers of one function after which it forgets all of them: memory stays bounded in a long walk."""


class Noting(Scenario):
    """A scenario, without its checks, whose axes are asked for when they are first read.

    Its `__dict__` holds what was read, in the order of first reading, and what is known without asking.

    Args:
        ask: axis → its value. ask_fact: axis and function → a fact of it; without one, the function of its value.
    """

    __slots__ = ("_ask", "_ask_fact")

    _ask: Callable[[str], Any]
    _ask_fact: Callable[[str, Callable[[Any], Any]], Any] | None

    def __init__(
        self, ask: Callable[[str], Any], ask_fact: Callable[[str, Callable[[Any], Any]], Any] | None = None
    ) -> None:
        object.__setattr__(self, "_ask", ask)
        object.__setattr__(self, "_ask_fact", ask_fact)

    def fact(self, axis: str, of: Callable[[Any], T]) -> T:
        if self._ask_fact and axis not in vars(self):
            found: T = self._ask_fact(axis, of)
            return found
        return of(getattr(self, axis))


class _Axis:
    """An axis of a `Noting` scenario. Only the first read comes here: it leaves the value in the instance, where Python
    finds it from then on, since this descriptor has no `__set__`."""

    def __init__(self, axis: str) -> None:
        self.axis = axis

    def __get__(self, scenario: Noting, _owner: type) -> Any:
        value = vars(scenario)[self.axis] = scenario._ask(self.axis)
        return value


for _axis in AXES:
    setattr(Noting, _axis, _Axis(_axis))


@dataclass
class _Fork:
    """A read at which the ways of a rule part.

    groups: positions of the axis's values that came here, by what was answered; each with one of its answers. They are
    those that are still to be gone with, the one of the current run last.
    """

    axis: str
    groups: list[tuple[Any, list[int]]]


class _Run(Noting):
    """One run of a rule along the forks that are known, and beyond their end along new ones: the scenario that the rule
    reads.

    fixed: the axes that are the same in every run.
    left: axis → positions of the values with which the rule would go the same way so far, for the axes that it read.
    """

    __slots__ = ("_forks", "_taken", "_values", "left")

    _values: Mapping[str, Sequence[Any]]
    _forks: list[_Fork]
    _taken: int
    left: dict[str, list[int]]

    def __init__(self, values: Mapping[str, Sequence[Any]], forks: list[_Fork], fixed: Mapping[str, Any]) -> None:
        own = {"_values": values, "_forks": forks, "_taken": 0, "left": {}, "_ask": self.fact}
        for name, value in own.items():
            object.__setattr__(self, name, value)
        vars(self).update(fixed)

    def fact(self, axis: str, of: Callable[[Any], Any] | None = None) -> Any:
        """The value of an axis, or what a function says of it: the forks have a group for each. One more fork is made
        where they end."""
        known = vars(self)
        if axis in known:
            return known[axis] if of is None else of(known[axis])
        if self._taken == len(self._forks):
            self._forks.append(_Fork(axis, self._groups(axis, of)))
        fork = self._forks[self._taken]
        if fork.axis != axis:
            raise HarnessError(f"a rule read {fork.axis} the first time and {axis} the second, of the same values")
        object.__setattr__(self, "_taken", self._taken + 1)
        answer, self.left[axis] = fork.groups[-1]
        return answer

    def _groups(self, axis: str, of: Callable[[Any], Any] | None) -> list[tuple[Any, list[int]]]:
        """The values of an axis that are left, last first."""
        values = self._values[axis]
        left = self.left.get(axis, range(len(values)))
        if of is None:
            return [(values[position], [position]) for position in reversed(left)]
        groups: dict[Any, list[int]] = {}
        for position in left:
            groups.setdefault(of(values[position]), []).append(position)
        return list(groups.items())[::-1]


def explore(
    rule: Callable[[Scenario], T], base: Scenario, values: Mapping[str, Sequence[Any]]
) -> Iterator[tuple[dict[str, list[int]], T]]:
    """Every way that a rule can go, and what it returns there.

    Each way is given as axis → the positions of the values with which the rule goes there, for the axes that it read
    and that have several. The ways have no scenario in common, and together they are all of them.

    Args:
        base: gives the axes that `values` lacks. values: the different values of each axis.

    Raises:
        HarnessError: the rule raises, or is not pure.
    """
    forks: list[_Fork] = []
    fixed = {axis: getattr(base, axis) for axis in AXES if axis not in values}
    fixed |= {axis: only[0] for axis, only in values.items() if len(only) == 1}
    while True:
        run = _Run(values, forks, fixed)
        try:
            found = rule(run)
        except HarnessError:
            raise
        except Exception as error:
            given = " ".join(f"{axis}={values[axis][left[0]]}" for axis, left in run.left.items())
            raise HarnessError(f"a rule raises {type(error).__name__}: {error}, on {given or base}") from error
        yield run.left, found
        while forks and len(forks[-1].groups) == 1:
            forks.pop()
        if not forks:
            return
        forks[-1].groups.pop()


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
        noting = Noting(scenario.__getattribute__)  # whoever asked may be noting itself
        found = method(self, noting, *args, **kwargs)
        count += 1
        if count > _MOST_REMEMBERED:
            roots.clear()
            count = 1
        _insert(roots, key, vars(noting), found)
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
