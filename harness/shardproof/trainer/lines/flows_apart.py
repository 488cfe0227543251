"""The first gradient, in the order of a backward, that arrives otherwise at a value in two ways to compute the same,
though it was alike at values that are nearer to the loss.

Ranks that average gradients, and micro-batches, make all gradients of a backward larger or smaller by one factor, which
is taken from the first that are alike.

*Verifies*: that the gradients arrived so, taken together over all calls and ranks as values are in
`shardproof.trainer.lines.held`. *Does not verify*: what lies between two values that no line of
the trainer's own makes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from shardproof.trainer.lines.held import Values, held
from shardproof.trainer.lines.line_values import dtype_told
from shardproof.trainer.lines.statements import (
    BEGINS,
    ENDS,
    RESULT,
    TENSOR,
    OfRanks,
    Outline,
    Statement,
    flowed,
    is_cut,
    outline_of_number,
    outlines_of,
    unpacked,
)


class _Site(NamedTuple):
    """The statement that made a value, by file and line, and the path of the value."""

    file: str
    line: int
    path: str


def flow_apart(one: OfRanks, other: OfRanks, names: tuple[str, str], near: float) -> str:
    """A sentence on the first gradient that does not arrive alike in two ways; empty where none is known, or none that
    arrives before it is alike.

    Args:
        one, other: what ran in a step in which both make the same values. names: of both ways, such as `with ranks=1`.
            near: the share of a number by which rounding may make it another one.
    """
    if any(is_cut(data) for way in (one, other) for data in way.values()):
        return ""
    ways = _arrived(one), _arrived(other)
    made = _made(one), _made(other)
    for factor in _factors(one, other, ways):
        found = _first(ways, made, names, near, factor)
        if found is not None:
            return f"{_told(found, ways)}{_read_by(found.site, one, other, names)}" if found.how else ""
    return ""


def _factors(one: OfRanks, other: OfRanks, ways: tuple[Mapping[_Site, Values], Mapping[_Site, Values]]) -> list[float]:
    """By which all gradients of the second way may be larger, 1 first: ratios of the numbers of ranks and of calls."""
    calls = [next((len(values.outlines) for values in way.values()), 1) for way in ways]
    ranks = [max(len(way), 1) for way in (one, other)]
    ratios = {1.0, ranks[0] / ranks[1], calls[0] / calls[1]}
    found = {a * b for a in ratios for b in ratios}
    return [1.0, *sorted(found | {1 / each for each in found} - {1.0})]


class _Apart(NamedTuple):
    """A value at which a gradient does not arrive alike, and the last one before it at which one does. how: in what
    way; empty where all are alike, as far as is known."""

    site: _Site
    alike: _Site
    how: str


def _first(
    ways: tuple[Mapping[_Site, Values], Mapping[_Site, Values]], made: tuple[set[_Site], set[_Site]],
    names: tuple[str, str], near: float, factor: float,
) -> _Apart | None:  # fmt: skip
    """The first value at which a gradient does not arrive alike, if all of the second way are so many times as large;
    None where no gradient shows that they are."""
    alike: _Site | None = None
    least = NOISE * max(map(_largest, ways[0].values()), default=0.0)
    for site, values in ways[0].items():
        its = ways[1].get(site)
        if its is None:
            if alike and site in made[1]:
                return _Apart(site, alike, f"none arrives {names[1]}")
            continue
        same = held(values, _scaled(its, 1 / factor), near)
        if same and any(each.shape for each in values.outlines):
            alike = site
        elif same is False and max(_largest(values), _largest(its)) > least:
            return _Apart(site, alike, _how(values, its, names, factor)) if alike else None
    last: _Site | None = None
    for site in ways[1] if alike else ():
        if site in ways[0]:
            last = site
        elif last and site in made[0]:
            return _Apart(site, last, f"none arrives {names[0]}")
    return _Apart(alike, alike, "") if alike else None


NOISE = 1e-5
"""The share of the largest number of any gradient, up to which numbers of another one are rounding: the outline of a
tensor with three dims has sums over the third, and those of a softmax's gradient are zero but for that."""


def _largest(values: Values) -> float:
    return max((float(np.abs(each.numbers).max(initial=0.0)) for each in values.outlines), default=0.0)


