"""The first value that the lines of a trainer do not have alike in two ways to compute the same, though these may cut
the data otherwise. Each value that a statement reads or makes is taken together over all of its times in a step, on all
ranks (`shardproof.trainer.lines.held`).

*Verifies*: that a value is alike in none of the senses in which it may be, and that all that was held side by side
before it is in one. *Does not verify*: that the line is wrong; values that have no numbers to look at.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from itertools import islice
from typing import NamedTuple

import numpy as np

from shardproof.trainer.lines.broadcast import spread
from shardproof.trainer.lines.held import (
    CLOSE,
    Numbers,
    Values,
    close_to,
    held,
    held_in_pieces,
    is_sum_of_ranks,
    numbers_of,
    scale_of,
)
from shardproof.trainer.lines.nested import within
from shardproof.trainer.lines.rows_apart import rows_apart
from shardproof.trainer.lines.same_parts import same_parts
from shardproof.trainer.lines.statements import (
    BEGINS,
    BEHIND,
    ENDS,
    RESULT,
    TENSOR,
    Name,
    OfRanks,
    Outline,
    Statement,
    is_cut,
    outline_of_number,
    outlines_of,
    shown,
    unpacked,
)
from shardproof.trainer.values.telling import times

MOST_BEHIND, MOST_LOOKED_AT = 3, 20
"""Values that a sentence names which follow from the first that is not alike, and how many are looked at for it."""

MOST_ALIKE = 3
"""Values that a sentence names which both ways have alike."""


NOBODY = "", 0


class _Site(NamedTuple):
    """Where a value is read or made: file, line, kind and path. caller: file and line of the statement that made the
    call, where both ways make it from the same several places; empty and 0 of all others."""

    file: str
    line: int
    kind: int
    path: str
    caller: tuple[str, int] = NOBODY


_Way = Mapping[_Site, Values]


class _Apart(NamedTuple):
    """A value that two ways do not have alike. one, other: what they have. alike: the paths of tensors that the
    statement reads alike, each with what they have in both ways."""

    site: _Site
    one: Values
    other: Values
    alike: Mapping[str, tuple[Values, Values]]


class Where(NamedTuple):
    """The statements, one of each way, that read or make a value. places: their files and lines. path: of the value.
    reads: whether they read it, or make it. plain: the path of a plain value that they read otherwise where they make
    it; empty where there is none."""

    places: tuple[tuple[str, int], tuple[str, int]]
    path: str
    reads: bool
    plain: str = ""

    @property
    def place(self) -> tuple[str, int] | None:
        """File and line of the statement, if it is the same one in both ways; None otherwise."""
        return self.places[0] if self.places[0] == self.places[1] else None


def first_apart(
    one: OfRanks, other: OfRanks, names: tuple[str, str], near: float = CLOSE, leave: Collection[Name] = (),
    when: str = "this step",
) -> tuple[str, Where | None]:  # fmt: skip
    """A sentence on the first value that two ways do not have alike, with the statements that read or make it; empty,
    and None, where there is none that is known.

    Args:
        one, other: what ran in the step in which they part. names: of both ways, such as `with accumulate=1`. near: the
            share of a number by which rounding may make it another one. leave: what is another one whenever it is made.
            when: the operation.
    """
    if any(is_cut(data) for way in (one, other) for data in way.values()):
        return "", None
    ways = _seen_by_callers(one, other)
    every = _apart(*ways, near, frozenset(leave))
    found = next(every, None)
    if found is None:
        return "", None
    first, second = ((each.statement.file, each.statement.line) for each in (found.one, found.other))
    plain, path = _plain_apart(found, one, other, names)
    rows = rows_apart(found.one, found.other, ways, near)
    told = f"{_sentence(found, names, near, when, plain, rows)}{_trail(found, every, names, near)}{_mixed(*ways, near)}"
    for way, place in zip((one, other), (first, second), strict=True):
        row = unpacked(way[min(way)])
        ends = (at for at, each in enumerate(row) if each.place == (*place, ENDS))
        if larger := next(filter(None, (spread(row, at) for at in ends)), ""):
            told += f" There it {larger}: broadcasting sets them against each other."
            break
    return told, Where((first, second), found.site.path, reads=found.site.kind == BEGINS, plain=path)


_CUTS = re.compile(r"\b(detach_?|no_grad|inference_mode|requires_grad_?|stop_gradient|set_grad_enabled)\b|\.data\b")
"""Statements behind which no gradient flows."""


def value_alike(one: OfRanks, other: OfRanks, names: tuple[str, str], near: float = CLOSE) -> str:
    """A sentence on a value whose backward leaves other gradients though it is alike, and on the lines of one way alone
    that let no gradient through; empty where no such value is known. Arguments as in `first_apart`."""
    ways = _seen(one), _seen(other)
    for site, mine in ways[0].items():
        its = ways[1].get(site)
        name = re.escape(site.path)
        begins = re.search(rf"(^|\(){name}\)?\.backward\(|backward\({name}\)", mine.statement.text)
        if site.kind != BEGINS or its is None or not begins:
            continue
        calls = [len(way.outlines) / len(way.last) for way in (mine, its)]
        if calls[0] != calls[1] or not held(mine, its, near):
            return ""
        return (
            f"`{site.path}` is alike in both ways where {mine.statement.shown()} reads it, and the gradients are not "
            "that come of it: look at what lets them through, at the backward, and at what is done to them behind it."
            f"{' ' * bool(cut := cutting(one, other, names))}{cut}"
        )
    return ""


def cutting(one: OfRanks, other: OfRanks, names: tuple[str, str]) -> str:
    """A sentence on the lines of one way alone that let no gradient through; empty where there is none. Arguments as in
    `first_apart`."""
    cut = [_cutting(way, without) for way, without in ((one, other), (other, one))]
    told = [f"{way}, {' and '.join(lines[:MOST_ALIKE])}" for way, lines in zip(names, cut, strict=True) if lines]
    return f"Lines that run in one way alone, and let no gradient through: {'; '.join(told)}." if told else ""


def _cutting(ran: OfRanks, other: OfRanks) -> list[str]:
    """The statements of one way alone that let no gradient through."""
    known = {each.place for data in other.values() for each in unpacked(data)}
    found = (each for rank in sorted(ran)[:1] for each in unpacked(ran[rank]) if each.kind == BEGINS)
    return list(dict.fromkeys(each.shown() for each in found if each.place not in known and _CUTS.search(each.text)))


def _apart(one: _Way, other: _Way, near: float, leave: frozenset[Name]) -> Iterator[_Apart]:
    """The values that two ways do not have alike, in the order in which they come first in the one."""
    there = {(site.file, site.line) for site in one}, {(site.file, site.line) for site in other}
    last, mine = (_made_alone(way, places) for way, places in ((other, there[0]), (one, there[1])))
    in_pieces = False  # whether a value before is alike piece by piece
    for site, values in one.items():
        its = other.get(last[site.path] if mine.get(site.path) == site and site.path in last else site)
        if its is None or (site.file, site.line, site.path) in leave or _is_added_to(site, one):
            continue
        alike, pieces = held(values, its, near), held_in_pieces(values, its, near)
        in_pieces |= bool(pieces)
        if alike is False or (in_pieces and pieces is False):
            yield _Apart(site, values, its, dict(_read_alike(site, one, other, near)))


def _mixed(one: _Way, other: _Way, near: float) -> str:
    """A sentence on the first statement that reads a number whose sum over all calls and ranks is alike in both ways
    beside one whose mean is, with a space in front; empty where none does."""
    senses: dict[tuple[str, int], dict[str, str]] = {}
    for site, mine in one.items():
        its = other.get(site)
        if site.kind == BEGINS and its is not None and (sense := _sense(mine, its, near)):
            own = senses.setdefault((site.file, site.line), {})
            own.setdefault(sense, site.path)
            if len(own) == 2:
                return (
                    f" There {mine.statement.shown()} reads `{own['sum']}`, of which the sum over all calls and ranks "
                    f"is alike in both ways, beside `{own['mean']}`, of which the mean is."
                )
    return ""


def _sense(mine: Values, its: Values, near: float) -> str:
    """`sum` or `mean`, if just that of a number is alike in two ways; empty otherwise."""
    if any(each.shape for way in (mine, its) for each in way.outlines) or len(mine.outlines) == len(its.outlines):
        return ""
    numbers = [np.concatenate([each.ravel() for each in numbers_of(way.outlines)]) for way in (mine, its)]
    close = partial(close_to, near=near, scale=scale_of(numbers))
    if all(close(each, each[:1]).all() for each in numbers):
        return ""  # such as a count that ranks have summed up already
    totals: list[Numbers] = [each.sum(keepdims=True) for each in numbers]
    means: list[Numbers] = [each.mean(keepdims=True) for each in numbers]
    same = [bool(close(*pair).all()) for pair in (totals, means)]
    return "" if same[0] == same[1] else "sum" if same[0] else "mean"


def _is_added_to(site: _Site, way: _Way) -> bool:
    """Whether a statement makes what it reads, as one that adds to a sum does: what it makes is held side by side."""
    return site.kind == BEGINS and site._replace(kind=ENDS) in way


def _made_alone(way: _Way, there: Collection[tuple[str, int]]) -> dict[str, _Site]:
    """The places where one way alone makes a value last, by its path; that of a call's result only if it is the one."""
    sites = [site for site in way if site.kind == ENDS and (site.file, site.line) not in there]
    returns = {(site.file, site.line) for site in sites if site.path.startswith(RESULT)}
    return {site.path: site for site in sites if len(returns) == 1 or not site.path.startswith(RESULT)}


