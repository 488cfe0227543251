"""The confusion table of diagnosis: the planted mechanism of each fault against the mechanism that the first
explanation names.

A row is a mechanism of the catalogue, which was written down before any rule was made for it. Beside it stand the first
explanations of its faults, most frequent first, with the wrong ones marked. For example:

    what is wrong    of  right  first explanations
    stale-copy       14     13  initial_value 8, stale_copy_won 3, continued_from 2, !other_kernel 1

*Verifies* nothing; it counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from shardproof.faults.catalogue import mechanisms

WRONG, NOTHING = "!", "nothing"
"""What stands before an explanation that does not say what is wrong, and in place of one where there is none."""


class Row(NamedTuple):
    """One mechanism of the catalogue. said: first explanation → how often, the most frequent first."""

    mechanism: str
    said: dict[str, int]

    @property
    def planted(self) -> int:
        return sum(self.said.values())

    @property
    def right(self) -> int:
        return sum(count for name, count in self.said.items() if name in mechanisms()[self.mechanism])

    @property
    def explanations_text(self) -> str:
        """The explanations with their counts, the wrong ones marked."""
        right = mechanisms()[self.mechanism]
        return ", ".join(f"{'' if name in right else WRONG}{name} {count}" for name, count in self.said.items())


def confusion(found: Iterable[tuple[str, str]]) -> list[Row]:
    """The table's rows, in the order of the catalogue's mechanisms.

    Args:
        found: of each scenario with a fault, the fault's mechanism and the first explanation's, empty for none. Faults
            that end the run and have nothing to be explained are left out.
    """
    said: dict[str, Counter[str]] = {}
    for mechanism, explained in found:
        if mechanisms().get(mechanism):
            said.setdefault(mechanism, Counter())[explained or NOTHING] += 1
    ordered = (name for name in mechanisms() if name in said)
    return [Row(name, dict(sorted(said[name].items(), key=lambda item: (-item[1], item[0])))) for name in ordered]


def confusion_lines(rows: Iterable[Row]) -> list[str]:
    """The table as text."""
    rows = list(rows)
    width = max((len(row.mechanism) for row in rows), default=0)
    head = f"{'what is wrong':<{width}}   of  right  first explanations"
    return [
        head,
        *(f"{row.mechanism:<{width}}  {row.planted:>3}  {row.right:>5}  {row.explanations_text}" for row in rows),
    ]
