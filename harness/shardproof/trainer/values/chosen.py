"""What is seldom meant of the parameters that each param group was given: none at all, or vectors of one kind of layer
with two weight decays, as where what chooses them compares names that are longer than it thinks.

*Does not verify*: which parameters a group should have; it is told, and not judged.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from shardproof.observe.logical import Value
from shardproof.observe.settings import SETTING
from shardproof.trainer.values.every_mesh import Name
from shardproof.trainer.values.rounding import PARAMS
from shardproof.trainer.values.telling import one_or_many

_GROUP = re.compile(r"^(?P<of>.*)\bgroup(?P<number>\d+)\.params$")

LOOK = "look at what chooses the parameters of each group, such as a test of their names"


class _Group(NamedTuple):
    of: str
    number: int
    params: tuple[str, ...]
    decay: str


def strangely_chosen(values: Mapping[Name, Value]) -> Iterator[str]:
    """Notes on param groups, of which each optimizer has its own.

    Args:
        values: what there is before the first step, settings of param groups among it.
    """
    groups = [*_groups(values)]
    several = {group.of for group in groups if group.number}
    for group in groups:
        if not group.params and group.of in several:
            decay = f", whose weight decay is {group.decay}," if group.decay else ""
            yield f"param group {group.number}{decay} has no parameter: {LOOK}"
    yield from _one_kind_apart(groups, values)


def _one_kind_apart(groups: list[_Group], values: Mapping[Name, Value]) -> Iterator[str]:
    kinds: dict[str, dict[str, list[str]]] = {}
    for group in groups:
        for name in group.params:
            value = values.get((PARAMS, name))
            if value is not None and len(value.shape) == 1 and group.decay:
                kinds.setdefault(_kind(name), {}).setdefault(group.decay, []).append(name)
    for decays in kinds.values():
        if len(decays) == 2:
            (one, few), (other, many) = sorted(decays.items(), key=lambda each: len(each[1]))
            others = f"{many[0]}" if len(many) == 1 else f"{len(many)} others, such as {many[0]}"
            yield (
                f"the weight decay of {one_or_many(few).rstrip(',')} is {one}, and it is {other} for {others}, though "
                f"the names are of the same kind: {LOOK}"
            )
            return


def _kind(name: str) -> str:
    """The last two parts of a parameter's name without numbers, such as `norm.bias` of `layers.0.norm1.bias`."""
    parts = [part for part in name.split(".") if not part.isdecimal()]
    return ".".join(re.sub(r"_?\d+$", "", part) for part in parts[-2:])


def _groups(values: Mapping[Name, Value]) -> Iterator[_Group]:
    for (role, name), value in sorted(values.items()):
        if role == SETTING and (match := _GROUP.match(name)) and value.dtype == "utf8":
            decay = values.get((SETTING, f"{name.removesuffix('params')}weight_decay"))
            text = decay.data.decode().rpartition(" ")[2] if decay is not None else ""
            names = tuple(filter(None, value.data.decode().split("\n")))
            yield _Group(match["of"], int(match["number"]), names, text)
