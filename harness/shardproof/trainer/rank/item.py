"""What a look at a trainer tells its reader, line by line."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Item:
    """One line for the reader: what was found, or could not be read.

    * name: the path from the trainer's attributes, such as `optimizer.optimizer`.
    * kind: module, optimizer, scheduler, scaler, generator, loader, stateful, tensor, value or owner.
    * detail: what it is, such as `AdamW, 2 groups`; of what could not be read, why, and what to do.
    """

    name: str
    kind: str
    detail: str