def _read_alike(site: _Site, one: _Way, other: _Way, near: float) -> Iterator[tuple[str, tuple[Values, Values]]]:
    for read, values in one.items():
        its = other.get(read)
        same = read._replace(path="") == site._replace(path="", kind=BEGINS) and read.path != site.path
        if same and its is not None and held(values, its, near):
            yield read.path, (values, its)


def _seen(ran: OfRanks) -> dict[_Site, Values]:
    """The tensors that statements read and made, in order; of a value that a statement adds to, what it added. Nothing
    of a path under which there was one that nobody knows."""
    return _seen_once(tuple(sorted(ran.items())), frozenset())


def _seen_by_callers(one: OfRanks, other: OfRanks) -> tuple[_Way, _Way]:
    """The same of both ways, where a function that both call from the same several places, as a helper, is told apart
    by these: the first time that it is called says nothing of the others."""
    ran = [tuple(sorted(way.items())) for way in (one, other)]
    callers = [*map(_callers, ran)]
    several = frozenset(place for place, own in callers[0].items() if len(own) > 1 and own == callers[1].get(place))
    return _seen_once(ran[0], several), _seen_once(ran[1], several)


_Ran = tuple[tuple[int, bytes], ...]


@lru_cache(maxsize=8)
def _callers(ran: _Ran) -> Mapping[tuple[str, int], Collection[tuple[str, int]]]:
    """File and line of the statements that ran → those of the statements that called the functions which hold them."""
    found: dict[tuple[str, int], set[tuple[str, int]]] = {}
    for _, data in ran:
        row = unpacked(data)
        for each, where in zip(row, within(data), strict=True):
            found.setdefault((each.file, each.line), set()).add(_place_of(row, where.caller))
    return found


