"""What a step made that ranks have differently after it, though they had it alike before.

*Verifies*: that the changes of the ranks are multiples of one another, up to a thousandth. *Does not verify*: why.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from shardproof.observe.logical import Key, Problem, Value
from shardproof.observe.record import Record
from shardproof.observe.settings import SETTING
from shardproof.trainer.values.every_mesh import Name
from shardproof.trainer.values.rounding import FLOATS
from shardproof.trainer.values.scaled import CHANGED, NEAR, change, decays, factor_of

Copies = Mapping[Key, Mapping[int, Value]]
"""Of each value that ranks have differently: rank → its copy, where every rank has a whole one."""


@dataclass(frozen=True)
class Apart:
    """What rank 0 is held against. ranks: rank → by which factor it changed everything that ranks have differently; 1
    where it changed it as rank 0 did."""

    ranks: Mapping[int, float]

    def told(self) -> str:
        """A sentence."""
        still = [rank for rank, factor in self.ranks.items() if factor == 0]
        if still:
            return (
                f"Before this step the ranks had the same, and rank {still[0]} alone leaves it as it is: look at what "
                "makes a rank skip a step, or leaves it without a gradient."
            )
        each = ", ".join(f"{factor:.4g} times on rank {rank}" for rank, factor in self.ranks.items() if rank)
        return (
            f"Before this step the ranks had the same, and they change it in one direction, by other lengths: against "
            f"rank 0, {each}. So the ranks have one gradient, and each scales it by a number of its own: look at the "
            "norm that it is clipped by, to which not all ranks may have added their share, or at a learning rate."
        )


def copies_of(records: Iterable[Record], problems: Iterable[Problem]) -> Copies:
    """The copies of whatever ranks have differently after the first operation where they do."""
    conflicts = {problem.key for problem in problems if problem.kind == "replica_conflict"}
    if not conflicts:
        return {}
    first = min(key.op for key in conflicts)
    found: dict[Key, dict[int, Value]] = {key: {} for key in conflicts if key.op == first}
    for record in records:
        key = Key(record.op, record.where, record.role, record.fqn)
        if key in found and record.size == record.shape and record.dtype in FLOATS:
            found[key][record.rank] = Value(record.dtype, record.shape, record.data)
    return {key: copies for key, copies in found.items() if len(copies) > 1}


def shared_out(records: Iterable[Record], problems: Iterable[Problem]) -> set[Key]:
    """The lists of parameters in param groups that ranks have differently, and of which no two ranks' have one in
    common, as of an optimizer that is shared out by hand: each rank steps parameters of its own."""
    lists: dict[Key, dict[int, set[str]]] = {
        problem.key: {} for problem in problems
        if problem.key.role == SETTING and problem.key.fqn.endswith(".params") and problem.kind == "replica_conflict"
    }  # fmt: skip
    for record in records if lists else ():
        key = Key(record.op, record.where, record.role, record.fqn)
        if key in lists:
            lists[key][record.rank] = {*record.data.decode().split("\n")} - {""}
    return {key for key, own in lists.items() if len(set[str]().union(*own.values())) == sum(map(len, own.values()))}


def alike_among(copies: Mapping[int, Value]) -> str:
    """A sentence about groups of ranks that have the same of a parameter; empty where each has its own, or where those
    of one group are all but one.

    Args:
        copies: rank → what it has.
    """
    groups: dict[bytes, list[int]] = {}
    for rank, value in sorted(copies.items()):
        groups.setdefault(value.data, []).append(rank)
    several = [each for each in groups.values() if len(each) > 1]
    if len(several) < 2:
        return ""
    told = ", and ".join(f"ranks {', '.join(map(str, each))}" for each in several)
    return f"It is the same among {told}: gradients are reduced among those, and not between them."


def apart(copies: Copies, before: Mapping[Name, Value], settings: Mapping[Name, Value]) -> Apart | None:
    """Whether each rank changed what it has differently by one factor against rank 0; None where it did not.

    Args:
        copies: after a step. before: what there was before it. settings: of param groups, after it.
    """
    role = next((role for role in CHANGED if any(key.role == role for key in copies)), "")
    own = {key.fqn: each for key, each in copies.items() if key.role == role}
    ranks = set.intersection(*({*each} for each in own.values())) if own else set[int]()
    if len(ranks) < 2 or 0 not in ranks:
        return None
    by = decays(role, {name: value for name, value in settings.items() if name[0] == SETTING})
    found: dict[int, float] = {}
    for rank in sorted(ranks):
        changes = [
            change(each[0], each[rank], before.get((role, name)), by.get(name, 1.0)) for name, each in own.items()
        ]
        factor = factor_of(changes)
        if factor is None:
            still = all(not each.observed.any() for each in changes)
            if not still:
                return None
            factor = 0.0
        found[rank] = factor
    return Apart(found) if any(abs(factor - 1) > NEAR for factor in found.values()) else None
