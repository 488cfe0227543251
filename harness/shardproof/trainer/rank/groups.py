"""Statements that change settings of param groups: the learning rate, and others, such as a schedule's `initial_lr`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any
from weakref import ReferenceType, ref

import torch

from shardproof.trainer.lines.statements import RATE
from shardproof.trainer.rank.looked_up import told

KEYS = ("initial_lr", "max_lr", "weight_decay", "momentum", "betas", "eps")
"""The settings that are looked at beside the rate: those that schedules keep, and that a load most often leaves."""

Place = tuple[str, int, str]


class Groups:
    """The param groups of the optimizers that lines have named or that were found, and the statements that changed
    them. tell: is told of a statement that sets rates, with all of them as a text."""

    def __init__(self, tell: Callable[[Place, str, str], None]) -> None:
        self._tell = tell
        self._met = list[ReferenceType[torch.optim.Optimizer]]()
        self._rates = list[str]()
        self._seen: dict[tuple[int, int, str], str] = {}
        self._rated: dict[Place, list[tuple[str, str, str]]] = {}
        self._found: dict[Place, list[tuple[str, str, str, str]]] = {}

    def meet(self, optimizer: torch.optim.Optimizer, place: Place | None) -> None:
        """Keep an optimizer that a statement names, and tell its learning rates."""
        if all(each is not optimizer for each in self.optimizers()):
            self._met.append(ref(optimizer))
            self.begin()
            if place:
                self._tell(place, RATE, ", ".join(self._rates))

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers that are known, and that still exist."""
        return [one for reference in self._met if (one := reference()) is not None]

    def know(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Keep the optimizers that were found on the trainer, in place of those that were known before."""
        self._met = [*map(ref, optimizers)]

    def begin(self) -> None:
        """Take the settings of all param groups as they are now."""
        self._rates, self._seen = self._all_rates(), self._settings()

    def look(self, place: Place) -> None:
        """Keep what a statement has changed, of optimizers that were there before."""
        before, seen = self._rates, self._seen
        self.begin()
        if len(before) == len(self._rates) and before != self._rates:
            for number, (old, new) in enumerate(zip(before, self._rates, strict=True)):
                if old != new:
                    which = f" of group {number}" if len(before) > 1 else ""
                    self._rated.setdefault(place, []).append((which, old, new))
            self._tell(place, RATE, ", ".join(self._rates))
        if seen != self._seen:
            self._keep(place, seen)

    def _keep(self, place: Place, before: dict[tuple[int, int, str], str]) -> None:
        """Keep the settings beside rates that a statement changed, of optimizers that it has not made itself."""
        there = {owner for owner, _, _ in before} & {owner for owner, _, _ in self._seen}
        several = len({at for _, at, _ in self._seen}) > 1
        for owner, at, key in sorted(before.keys() | self._seen, key=lambda one: one[1:]):
            old, new = before.get((owner, at, key), ""), self._seen.get((owner, at, key), "")
            if key != "lr" and old != new and owner in there:
                self._found.setdefault(place, []).append((f" of group {at}" * several, key, old, new))

    def taken(self) -> dict[str, list[Any]]:
        """Return what was found since the latest call: of each statement its place, with the group, the old and the new
        value of each rate, and with group, key, old and new value of each other setting."""
        rated, found, self._rated, self._found = self._rated, self._found, {}, {}
        return {"rated": [*map(list, rated.items())], "regrouped": [*map(list, found.items())]}

    def _all_rates(self) -> list[str]:
        groups = (group for one in self.optimizers() for group in vars(one).get("param_groups", ()))
        return [told(group.get("lr")) for group in groups]

    def _settings(self) -> dict[tuple[int, int, str], str]:
        return {
            (id(one), at, key): told(group[key])
            for one in self.optimizers()
            for at, group in enumerate(vars(one).get("param_groups", ()))
            for key in ("lr", *KEYS)
            if key in group
        }