def _place_of(row: Sequence[Statement], at: int) -> tuple[str, int]:
    return (row[at].file, row[at].line) if at >= 0 else NOBODY


@lru_cache(maxsize=8)
def _seen_once(ran: _Ran, several: frozenset[tuple[str, int]]) -> dict[_Site, Values]:
    """The same of ranks in order, for what looks at both ways of a step several times.

    Args:
        several: file and line of the statements that are told apart by who called.
    """
    found: dict[_Site, Values] = {}
    unknown = set[_Site]()
    for rank, data in ran:
        outlines = outlines_of(data)
        read, before = dict[tuple[str, int, str, int], Outline](), dict[_Site, str]()
        row, inside = unpacked(data), within(data) if several else ()
        for at, statement in enumerate(row):
            apart = (statement.file, statement.line) in several
            caller = _place_of(row, inside[at].caller) if apart else NOBODY
            for told in statement.values if statement.kind in (BEGINS, ENDS) and statement.file else ():
                if told.path.startswith(BEHIND) or (told.is_plain and not told.text.startswith(TENSOR)):
                    continue
                site = _Site(statement.file, statement.line, statement.kind, told.path, caller)
                outline = outlines.get(told.text) or outline_of_number(told.text)
                added_to = (site.file, site.line, site.path, told.owner)
                if outline is not None and statement.kind == BEGINS and _adds(statement.text, told.path):
                    read[added_to] = outline
                elif outline is not None and added_to in read:
                    outline = _added(read.pop(added_to), outline)
                if outline is None:
                    unknown.add(site)
                elif statement.kind == ENDS or not _is_loop(statement) or before.get(site) != told.text:
                    values = found.setdefault(site, Values(statement, [], {}))
                    values.outlines.append(outline)
                    values.last[rank] = outline
                before[site] = told.text
    return {site: values for site, values in found.items() if site not in unknown}


def _is_loop(statement: Statement) -> bool:
    """Whether a statement reads the same once for each of its turns, and once when it is left."""
    return statement.text.startswith("for ")


