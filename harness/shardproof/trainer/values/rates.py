"""Learning rates of param groups among what was found on a trainer: lines of type and value, such as `float 0.1`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from math import isclose

from shardproof.diff import Difference
from shardproof.observe.logical import Value
from shardproof.trainer.values.every_mesh import BESIDE, Name, without_rank
from shardproof.trainer.values.telling import one_or_many

ZERO = {b"float 0.0", b"int 0"}
"""Rates that let nothing move."""

_GROUP = re.compile(r"\bgroup(\d+)\.lr$")
_PARAMS = re.compile(r"\bgroup(\d+)\.params$")


def rates_in(values: Mapping[Name, Value]) -> set[bytes]:
    """The rates of all param groups."""
    return {value.data for (role, name), value in values.items() if role == "setting" and _GROUP.search(name)}


def rates_apart(first: Mapping[Name, Value], own: Mapping[Name, Value], names: tuple[str, str]) -> tuple[str, float]:
    """A sentence about rates of param groups that two ways have differently, and by which factor they are apart.

    Args:
        first, own: what either way holds. names: of the two, such as `schedule=alone`.

    Returns:
        Empty and 0 where rates are alike, or unknown; 0 where groups are apart by more than one factor.
    """
    told, factors = list[str](), set[float]()
    for name in sorted(first.keys() & own.keys()):
        group = _GROUP.search(name[1]) if name[0] == "setting" else None
        one, other = _number(first[name]), _number(own[name])
        if group and first[name] != own[name]:
            told.append(f"the learning rate of group {group[1]} is {one} with {names[0]} and {other} with {names[1]}")
        if group and one:
            factors.add(other / one)
    if not told:
        return "", 0.0
    return f"{told[0][0].upper()}{told[0][1:]}.", factors.pop() if len(factors) == 1 else 0.0


Used = Mapping[str, tuple[int, float]]
"""Parameter → the number of its param group, and the rate with which an optimizer stepped it."""


def used_rates(rates: Sequence[float | None], values: Mapping[Name, Value]) -> dict[str, tuple[int, float]]:
    """The rates that parameters were stepped with; none where nobody knows which group has which rate.

    Args:
        rates: of the param groups with which the latest optimizer of a step stepped. values: what there was after it.
    """
    groups = [(_PARAMS.search(name), value) for (role, name), value in values.items() if role == "setting"]
    named = {int(found[1]): value.data.decode().split("\n") for found, value in groups if found}
    if sorted(named) != list(range(len(rates))) or sum(found is not None for found, _ in groups) != len(rates):
        return {}
    known = ((number, rate) for number, rate in enumerate(rates) if rate is not None)
    return {without_rank(name): (number, rate) for number, rate in known for name in named[number] if name}


def used_rates_apart(one: Used, other: Used, names: tuple[str, str]) -> tuple[str, float]:
    """As `rates_apart`, of the rates that were used in a step."""
    both = one.keys() & other.keys()
    pairs = {name: (one[name], other[name]) for name in one if name in both}
    apart = [name for name, (mine, its) in pairs.items() if mine[1] != its[1]]
    if not apart:
        return _rate_of_one_way(one, other, names), 0.0
    (group, rate), (_, its) = pairs[apart[0]]
    alike = [name for name in apart if (pairs[name][0][1], pairs[name][1][1]) == (rate, its)]
    what = f"the learning rate of group {group}" if all(mine[0] == two[0] for mine, two in pairs.values()) else (
        f"the learning rate of {one_or_many(alike)}"
    )  # fmt: skip
    factors = {two / mine for (_, mine), (_, two) in pairs.values() if mine}
    told = f"{what} is {rate:.6g} with {names[0]} and {its:.6g} with {names[1]} in this step"
    more = ", and that of others the same" if len(alike) < len(pairs) and len(factors) > 1 and 1.0 in factors else ""
    return f"{told[0].upper()}{told[1:]}{more}.", factors.pop() if len(factors) == 1 else 0.0


def _rate_of_one_way(one: Used, other: Used, names: tuple[str, str]) -> str:
    """A sentence on the rates of parameters that are there in one of two ways alone, where all others have the same;
    empty where there are none, or theirs is that of all."""
    told = list[str]()
    for mine, its, way in ((one, other, names[0]), (other, one, names[1])):
        alone = sorted(name for name in mine if name not in its)
        rates = {mine[name][1] for name in alone}
        if len(rates) == 1 and not rates >= {rate for _, rate in mine.values()}:
            told.append(f"that of {one_or_many(alone)}, with {way} alone, is {rates.pop():.6g}")
    return f"The learning rate of every parameter of both ways is the same, and {', and '.join(told)}." if told else ""


def of_rates(
    found: Sequence[Difference], expected: Mapping[Name, Value], observed: Mapping[Name, Value],
    before: Mapping[Name, Value],
) -> str:  # fmt: skip
    """A sentence about a rate that a schedule has right, and the optimizer has not; empty where there is none.

    Args:
        before: what there was before the load, if the difference is one of a load; nothing of any other.
    """
    for difference in found:
        group = _GROUP.search(difference.key.fqn) if difference.key.role == "setting" else None
        wanted = difference.expected_first[1:-1] if group and difference.kind == "bits" else ""
        if group and wanted.encode() in _held(observed, group[1]):
            name = (difference.key.role, difference.key.fqn)
            told = f"The schedule holds the right rate, {wanted.rpartition(' ')[2]}, and the optimizer has another one"
            written = name in before and name in observed and before[name] != observed[name]
            if written or (name in before and _is_loaded(expected, observed, before)):
                seen = "the load wrote it" if written else "the load restored the optimizer's moments all the same"
                return f"{told}{_first_rate(name, observed)}: {seen}. {BUILT_LATER}"
            return f"{told}: {NOT_WRITTEN}"
    return ""


NOT_WRITTEN = "a schedule's `load_state_dict` writes none into the optimizer, which has to load its own state too."
BUILT_LATER = (
    "A schedule's own `load_state_dict` writes no rate into the optimizer. So this fits a schedule that is built after "
    "the optimizer was loaded and sets its first rate, a rate that `load` sets by hand, and param groups whose "
    "settings are not loaded."
)


def _is_loaded(expected: Mapping[Name, Value], observed: Mapping[Name, Value], before: Mapping[Name, Value]) -> bool:
    """Whether the load gave the optimizer moments, which only its own state has."""
    moments = {name for name in expected if name[0] in BESIDE}
    return any(expected[name] == observed.get(name) != before.get(name) for name in moments)


def _first_rate(name: Name, observed: Mapping[Name, Value]) -> str:
    """Of which numbers a rate is the product, as the first rate of a schedule that begins with a factor is."""
    initial, rate = (_number(observed.get((name[0], f"{name[1][:-2]}{key}"))) for key in ("initial_lr", "lr"))
    if not initial or not rate:
        return ""
    if initial == rate:
        return f", which is its initial_lr, {initial}"
    factors = ((key[1], _number(value)) for key, value in observed.items() if key[0] == "scheduler")
    for key, factor in factors:
        if factor and isclose(rate, factor * initial, rel_tol=1e-9):
            return f", {rate} = {factor} · {initial}, which is {key.rpartition('.')[2]} times initial_lr"
    return ""


def _number(value: Value | None) -> float:
    """A number that is recorded as a line of type and value; 0 for anything else."""
    text = value.data.decode() if value is not None and value.dtype == "utf8" else ""
    kind, _, number = text.partition(" ")
    return float(number) if kind == "float" else 0.0


def _held(observed: Mapping[Name, Value], group: str) -> set[bytes]:
    """What schedules say that they gave a param group last (`torch.optim.lr_scheduler.LRScheduler.get_last_lr`)."""
    last = f"_last_lr.{group}"
    return {value.data for (role, name), value in observed.items() if role == "scheduler" and name.endswith(last)}
