"""How often each of two ways to compute the same updated in one step, and which parameters, where they do not agree.

One step of a trainer may be an epoch, or a batch that is cut into micro-batches. A way that drops the last ones, or
updates once more for them, comes to other values everywhere; that it counts another number of updates says why.

*Verifies*: by how much the optimizer's counts of steps, or else a schedule's, grew in the step. *Does not verify*: an
optimizer that counts nothing, beside no schedule.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import partial

from shardproof.diff import as_numbers
from shardproof.observe.settings import SETTING
from shardproof.trainer.values.every_mesh import Name, Values, of_every_mesh, without_rank
from shardproof.trainer.values.rounding import PARAMS
from shardproof.trainer.values.telling import one_or_many, times

_times = partial(times, never="not at all")

Way = tuple[Values, Values]
"""What a way has before a step and after it."""

_NUMBER = re.compile(rb"(?:int|float) (\d+)(?:\.0)?")

_OF_SCHEDULE = re.compile(r"(.*\.)?_step_count")
"""Other than `last_epoch`, it does not begin again where a schedule does; but not every schedule counts by it."""


def how_often(first: Way, own: Way, names: tuple[str, str], step: int) -> str:
    """A sentence; empty where both count as many updates, or none. names: of the two ways, such as `shard=no`."""
    (before, after), (before_too, after_too) = ([of_every_mesh(values)[0] for values in way] for way in (first, own))
    for kind, verb in (("step", "updated parameters"), ("scheduler", "moved its learning-rate schedule on")):
        grown = dict(grown_by(kind, before, after)), dict(grown_by(kind, before_too, after_too))
        pairs = {(grown[0][name], grown[1][name]) for name in grown[0].keys() & grown[1].keys()}
        if apart := sorted(pair for pair in pairs if pair[0] != pair[1] and min(pair) >= 0):
            one, other = apart[0]
            ways = ((names[0], one, first), (names[1], other, own))
            if uncounted := [way for way, number, moment in ways if kind == "step" and not number and _moves(*moment)]:
                return f"At step {step}, {uncounted[0]} moves parameters and counts no step: its `step` stays as it is."
            return f"At step {step}, {names[0]} {verb} {_times(one)} and {names[1]} {_times(other)}."
        if pairs:
            return ""
    return ""


def optimizers_step(often: tuple[int, int], names: tuple[str, str], step: int) -> str:
    """A sentence about optimizers that step more often in one of two ways, though they count no steps, as SGD does not;
    empty where they step as often, or nobody knows. often: in both ways."""
    if often[0] == often[1] or not all(often):
        return ""
    each = (f"{_times(number)} with {name}" for number, name in zip(often, names, strict=True))
    return f"At step {step}, optimizers step {' and '.join(each)}."


def stepped_apart(first: Values, own: Values, names: tuple[str, str]) -> str:
    """A sentence about parameters that the optimizers of only one of two ways step; empty where there are none, or
    where a way steps what no module has, such as flat copies. names: of the two ways."""
    there = {name for role, name in first if role == PARAMS} & {name for role, name in own if role == PARAMS}
    one, two = _held(first), _held(own)
    if not one or not two or not one | two <= there:
        return ""
    for mine, its, way, other in ((one, two, *names), (two, one, *names[::-1])):
        if more := sorted(mine - its):
            return (
                f"With {way} the optimizer is given {one_or_many(more)} and with {other} it is not: look at what fills "
                "its param groups, such as a wrapper that makes them anew from all parameters of the model."
            )
    return ""


GROUPED = ("weight_decay", "lr")
"""Settings by which parameters may be sorted into param groups."""


def grouped_apart(first: Values, own: Values, names: tuple[str, str], *, settings: Sequence[str] = GROUPED) -> str:
    """A sentence about parameters that are in another param group in one of two ways than in the other, and have
    another weight decay or learning rate there; empty where there are none. names: of the two ways. settings: which
    of the two are looked at."""
    if _groups(first) == _groups(own):
        return ""
    for setting in settings:
        mine, its = (_of_groups(values, setting) for values in (first, own))
        every = sorted(name for name in mine.keys() & its.keys() if mine[name] != its[name])
        apart = [name for name in every if (mine[name], its[name]) == (mine[every[0]], its[every[0]])]
        if apart and len(every) < len(mine):
            name = apart[0]
            return (
                f"{one_or_many(apart)} ha{'ve' if len(apart) > 1 else 's'} {setting} {mine[name]} with {names[0]} and "
                f"{its[name]} with {names[1]}, and others the same: look at what sorts parameters into param groups."
            )
    return ""


def _groups(values: Values) -> set[frozenset[str]]:
    """The param groups of all optimizers, each as the set of its parameters."""
    groups = (value for (role, name), value in values.items() if role == SETTING and name.endswith(".params"))
    return {frozenset(map(without_rank, value.data.decode().split("\n"))) for value in groups}


def _of_groups(values: Values, setting: str) -> dict[str, str]:
    """Parameter → the value of a setting in its param group."""
    found: dict[str, str] = {}
    for (role, name), value in values.items():
        number = values.get((SETTING, f"{name.removesuffix('params')}{setting}"))
        if role == SETTING and name.endswith(".params") and number is not None:
            told = number.data.decode().rpartition(" ")[2]
            found |= {without_rank(each): told for each in value.data.decode().split("\n") if each}
    return found


def _held(values: Values) -> set[str]:
    """The names of all parameters in param groups."""
    return set().union(*_groups(values)) - {""}


def _moves(before: Values, after: Values) -> bool:
    """Whether a parameter changes."""
    return any(value != after.get(name) for name, value in before.items() if name[0] == PARAMS)


def grown_by(kind: str, before: Values, after: Values) -> Iterator[tuple[Name, int]]:
    """By how much each count grew. A count of the optimizer's that is not there yet is zero. A count of a schedule's
    whose `last_epoch` grew otherwise is none, as of one that was made anew, or that counts its steps by that alone."""
    for name in after:
        if name[0] == kind and (kind == "step" or _OF_SCHEDULE.fullmatch(name[1])):
            grown = _growth(before, after, name, 0 if kind == "step" else None)
            epochs = _growth(before, after, (name[0], f"{name[1].removesuffix('_step_count')}last_epoch"), None)
            if grown is not None and (kind == "step" or epochs in (None, grown)):
                yield name, grown


def _growth(before: Values, after: Values, name: Name, absent: int | None) -> int | None:
    """By how much a value grew; None of a value that is no count. absent: the count before, where there was none."""
    start, end = _count(before, name), _count(after, name)
    start = absent if start is None else start
    return None if start is None or end is None else end - start


def _count(values: Values, name: Name) -> int | None:
    value = values.get(name)
    if value is None:
        return None
    if value.dtype == "utf8":
        number = _NUMBER.fullmatch(value.data)
        return int(number[1]) if number else None
    numbers = as_numbers(value).reshape(-1)
    return int(numbers[0]) if len(numbers) == 1 and numbers[0] == int(numbers[0]) else None
