"""What became of a cure that does not apply to a head, as a value that is stored and shown."""

from __future__ import annotations

from dataclasses import dataclass

REPAIRED, STALE, NOT_SHOWN, LATER = "repaired", "stale", "not shown", "later"


@dataclass(frozen=True)
class CureCheck:
    """What the scenarios of a cure show on a head to which it does not apply.

    * system, version: of the head, as results name them. cure: its id.
    * why: why it does not apply. standing: one of those above, by `shardproof.investigate.stale_cures`.
    * shows: the signature of what failed, or why nothing is shown; of a defect that is repaired what its entry says of
      that, empty where it says nothing yet.
    """

    system: str
    version: str
    cure: str
    why: str
    standing: str
    shows: str = ""