class SideBySide:
    """What two ways read and made in an operation, each as a whole."""

    def __init__(self, one: OfRanks, other: OfRanks) -> None:
        self._ways = _seen(one), _seen(other)

    def alike(self, places: tuple[tuple[str, int], tuple[str, int]], kind: int, path: str) -> bool:
        """Whether two statements, one of each way, are known to make or read the same under a path.

        Args:
            places: their files and lines. kind: `ENDS` or `BEGINS`.
        """
        mine, its = (way.get(_Site(*place, kind, path)) for way, place in zip(self._ways, places, strict=True))
        return mine is not None and its is not None and held(mine, its, CLOSE) is True


def _adds(text: str, path: str) -> bool:
    """Whether a statement adds to a value, as `total = total + part` does."""
    name = re.escape(path)
    return bool(re.match(rf"{name}\s*(\+=|-=|=\s*{name}\s*[-+])", text) or re.match(rf"{name}\s*=.*\+\s*{name}$", text))


def _added(before: Outline, after: Outline) -> Outline:
    """What a statement adds to a value that it reads, as to a sum that begins anew with each micro-batch."""
    if before.shape != after.shape:
        return after
    with np.errstate(all="ignore"):
        return Outline(after.shape, after.numbers - before.numbers)


def _sentence(found: _Apart, names: tuple[str, str], near: float, when: str, plain: str, rows: str) -> str:
    site, one, other, alike = found
    verb = "reads" if site.kind == BEGINS else "gives" if site.path.startswith(RESULT) else "makes"
    if (one.statement.file, one.statement.line) == (other.statement.file, other.statement.line):
        where = f"{one.statement.shown()} {verb} it"
    else:
        where = f"{one.statement.shown()} {verb} it {names[0]} and {other.statement.shown()} {names[1]}"
    told = [f"`{path}`{_longer(both, names)}" for path, both in [*alike.items()][:MOST_ALIKE]]
    fewer = any(_rows_of(mine) != _rows_of(its) and not held_in_pieces(mine, its, near)
                and not is_sum_of_ranks(mine, its, near) for mine, its in alike.values())  # fmt: skip
    reach = " as far as the fewer rows go" * fewer
    out = f" out of what is alike{reach}, {' and '.join(told)}" if told and site.kind == ENDS else ""
    out = f", reading {plain}" if plain else out
    where += f", called by {':'.join(map(str, site.caller))}" if site.caller != NOBODY else ""
    how = f"{_how(one.outlines, other.outlines, names, near)}{rows}{same_parts(one, other, names)}"
    what = f"the first tensor of your own lines that is not alike, over all calls and ranks of {when}{how}"
    if site.path.startswith(RESULT) and one.statement.shown() == other.statement.shown():
        number = site.path.removeprefix(RESULT)
        made = f", made{out}" if out.startswith(" out") else out
        return f"{f'Result{number}' if number else 'The result'} of {one.statement.shown()} is {what}{made}."
    return f"`{site.path}` is {what}: {where}{out}."


def _plain_apart(found: _Apart, one: OfRanks, other: OfRanks, names: tuple[str, str]) -> tuple[str, str]:
    """The plain values that a statement reads otherwise where it makes another one, on the first rank, and the path of
    them; both empty where it reads none, or is another statement in either way."""
    mine, its = ((each.statement.file, each.statement.line, BEGINS) for each in (found.one, found.other))
    if mine != its or found.site.kind == BEGINS or not one or not other:
        return "", ""
    values: list[dict[str, list[str]]] = [{}, {}]
    for own, ran in zip(values, (one, other), strict=True):
        for statement in unpacked(ran[min(ran)]):
            for told in statement.values if statement.place == mine else ():
                if told.is_plain and not told.text.startswith(TENSOR) and not told.path.startswith(BEHIND):
                    own.setdefault(told.path, []).append(shown(told.text))
    path = next((path for path in values[0] if {*values[0][path]} != {*values[1].get(path, [])}), "")
    each = [f"`{path}` = {', '.join(own[path][:MOST_ALIKE])}{', …' * (len(own[path]) > MOST_ALIKE)} {name}"
            for own, name in zip(values, names, strict=True) if own.get(path)]  # fmt: skip
    return (" and ".join(each), path) if path and len(each) == len(names) else ("", "")


