"""The values that statements of a trainer read or made, as texts: which of them are numbers, and which are rounded."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from math import isclose

from shardproof.trainer.lines.statements import BEHIND, TENSOR, Statement, shown
from shardproof.trainer.values.scaled import NEAR


def numbers_told(ran: Sequence[Statement], kind: int, path: str) -> list[str]:
    """The numbers that some statements read or made under a path; none where a text is among them."""
    texts = texts_told(ran, kind, path)
    return [shown(text) for text in texts] if all(map(is_value, texts)) else []


def texts_told(ran: Sequence[Statement], kind: int, path: str) -> list[str]:
    """The texts of the values that some statements read or made under a path, each text once."""
    return list(dict.fromkeys(told.text for one in ran if one.kind == kind for told in one.values if told.path == path))


def paths_told(ran: Sequence[Statement], kind: int) -> list[str]:
    """The paths under which some statements read or made values, each path once."""
    paths = dict.fromkeys(told.path for one in ran if one.kind == kind for told in one.values)
    return [path for path in paths if not path.startswith(BEHIND)]


def dtype_told(text: str) -> str:
    """The dtype of a tensor that is told by a digest; empty of anything else."""
    found = re.match(r"([a-z]+[0-9]+[a-z0-9_]*) \(", text)
    return found[1] if found else ""


def are_digests(texts: Iterable[str]) -> bool:
    """Whether a text among these has a digest in place of the value."""
    return any(map(dtype_told, texts)) or any("… " in text for text in texts)


def is_number(text: str) -> bool:
    """Whether a text is a number in decimals."""
    return bool(re.fullmatch(r"-?[0-9.]+(e[-+]?[0-9]+)?", text))


_VALUES = re.compile(r"(list|tuple|dict|OrderedDict|set|deque)|[-\[\](), .0-9e+]|True|False|None|'\w+'")


ADDRESS = re.compile(r"(?<![.0-9])[0-9]{13,}(?![.0-9e])")
"""A number as `id` gives one, which no other process has."""


def is_value(text: str) -> bool:
    """Whether a text shows a number, a truth value, a tensor of one number or a container of such."""
    text = text.removeprefix(TENSOR)
    if ADDRESS.search(text):
        return False
    held = "[" in text and not _VALUES.sub("", text)
    return is_number(text) or text in ("True", "False") or held


def alike_but_for_rounding(one: Sequence[str], other: Sequence[str]) -> bool:
    """Whether two rows of numbers are the same but for rounding in single precision."""
    try:
        return len(one) == len(other) and all(isclose(float(mine), float(its), rel_tol=NEAR)
                                              for mine, its in zip(one, other, strict=True))  # fmt: skip
    except ValueError:
        return False


def times_told(count: int) -> str:
    """How often something is done, in words."""
    return "once" if count == 1 else f"{count} times"


def few_of(texts: Sequence[str]) -> str:
    """The first of some texts, as a sentence has them."""
    return ", ".join(texts[:3]) + (", …" if len(texts) > 3 else "")
