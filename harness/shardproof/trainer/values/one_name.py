"""The same names for the same parameters in two ways of which one has more modules than the other.

A trainer with one model has its parameters under the model's own names, and one that has an average beside it puts the
name of each attribute in front. So a cell that keeps no average and one that does have no name in common.

*Verifies*: that every parameter of the one way is there in the other under one and the same prefix. *Does not verify*:
that they are of the same model, which their values say.
"""

from __future__ import annotations

from collections.abc import Mapping

from shardproof.observe.logical import Value
from shardproof.observe.settings import SETTING
from shardproof.trainer.values.every_mesh import OF_MODULES, Name
from shardproof.trainer.values.rounding import PARAMS, At

Values = Mapping[Name, Value]


def under_one_name(one: At, other: At) -> tuple[At, At, set[Name]]:
    """Both ways, the one with a single module under the names that it has in the other; and what belongs to the other
    modules, which is left out of both. Unchanged, and empty, where names agree or there is no such prefix."""
    if prefix := _prefix(one, other):
        alone = _of_others(other, prefix)
        return _renamed(one, prefix), {name: value for name, value in other.items() if name not in alone}, alone
    if prefix := _prefix(other, one):
        alone = _of_others(one, prefix)
        return {name: value for name, value in one.items() if name not in alone}, _renamed(other, prefix), alone
    return one, other, set()


def _params(values: Values) -> set[str]:
    return {name for role, name in values if role == PARAMS}


def _prefix(single: Values, several: Values) -> str:
    """What stands in front of every parameter of the one way in the other; empty where there is no such thing."""
    own, others = _params(single), _params(several)
    if not own or own & others:
        return ""
    first = min(own)
    prefixes = [name.removesuffix(first) for name in others if name.endswith(f".{first}")]
    there = [prefix for prefix in sorted(prefixes) if {prefix + name for name in own} <= others]
    stepped = {line for (role, name), value in several.items() if role == SETTING and name.endswith(".params")
               for line in value.data.decode().split("\n")}  # fmt: skip
    return max(there, key=lambda prefix: sum(prefix + name in stepped for name in own), default="")


def _of_others(several: Values, prefix: str) -> set[Name]:
    """What modules hold beside the one with a prefix."""
    return {(role, name) for role, name in several if role in OF_MODULES and not name.startswith(prefix)}


def _renamed(single: Values, prefix: str) -> At:
    own = {name for role, name in single if role in OF_MODULES}
    found: dict[Name, Value] = {}
    for (role, name), value in single.items():
        if role == SETTING and name.endswith(".params"):
            lines = value.data.decode().split("\n")
            data = "\n".join(prefix + line if line in own else line for line in lines).encode()
            found[role, name] = Value(value.dtype, (len(data),), data)
        else:
            found[role, prefix + name if name in own else name] = value
    return found
