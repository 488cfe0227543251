"""What `state()` counts, against two ways to compute the same: plain numbers that the steps change.

A number that stays as it was when the trainer was built may say which of the two ways it is, such as a degree of
parallelism. One that the steps change is something that they came to, such as how many tokens were seen.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import isclose

from shardproof.diff import Difference
from shardproof.observe.logical import Value
from shardproof.oracle.extra_state import EXTRA_STATE
from shardproof.trainer.values.every_mesh import Both, Name, is_of_data, rank_of
from shardproof.trainer.values.rounding import HALF, ROUNDING, At

_NUMBER = re.compile(r"(int|float) (\S+)")


def with_counted(both: Both, ways: tuple[At, At], begun: tuple[At, At], *, half: bool, exactly: bool = False) -> Both:
    """What two ways can be compared in, with the plain numbers that steps have changed in both and that are not alike.

    Args:
        ways: what either way holds. begun: what each held at first. half: whether a part computes in bf16 or fp16, so
            that numbers with a fraction may be further apart. exactly: whether nothing may be apart by rounding;
            numbers that are so stay among the settings then, of which a note tells.
    """
    share = HALF if half else ROUNDING
    changed = {name: (mine, its) for name, mine, its in _changed(ways, begun) if mine != its}
    names = {name for name, (mine, its) in changed.items() if not _near(mine, its, share)}
    one, other = (
        {**kept, **{name: way[name] for name in names}} for kept, way in zip((both.one, both.other), ways, strict=True)
    )
    return replace(both, one=one, other=other, settings=both.settings - (names if exactly else changed.keys()))


def _changed(ways: tuple[At, At], begun: tuple[At, At]) -> Iterator[tuple[Name, str, str]]:
    """What changed in both, or was not there at first, but for positions in the data, which count what each way reads
    at a time, and for what every rank counts for itself."""
    for name in ways[0].keys() & ways[1].keys():
        if name[0] != EXTRA_STATE or is_of_data(name) or rank_of(name[1]) >= 0:
            continue
        mine, its = (plain_number(way, name) for way in ways)
        before, its_before = (plain_number(way, name) for way in begun)
        if mine and its and mine != before and its != its_before:
            yield name, mine, its


def plain_number(values: Mapping[Name, Value], name: Name) -> str:
    """A plain number as it is recorded, such as `int 32`; empty for anything else."""
    value = values.get(name)
    text = value.data.decode(errors="replace") if value is not None and value.dtype == "utf8" else ""
    return text if _NUMBER.fullmatch(text) else ""


def _near(mine: str, its: str, share: float) -> bool:
    """Whether two numbers with a fraction are apart by rounding alone; a whole number is not rounded."""
    if "int" in (mine.partition(" ")[0], its.partition(" ")[0]):
        return False
    try:
        return isclose(float(mine.partition(" ")[2]), float(its.partition(" ")[2]), rel_tol=share)
    except ValueError:
        return False


def by_the_axis(ways: Sequence[At], difference: Difference, ratio: float) -> str:
    """The name of a whole number of an object's own that is as often as large in one way as the axis' value is, like a
    count of micro-batches; empty of anything else."""
    name = difference.key.role, difference.key.fqn
    numbers = [plain_number(way, name).removeprefix("int ") for way in ways]
    if name[0] != EXTRA_STATE or not ratio or not all(number.isdecimal() for number in numbers) or numbers[0] == "0":
        return ""
    return name[1] if int(numbers[1]) == int(numbers[0]) * ratio else ""
