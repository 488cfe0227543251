"""Param groups that a load gives each other's settings, as where they are put back by their place in a list.

*Verifies*: that all that is wrong in a group is what another one should have. *Does not verify*: what put it there.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from shardproof.diff import Difference
from shardproof.trainer.values.every_mesh import Values

_GROUP = re.compile(r"(?P<whose>.*?\.?)group(?P<number>[0-9]+)\.(?P<setting>.+)")


def exchanged(found: Sequence[Difference], saved: Values, after: Values) -> str:
    """A sentence on groups that have the settings of others after a load; empty where that is not all that is wrong in
    them.

    Args:
        found: the differences. saved: what should be there. after: what is.
    """
    wrong: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for one in found:
        if group := _GROUP.fullmatch(one.key.fqn):
            wrong.setdefault((group["whose"], group["number"]), []).append((one.key.role, group["setting"]))
    told = list[str]()
    for (whose, number), settings in wrong.items():
        others = [other for owner, other in wrong if owner == whose and other != number]
        mine = [after.get((role, f"{whose}group{number}.{name}")) for role, name in settings]
        same = [
            other for other in others
            if [saved.get((role, f"{whose}group{other}.{name}")) for role, name in settings] == mine
        ]  # fmt: skip
        if len(same) != 1 or None in mine:
            return ""
        told.append(f"{whose}group{number} those of {whose}group{same[0]}")
    if len(told) < 2:
        return ""
    return (
        f"Groups have the settings of others: {' and '.join(told[:4])}. Look at the order in which they are put back."
    )
