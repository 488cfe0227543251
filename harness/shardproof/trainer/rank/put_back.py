"""Statements that write an old copy of a parameter back: the values that it had after an earlier operation."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from shardproof.trainer.rank.marks import ZEROS, known

MOST_KEPT = 8
"""Operations after which the marks of parameters are kept."""


class PutBack:
    """The marks that parameters had after the latest operations, and the statements that made one of these again."""

    def __init__(self) -> None:
        self._kept = deque[tuple[int, Mapping[int, object]]](maxlen=MOST_KEPT)
        self._found: dict[tuple[str, int, str], dict[int, int]] = {}

    def look(self, key: int, mark: object, place: tuple[str, int, str]) -> None:
        """Keep that a statement gave a parameter a mark that it had after an operation before the latest."""
        self._found.get(place, {}).pop(key, None)
        every = [(op, marks.get(key)) for op, marks in self._kept]
        op = next((op for op, other in every if other == mark), None)
        if op is not None and known(mark) not in (None, ZEROS, every[-1][1]):
            self._found.setdefault(place, {})[key] = op

    def taken(self, op: int, marks: Mapping[int, object], names: Mapping[int, str]) -> list[object]:
        """What was found since the latest call: of each statement its place, and parameter → operation.

        Args:
            marks: of parameters after the operation, by identity. names: of parameters, by identity.
        """
        found = [
            [place, {names[key]: at for key, at in own.items() if key in names}] for place, own in self._found.items()
        ]
        self._found = {}
        self._kept.append((op, marks))
        return [one for one in found if one[1]]
