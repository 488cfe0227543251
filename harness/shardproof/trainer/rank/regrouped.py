"""Statements that change settings of param groups beside the learning rate, such as a schedule's `initial_lr`."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from shardproof.trainer.rank.looked_up import told

KEYS = ("initial_lr", "max_lr", "weight_decay", "momentum", "betas", "eps")
"""The settings that are looked at: those that schedules keep, and those that a load most often leaves."""

Place = tuple[str, int, str]
Settings = dict[tuple[int, int, str], str]


class Regrouped:
    """What param groups had of these settings at the latest look, and which statements changed them."""

    def __init__(self) -> None:
        self._seen: Settings = {}
        self._found: dict[Place, list[tuple[str, str, str, str]]] = {}

    def begin(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Take the settings of all param groups as they are now."""
        self._seen = _settings(optimizers)

    def look(self, optimizers: Iterable[torch.optim.Optimizer], place: Place) -> None:
        """Keep what a statement has changed, of optimizers that were there before."""
        before, self._seen = self._seen, _settings(optimizers)
        if before == self._seen:
            return
        known, several = {owner for owner, _, _ in before}, len({at for _, at, _ in self._seen}) > 1
        for owner, at, key in sorted(before.keys() | self._seen, key=lambda one: one[1:]):
            old, new = before.get((owner, at, key), ""), self._seen.get((owner, at, key), "")
            if key != "lr" and old != new and owner in known and any(one == owner for one, _, _ in self._seen):
                self._found.setdefault(place, []).append((f" of group {at}" * several, key, old, new))

    def taken(self) -> list[object]:
        """What was found since the latest call: of each statement its place, and group, key, old and new values."""
        found, self._found = self._found, {}
        return [[place, changes] for place, changes in found.items()]


def _settings(optimizers: Iterable[torch.optim.Optimizer]) -> Settings:
    return {
        (id(one), at, key): told(group[key])
        for one in optimizers
        for at, group in enumerate(vars(one).get("param_groups", ()))
        for key in ("lr", *KEYS)
        if key in group
    }
