"""What of an observation means the same on every mesh, under names that are the same on every mesh."""

from __future__ import annotations

import re
from collections.abc import Mapping

from shardproof.observe.logical import Value

Values = Mapping[tuple[str, str], Value]
"""(role, name) → value, after one operation."""

OF_A_RANK = ("rng",)
"""Roles that belong to a rank and mean nothing on another mesh."""

ROLES = {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq", "step": "step", "momentum_buffer": "momentum"}
"""What an optimizer keeps beside a parameter: the names that have a role of their own."""

STATE = "state"
"""The role of what it keeps under any other name."""

BESIDE = (*ROLES.values(), STATE)
"""Roles of what an optimizer keeps beside a parameter. What has another shape than the rank's piece of the parameter,
such as a running product of NAdam, each rank records as its own where the parameter is sharded."""

_OWNED = re.compile(r"rank\d+\.(.+)", re.DOTALL)


def of_every_mesh(values: Values) -> tuple[dict[tuple[str, str], Value], set[tuple[str, str]]]:
    """Values without those of one rank alone, and the names of what is left out because ranks have it differently.

    State of an optimizer that every rank with a piece of the parameter has alike counts as one value, under the name
    that it has where the parameter is whole.
    """
    found: dict[tuple[str, str], Value] = {}
    apart: set[tuple[str, str]] = set()
    for (role, name), value in values.items():
        own = _OWNED.fullmatch(name)
        if role in OF_A_RANK or (own and role not in BESIDE):
            continue
        key = (role, own[1] if own else name)
        if found.setdefault(key, value) != value:
            apart.add(key)
    return {key: value for key, value in found.items() if key not in apart}, apart