def _trail(first: _Apart, others: Iterator[_Apart], names: tuple[str, str], near: float) -> str:
    """What is made otherwise after the first value that is, each once, with a space in front."""
    told, known = list[str](), {first.site.path}
    for each in islice((one for one in others if one.site.kind == ENDS), MOST_LOOKED_AT):
        if each.site.path not in known and not each.site.path.startswith(RESULT) and len(told) < MOST_BEHIND:
            known.add(each.site.path)
            how = _how(each.one.outlines, each.other.outlines, names, near)
            told.append(f"`{each.site.path}`{how} ({each.one.statement.shown()})")
    return f" Behind it follow {'; '.join(told)}." if told else ""


def _longer(both: tuple[Values, Values], names: tuple[str, str]) -> str:
    """That a value that is alike has more rows, or longer ones, in one way, in brackets; empty where it has not."""
    rows = [*map(_rows_of, both)]
    if is_sum_of_ranks(*both, CLOSE):
        return " (as the sum over ranks)"
    if rows[0] != rows[1] and held_in_pieces(*both, CLOSE):
        return f" (each of its rows in {max(rows) // min(rows)} pieces {names[rows[1] > rows[0]]})"
    if rows[0] != rows[1] and len({each.shape for values in both for each in values.outlines}) == 1:
        return f" ({times(len(both[0].outlines))} {names[0]} and {times(len(both[1].outlines))} {names[1]})"
    if rows[0] != rows[1]:
        return f" (in {rows[0]} rows {names[0]} and {rows[1]} {names[1]})"
    lengths = [[each.shape[1] for each in values.outlines if len(each.shape) > 1] for values in both]
    if not all(lengths) or (max(lengths[0]) == max(lengths[1]) and min(lengths[0]) == min(lengths[1])):
        return ""
    longer = sum(lengths[1]) / len(lengths[1]) > sum(lengths[0]) / len(lengths[0])
    flat = [np.concatenate([each.numbers[each.numbers != 0] for each in values.outlines]) for values in both]
    zeros = len(flat[0]) == len(flat[1])
    return f" (whose rows {'are filled up with zeros' if zeros else 'go on, and not with zeros,'} {names[longer]})"


def _rows_of(values: Values) -> int:
    """How many rows there are of a value in all, those of numbers left out."""
    return sum(each.shape[0] for each in values.outlines if each.shape)


def _how(mine: Sequence[Outline], its: Sequence[Outline], names: tuple[str, str], near: float) -> str:
    """In what way a value is another one, with a comma in front; empty where there are no words for it."""
    if not mine[0].shape:
        told = [
            f"{_few(way, together=len(mine) != len(its))} {name}" for way, name in zip((mine, its), names, strict=True)
        ]
        return f", {' and '.join(told)}"
    shapes = [[each.shape for each in way] for way in (mine, its)]
    if shapes[0] != shapes[1] or len({shape[1:] for shape in shapes[0]}) > 1:
        return ""
    ways = [[each.of_rows for each in way] if any(one.is_of_rows for one in way) else way for way in (mine, its)]
    one, other = (np.concatenate([each.numbers.reshape(len(each.numbers), -1) for each in way]) for way in ways)
    with np.errstate(all="ignore"):
        ratios = other / one
    for by, each in (("column", ratios), ("row", ratios.T)):
        constant = bool(np.isfinite(each).all()) and np.allclose(each, each[0], rtol=max(near, CLOSE))
        if each.shape[1] <= MOST_SHOWN and constant:
            factors = [f"{factor + 0.0:.4g}" for factor in each[0]]
            if len({*factors}) == 1:
                return f", {factors[0]} times as large {names[1]}"
            return f", {', '.join(factors)} times as large {names[1]}, {by} by {by}"
    apart = int((~close_to(one, other, near, scale_of([one, other]))).any(axis=1).sum())
    again = [len(rows) - len(np.unique(rows, axis=0)) for rows in (one, other)]
    twice = [f", of which {number} come again {name}" for number, name in zip(again, names, strict=True) if number]
    what = "elements" if all(len(each.shape) == 1 for each in mine) else "rows"
    some = f", in {apart} of {len(one)} {what}" if 0 < apart < len(one) else ""
    return f"{some}{twice[0]}" if len(twice) == 1 and len(one) > 1 and one.shape[1] > 1 else some


MOST_SHOWN = 8
"""Numbers that a sentence shows."""


def _few(values: Sequence[Outline], *, together: bool) -> str:
    """The first of some numbers. together: whether their sum is told, too."""
    numbers = [float(each.numbers[0, 0]) for each in values]
    told = ", ".join(f"{number:.6g}" for number in numbers[:MOST_ALIKE]) + ", …" * (len(numbers) > MOST_ALIKE)
    return f"{told} (together {sum(numbers):.6g})" if together and len(numbers) > 1 else told