def _told(found: _Apart, ways: tuple[Mapping[_Site, Values], ...]) -> str:
    statements = [
        next(way[site].statement for way in ways if site in way).shown() for site in (found.alike, found.site)
    ]
    near, what = (
        "the result" if each.path.startswith(RESULT) else f"`{each.path}`" for each in (found.alike, found.site)
    )
    return (
        f"In the backward, gradients are alike until that of {near}, which {statements[0]} made, and the first that is "
        f"not arrives at {what}, which {statements[1]} made: {found.how}. Look at what lies between these two."
    )


MOST_READERS = 4
"""Statements that a sentence names which read a value."""


def _read_by(site: _Site, one: OfRanks, other: OfRanks, names: tuple[str, str]) -> str:
    """The statements that read a value on the first rank, with a space in front: those of one way alone, if there are
    such, and otherwise all; empty where none does by its name."""
    readers = [_readers(site, way[min(way)]) for way in (one, other)]
    alone = [f"{line} {name}" for own, its, name in zip(readers, readers[::-1], names, strict=True)
             for line in own if line not in its]  # fmt: skip
    told = [*dict.fromkeys(alone or [*readers[0], *readers[1]])][:MOST_READERS]
    which = "lines read it in one way alone" if alone else "lines read it"
    return f" These {which}: {'; '.join(told)}." if told else ""


def _readers(site: _Site, data: bytes) -> list[str]:
    """The statements that read a value before another one makes the same name."""
    found, text = list[str](), ""
    for statement in unpacked(data):
        for each in statement.values:
            if each.path == site.path and statement.kind == ENDS:
                text = each.text if (statement.file, statement.line) == (site.file, site.line) else ""
            elif each.path == site.path and statement.kind == BEGINS and text and each.text == text:
                found.append(statement.shown())
    return found


def _how(mine: Values, its: Values, names: tuple[str, str], factor: float) -> str:
    """In what way a gradient is another one."""
    one, other = (
        np.concatenate([each.numbers.ravel().astype(np.float64) for each in way.outlines]) for way in (mine, its)
    )
    lengths = [float(np.sqrt((way**2).sum())) for way in (one, other)]
    for length, way, against in ((lengths[0], *names), (lengths[1], *names[::-1])):
        if not length:
            return f"it is zero {way}, and not {against}"
    usual = f", where that of others is {factor:.4g} times as long" if factor != 1 else ""
    return f"it is {lengths[1] / lengths[0]:.4g} times as long {names[1]} as {names[0]}{usual}"


def _scaled(values: Values, factor: float) -> Values:
    if factor == 1:
        return values
    with np.errstate(all="ignore"):
        outlines = [Outline(each.shape, each.numbers * np.float32(factor)) for each in values.outlines]
        last = {rank: Outline(each.shape, each.numbers * np.float32(factor)) for rank, each in values.last.items()}
    return Values(values.statement, outlines, last)


def _arrived(ran: OfRanks) -> dict[_Site, Values]:
    """The gradients that arrived at values, in the order of the backward; nothing of a value at which one arrived that
    nobody knows."""
    found, unknown = dict[_Site, Values](), set[_Site]()
    for rank, data in sorted(ran.items()):
        outlines = outlines_of(data)
        for each in flowed(data):
            site, outline = _site(each.made, each.path), outlines.get(each.text) or outline_of_number(each.text)
            if outline is None:
                unknown.add(site)
                continue
            values = found.setdefault(site, Values(each.made, [], {}))
            values.outlines.append(outline)
            values.last[rank] = outline
    return {site: values for site, values in found.items() if site not in unknown}


def _made(ran: OfRanks) -> set[_Site]:
    """The tensors that statements made, but for those at which gradients arrive, or are not looked at."""
    sites = {_site(each, told.path) for data in ran.values() for each in unpacked(data) if each.kind == ENDS
             for told in each.values if told.text.startswith(TENSOR) or dtype_told(told.text)}  # fmt: skip
    return sites - {_site(each.made, each.path) for data in ran.values() for each in flowed(data)}


def _site(made: Statement, path: str) -> _Site:
    return _Site(made.file, made.line, path)
