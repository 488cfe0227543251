"""Learning rates of param groups among what was found on a trainer: lines of type and value, such as `float 0.1`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from shardproof.diff import Difference
from shardproof.observe.logical import Value
from shardproof.trainer.every_mesh import Name

ZERO = {b"float 0.0", b"int 0"}
"""Rates that let nothing move."""

_GROUP = re.compile(r"\bgroup(\d+)\.lr$")


def rates_in(values: Mapping[Name, Value]) -> set[bytes]:
    """The rates of all param groups."""
    return {value.data for (role, name), value in values.items() if role == "setting" and _GROUP.search(name)}


def of_rates(found: Sequence[Difference], observed: Mapping[Name, Value]) -> str:
    """A sentence about a rate that a schedule has right, and the optimizer has not; empty where there is none."""
    for difference in found:
        group = _GROUP.search(difference.key.fqn) if difference.key.role == "setting" else None
        wanted = difference.expected_first[1:-1] if group else ""
        if group and wanted.encode() in _held(observed, group[1]):
            return (
                f"The schedule holds the right rate, {wanted.rpartition(' ')[2]}, and the optimizer has another one: a "
                "schedule's `load_state_dict` writes none into the optimizer, which has to load its own state too."
            )
    return ""


def _held(observed: Mapping[Name, Value], group: str) -> set[bytes]:
    """What schedules say that they gave a param group last (`torch.optim.lr_scheduler.LRScheduler.get_last_lr`)."""
    last = f"_last_lr.{group}"
    return {value.data for (role, name), value in observed.items() if role == "scheduler" and name.endswith(last)}
