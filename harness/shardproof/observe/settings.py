"""The keys of a param group, each with the type of its value and, where nothing else records it, the value.

A learning rate that turns from a tensor into a Python number trains on with the same numbers, until a scheduler or a
captured graph writes into the tensor that is no longer there. A key that a load drops is missed by whoever asks for it
next. So each key becomes a line of text, for example

    lr               "float"                    its number is a record of its own, of the role `hyperparameter`
    lr               "tensor float32 ()"
    betas            "(float, float)"
    capturable       "bool False"
    initial_lr       "float 0.015625"
    foreach          "NoneType"
    cpu_optimizer_cls  "class torch.optim.adamw.AdamW"

A tuple and a list are one: optimizers unpack either, and torch's own `set_optimizer_state_dict` with
`full_state_dict=True` makes a list of the tuple that was saved.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from shardproof.observe.numbers import NAMES

SETTING = "setting"
"""The role: `group{i}.{key}`, utf8."""

UNKNOWN = "unknown"
"""The role of state that nobody expects: live `{parameter}.{name}`, utf8, the line of its value; in a checkpoint what
`shardproof.readers.unknown` makes of it."""

RECORDED = frozenset({*NAMES, "betas"})
"""Keys whose numbers are records of their own; here stands their type alone."""

OTHERWISE = frozenset({"params", "step"})
"""Keys that hold no setting: the parameters, whose names are a record of their own, and the count of steps that
TransformerEngine's and apex's FusedAdam keep in the group, which is recorded as `step`."""


class ClassName(str):
    """The name of a class, such as `torch.optim.adamw.AdamW`; of one that is a value in a pickle, all that a reader has
    of it."""


def settings_of(group: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Key → its line, for every key of a param group that is a setting."""
    for key, value in group.items():
        if key not in OTHERWISE:
            yield str(key), line_of(value, with_number=key not in RECORDED)


def line_of(value: Any, *, with_number: bool = True) -> str:
    """A value in one line: its type, and the value itself where it is short and wanted."""
    kind = type(value).__name__
    if isinstance(value, type):
        value = ClassName(f"{value.__module__}.{value.__qualname__}")
    if isinstance(value, ClassName):
        return f"class {value}"
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"tensor {str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(line_of(part, with_number=with_number) for part in value)})"
    if value is None or not isinstance(value, (bool, int, float, str)):
        return kind
    return f"{kind} {value!r}" if with_number else kind


_WITH_VALUE = re.compile(r"(bool|int|float|str) (.+)", re.DOTALL)
_TENSOR = re.compile(r"tensor (\S+) (\(.*\))")


def lines_apart(lines: Sequence[str]) -> list[str]:
    """Lines of one name that differ, as a reader is told: the values where all are of one type, and in words of which
    type each is where that is what differs. A text that is no such line comes in quotes."""
    found = [found for line in lines if (found := _WITH_VALUE.fullmatch(line))]
    kinds = {each[1] for each in found}
    if len(found) < len(lines) or len(kinds) > 1:
        return [_with_type(line) for line in lines]
    values = [each[2] for each in found]
    short = [f"{float(value):.6g}" for value in values] if kinds == {"float"} else values
    return short if len(set(short)) == len(set(values)) else values


def _with_type(line: str) -> str:
    if found := _WITH_VALUE.fullmatch(line):
        return f"the {found[1]} {found[2]}"
    if found := _TENSOR.fullmatch(line):
        return f"a tensor of {found[1]} and the shape {found[2]}"
    return {"NoneType": "None", "float": "a float", "int": "an int"}.get(line, repr(line))
