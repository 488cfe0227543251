"""Plain numbers that hang on a trainer, or on an object of its own, such as the count of samples in a metric.

They are no state that an arm compares: a step may count and measure what it likes, and no checkpoint need hold it. But
a number that the steps make, and that a load does not bring back, deserves a word (`shardproof.trainer.values.plain`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from shardproof.trainer.rank import kinds
from shardproof.trainer.values.plain import SKIPPED

MOST = 200
"""Numbers of one trainer; more is data."""


def numbers_of(trainer: object, state: Mapping[str, Any]) -> dict[str, str]:
    """Name → number, as its text, of the trainer's own attributes and of those of the objects and containers that
    `state` gives and that are neither a module, an optimizer nor anything else that tells its state by itself. Of a
    module, such as DeepSpeed's engine, counts of skipped steps alone."""
    found = dict(_numbers(trainer, ""))
    for name, value in state.items():
        if kinds.kind_of(value, name) in (kinds.OBJECT, kinds.CONTAINER) and name[:1] != "_":
            found |= dict(_numbers(value, f"{name}."))
    for name, value in kinds.children_of(trainer):
        counts = _numbers(value, f"{name}.") if isinstance(value, torch.nn.Module) else ()
        found |= {counted: number for counted, number in counts if SKIPPED in counted.lower()}
    return found if len(found) <= MOST else {}


def _numbers(holder: object, prefix: str) -> Iterator[tuple[str, str]]:
    for name, value in kinds.children_of(holder):
        if type(value) in (int, float) and name[:1] != "_":
            yield prefix + name, repr(value)
