"""What the lines of a trainer do that is not alike in two ways to compute the same.

*Verifies*: that the statements ran so. *Does not verify*: that one of them makes what differs.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from shardproof.trainer.lines.edited import edited
from shardproof.trainer.lines.first_apart import SideBySide
from shardproof.trainer.lines.line_values import (
    ADDRESS,
    alike_but_for_rounding,
    are_digests,
    dtype_told,
    few_of,
    is_number,
    is_value,
    numbers_told,
    paths_told,
    texts_told,
    times_told,
)
from shardproof.trainer.lines.lines_apart import followed
from shardproof.trainer.lines.nested import heads_of
from shardproof.trainer.lines.readers import read_by
from shardproof.trainer.lines.statements import (
    BEGINS,
    BEHIND,
    CUT,
    DECIDES,
    DRAWS,
    ENDS,
    HOLDS,
    TENSOR,
    TOUCHES,
    Moment,
    OfRanks,
    Statement,
    Told,
    outlines_of,
    places_that_write,
    rated_of,
    reductions_of,
    reductions_told,
    shown,
    unpacked,
)

MOST_LINES = 12
"""Statements of two ways that a sentence names."""

_TELLING = re.compile(
    r"\.(step|backward|zero_grad|update|scale_?|unscale_|clip_\w+|all_\w+|reduce\w*|div_|mul_)\(|clip_grad|no_sync"
)
_HEADS = ("if ", "elif ", "else", "for ", "while ", "with ", "return", "pass", "try", "assert ")
_JUMPS = ("continue", "break")
_OFTEN = re.compile(r"\.(backward|zero_grad)\(")


class _Line(NamedTuple):
    """What is said of a statement. telling: how much it tells, the least the most. asks: the place of the statement
    that reads what decides about it, which is its own or that of an `if`; None where nothing does. after: what is said
    of that `if`. way: the one in which alone it runs; -1 of both. place: its file and line."""

    telling: int
    text: str
    asks: tuple[str, int] | None
    after: str = ""
    way: int = -1
    place: tuple[str, int] | None = None


OfSessions = tuple[Sequence[Moment], Sequence[Moment]]
"""Of two ways the operations until the one that is looked at, which is the last."""


def of_two_ways(
    one: OfRanks, other: OfRanks, names: tuple[str, str], when: str = "", *, numbers: bool = True,
    moments: OfSessions | None = None, until: tuple[str, int] | None = None, wrong: Collection[str] = (),
) -> str:  # fmt: skip
    """Which statements of an operation, on the first rank, two ways do not run alike, the most telling first: those
    that write gradients, parameters or attributes in one way alone; those that step, reduce or scale and run another
    number of times; those that make other numbers, or read such beside tensors; what else runs in one way alone.

    Args:
        names: of both ways, such as `with accumulate=1`. when: what the operation is called. numbers: whether numbers
            are looked at, which runs have otherwise that are not at the same place of their data. moments: where it is
            to be told who set what is not alike. until: file and line of a statement that is known to make what is not
            alike, from which on numbers follow from it. wrong: the names of what differs: what is read where these are
            written comes before other lines.
    """
    if 0 not in one or 0 not in other:
        return ""
    rows = [unpacked(way[0]) for way in (one, other)]
    if any(row and row[-1].kind == CUT for row in rows):
        return ""
    every = _lines(rows, (one[0], other[0]), names, SideBySide(one, other), numbers=numbers)
    behind = _from(rows[0], until) if until else set[tuple[str, int]]()
    feeds = {place for data, row in zip((one[0], other[0]), rows, strict=True)
             for place in _read_where_written(row, places_that_write(data, wrong))}  # fmt: skip
    lines = sorted((line for line in every if line.place not in behind or line.way >= 0 or not line.telling),
                   key=lambda line: (min(line.telling, 1), line.place not in feeds, line.telling))  # fmt: skip
    if not lines:
        return ""
    more = f"; and {len(lines) - MOST_LINES} more" if len(lines) > MOST_LINES else ""
    said, texts, chosen = set[str](), list[str](), _shared_out(lines)
    for line in chosen:
        again = (
            f", behind {line.asks[0]}:{line.asks[1]} too"
            if line.after and line.after in said and line.asks
            else line.after
        )
        texts.append(f"{line.text}{again}")
        said.add(line.after)
    told = "; ".join(texts)
    sets = _set_by([line.asks for line in chosen if line.asks], rows, names, moments) if moments else ""
    workers = f" {WORKERS}" if any(map(_has_workers, rows)) else ""
    return f"Of the lines {when or 'of this step'}, on rank 0: {told}{more}.{sets}{workers}"


def _read_where_written(row: Sequence[Statement], writers: Collection[tuple[str, int]]) -> set[tuple[str, int]]:
    """File and line of the statements that made what these writers read, as far as it stands under a local name."""
    made: dict[tuple[str, int], tuple[str, int]] = {}
    found = set[tuple[str, int]]()
    for each in row:
        here = (each.file, each.line)
        if each.kind == BEGINS and here in writers:
            found |= {made[told.path, told.owner] for told in each.values if (told.path, told.owner) in made}
        elif each.kind == ENDS and not each.text.startswith(("for ", "while ")):
            made |= {(told.path, told.owner): here for told in each.values if told.path.isidentifier()}
    return found


WORKERS = (
    "What a loader's worker processes run is not looked at: lines that seem to run in one way alone may run there."
)
"""Is said where a loader has processes of its own."""


def _has_workers(row: Sequence[Statement]) -> bool:
    """Whether a statement asks a loader that has processes of its own."""
    return any(told.path.endswith(".num_workers") and told.text != "0" for each in row for told in each.values)


def _from(row: Sequence[Statement], place: tuple[str, int]) -> set[tuple[str, int]]:
    """File and line of the statements that first begin when another one has ended for the first time, and of it."""
    begins = [(each.file, each.line) for each in row if each.kind == BEGINS]
    ends = next((at for at, each in enumerate(row) if each.place == (*place, ENDS)), len(row))
    before = {(each.file, each.line) for each in row[:ends] if each.kind == BEGINS}
    return {each for each in begins if each not in before} | {place}


def _shared_out(lines: Sequence[_Line]) -> list[_Line]:
    """The lines that are named: the first, of which neither way has more than half while the other has some left."""
    chosen, left = list[_Line](), list[_Line]()
    for line in lines:
        own = sum(each.way == line.way for each in chosen)
        full = line.way >= 0 and own >= MOST_LINES // 2 and any(each.way == 1 - line.way for each in lines)
        (left if full else chosen).append(line)
    named = [*chosen[:MOST_LINES], *left[: max(MOST_LINES - len(chosen), 0)]]
    return [line for line in lines if any(line is each for each in named)]


def _lines(
    rows: Sequence[Sequence[Statement]], packed: tuple[bytes, bytes], names: tuple[str, str], seen: SideBySide, *,
    numbers: bool,
) -> Iterator[_Line]:  # fmt: skip
    """What is said of each statement that two ways do not run alike, in the order in which the statements run first."""
    ways = [_by_place(_heads_of_jumps(row)) for row in rows]
    heads, outlines = [*map(heads_of, packed)], [*map(outlines_of, packed)]
    told = set[str]()
    paired = dict(_paired(ways, names, seen) if numbers else ())
    for place in dict.fromkeys((*ways[0], *ways[1])):
        mine, its = (way.get(place, []) for way in ways)
        if place in paired:
            if paired[place]:
                yield _Line(0, paired[place], None)
            continue
        said = (
            _rated(place, packed, names)
            or _not_alike(mine, its, names, seen, numbers=numbers)
            or _reduced(place, packed, names)
        )
        values = (
            said[1].partition(" ")[2].partition(" (")[0] if said and said[1].startswith(("makes `", "reads `")) else ""
        )
        if not said or values in told:
            continue  # what one line makes, the next one reads
        told |= {values} if values else set()
        if not numbers and said[0] > 1:
            continue  # in a run that goes on elsewhere, much runs that is right
        own = (heads[0] if mine else heads[1]).get(place, ()) if not (mine and its) else ()
        head, after, asked_for = _deciding(own, ways, names)
        asks = place if mine and its else (head.file, head.line) if head and after else None
        way = -1 if mine and its else 0 if mine else 1
        alone = way >= 0 and "makes `" in said[1]
        masks = edited(rows[way], outlines[way], place) if alone else ""
        goes = f"{masks}{read_by(rows[way], place)}" if alone else ""
        telling = min(said[0], MASKS) if masks else said[0]
        yield _Line(telling + asked_for, f"{(mine or its)[0].shown()} {said[1]}{goes}", asks, after, way, place)


MASKS = 1
"""How much a statement tells that makes some elements of a tensor one number, as in `_Line`."""


def _paired(
    ways: Sequence[Mapping[tuple[str, int], Sequence[Statement]]], names: tuple[str, str], seen: SideBySide
) -> Iterator[tuple[tuple[str, int], str]]:
    """The statements that run in one way alone and make what the other way makes elsewhere under the same name, each
    with what is said of the two; with nothing where they make the same, or where the other one has said it."""
    last: list[dict[str, tuple[str, int]]] = [
        {path: place for place, ran in way.items() if place not in other for path in paths_told(ran, ENDS)}
        for way, other in (ways, ways[::-1])
    ]
    for path, place in last[0].items():
        if path not in last[1]:
            continue
        both = place, last[1][path]
        rows = [way[at] for way, at in zip(ways, both, strict=True)]
        texts = [texts_told(ran, ENDS, path) for ran in rows]
        touches = any(one.kind == TOUCHES for ran in rows for one in ran)
        if touches or any(len(paths_told(ran, ENDS)) > 1 or ran[0].text.startswith(_HEADS) for ran in rows):
            continue
        told = [f"{ran[0].shown()} makes `{path}` = {few_of([*map(shown, each)])} {name}"
                for ran, each, name in zip(rows, texts, names, strict=True)]  # fmt: skip
        alike = texts[0] == texts[1] or seen.alike(both, ENDS, path)
        yield both[0], "" if alike else ", and ".join(told)
        yield both[1], ""


MOST_SETTERS = 2
"""Of how many values that are not alike it is told who set them."""


def _set_by(
    places: Iterable[tuple[str, int]], rows: Sequence[Sequence[Statement]], names: tuple[str, str], moments: OfSessions
) -> str:
    """Who set what statements read that is not alike, with a space in front."""
    told = dict[str, str]()
    for place in places:
        begins = [next((at for at, each in enumerate(row) if each.place == (*place, BEGINS)), -1) for row in rows]
        if min(begins) < 0:
            continue
        mine, its = (rows[side][at].values for side, at in enumerate(begins))
        for each, second in _reads_apart(mine, its, names):
            ways = f"the run {names[0]}", f"the run {names[1]}"
            same = each.path in told or shown(each.text) == shown(second.text)
            who = "" if same else followed((each, second), ways, moments, 0, (begins[0], begins[1]))
            if who:
                path, other = (one.path.removeprefix(BEHIND) for one in (each, second))
                also = f"`{other}` is " if other != path else ""
                values = f"{shown(each.text)} {names[0]} and {also}{shown(second.text)} {names[1]}"
                told[each.path] = f" There `{path}` is {values}.{who}"
    return "".join([*dict.fromkeys(told.values())][:MOST_SETTERS])


def _reads_apart(mine: Sequence[Told], its: Sequence[Told], names: tuple[str, str]) -> Iterator[tuple[Told, Told]]:
    """The plain values that a statement reads otherwise in two ways, but for the setting that tells them apart; where
    each reads one under a name of its own, those too."""
    known = {each.path: each for each in its}
    both = [(each, known[each.path]) for each in mine if each.path in known]
    apart = ((one, other) for one, other in both if one.text != other.text and one.is_plain)
    yield from (pair for pair in apart if not ADDRESS.search(pair[0].text) and not _is_setting(pair, names))
    alone = [[each for each in way if each.is_plain and each.path not in {one.path for one in others}]
             for way, others in ((mine, its), (its, mine))]  # fmt: skip
    if len(alone[0]) == len(alone[1]) == 1:
        yield alone[0][0], alone[1][0]


def _is_setting(values: Iterable[Told], names: tuple[str, str]) -> bool:
    """Whether two values are those of the axis that two ways are told apart by."""
    return all(one.text.strip("'") == name.partition("=")[2] for one, name in zip(values, names, strict=True))


def _deciding(
    heads: Iterable[Statement], ways: Sequence[Mapping[tuple[str, int], Sequence[Statement]]], names: tuple[str, str]
) -> tuple[Statement | None, str, bool]:
    """Of the heads before a statement that runs in one way alone, the latest first, the one that decides: which reads
    something else in the other way or, if there is none, whose values nobody knows. With what is said of it, and
    whether it asks for the setting that the ways are told apart by."""
    unknown: tuple[Statement | None, str, bool] = None, "", False
    for head in heads:
        chosen = [way.get((head.file, head.line), []) for way in ways]
        outcomes = [texts_told(ran, DECIDES, HOLDS) for ran in chosen]
        if all(outcomes) and {*outcomes[0]} == {*outcomes[1]}:
            continue
        told = _behind(head, chosen, names) if all(chosen) else None
        if told:
            return head, *told
        if all(outcomes) and ["True"] in outcomes and ["False"] in outcomes:
            holds = names[outcomes.index(["True"])]
            return head, f", behind {head.shown()}, which holds {holds} alone", False
        known = any(not each.path.startswith(BEHIND) for ran in chosen for one in ran if one.kind == BEGINS
                    for each in one.values)  # fmt: skip
        if all(chosen) and not known and unknown[0] is None:
            unknown = head, f", behind {head.shown()}", False
    return unknown


def _behind(head: Statement, chosen: Sequence[Sequence[Statement]], names: tuple[str, str]) -> tuple[str, bool] | None:
    """What is said of the `if` or loop behind which a statement runs in one way alone, and whether it asks for the
    setting that the ways are told apart by, so that the statement is there to run in one way; None where both ways read
    the same there.

    Args:
        chosen: what ran of the head in either way.
    """
    for path in dict.fromkeys(told.path for one in chosen[0] if one.kind == BEGINS for told in one.values):
        mine, its = (texts_told(ran, BEGINS, path) for ran in chosen)
        if not path.startswith(BEHIND) and mine and its and mine != its and not are_digests([*mine, *its]):
            values = f"`{path}` is {few_of(mine)} {names[0]} and {few_of(its)} {names[1]}"
            fixed = len(mine) == len(its) == 1 and not (is_number(mine[0]) and is_number(its[0]))
            setting = _is_setting([Told(path, text, 0) for text, *_ in (mine, its)], names)
            return f", behind {head.shown()}, where {values}", fixed or setting
    return None


def _rated(place: tuple[str, int], ran: tuple[bytes, bytes], names: tuple[str, str]) -> tuple[int, str] | None:
    """That a statement sets another learning rate in two ways, or one in one of them alone."""
    told = [few_of(rated_of(data).get(place, [])) for data in ran]
    if told[0] == told[1]:
        return None
    if not all(told):
        rate, way, other = (told[0], *names) if told[0] else (told[1], *names[::-1])
        return 0, f"sets the learning rate to {rate} {way}, and leaves it {other}"
    return 0, f"sets the learning rate to {told[0]} {names[0]} and to {told[1]} {names[1]}"


def _reduced(place: tuple[str, int], ran: tuple[bytes, bytes], names: tuple[str, str]) -> tuple[int, str] | None:
    """That a statement takes part in other reductions in two ways, or not in the same of its turns; nothing of a way
    in which none does, as of one rank."""
    ways = [reductions_of(data) for data in ran]
    mine, its = (way.get(place, []) for way in ways)
    if not all(ways) or not (mine or its) or (len(mine) != len(its) and max(len({*mine}), len({*its})) < 2):
        return None
    told = [reductions_told(often) if often else "no reduction" for often in (mine, its)]
    return (0, f"takes part in {told[0]} {names[0]} and in {told[1]} {names[1]}") if told[0] != told[1] else None


def _heads_of_jumps(row: Sequence[Statement]) -> list[Statement]:
    """Statements, where a jump is told by the one before it, as an `if` that holds."""
    found = list[Statement]()
    for statement in row:
        head = found[-1].text if found and found[-1].text.startswith(("if ", "elif ")) else ""
        jumps = statement.text in _JUMPS and statement.kind == BEGINS and head
        found.append(statement._replace(text=f"{head} {statement.text}") if jumps else statement)
    return found


def _by_place(ran: Sequence[Statement]) -> dict[tuple[str, int], list[Statement]]:
    found: dict[tuple[str, int], list[Statement]] = {}
    for statement in ran:
        if statement.file:
            found.setdefault((statement.file, statement.line), []).append(statement)
    return found


def _not_alike(
    mine: Sequence[Statement], its: Sequence[Statement], names: tuple[str, str], seen: SideBySide, *, numbers: bool
) -> tuple[int, str] | None:
    """How telling it is what two ways do with a statement, the least number the most, and what it is."""
    if not mine or not its:
        return _in_one_alone(mine or its, names[1] if its else names[0])
    counts = [sum(each.kind == BEGINS for each in ran) for ran in (mine, its)]
    writes = [sum(told.path == "parameters" for one in ran for told in one.values if one.kind == TOUCHES)
              for ran in (mine, its)]  # fmt: skip
    if writes[0] != writes[1] and all(writes):
        return 0, f"writes parameters {times_told(writes[0])} {names[0]} and {times_told(writes[1])} {names[1]}"
    if counts[0] != counts[1] and (_TELLING.search(mine[0].text) or DRAWS.search(mine[0].text)):
        often = 3 if _OFTEN.search(mine[0].text) else 2 if DRAWS.search(mine[0].text) else 1
        return often, f"runs {times_told(counts[0])} {names[0]} and {times_told(counts[1])} {names[1]}"
    if not numbers:
        return None
    if counts[0] == counts[1] and (said := _other_tensors(mine, its, names)):
        return said
    of_tensors = any(not told.is_plain or told.text.startswith(TENSOR) for one in mine for told in one.values)
    for kind, verb in ((ENDS, "makes"), (BEGINS, "reads")):
        if (kind == BEGINS and not of_tensors) or (kind == ENDS and mine[0].text.startswith(_HEADS)):
            continue
        for path in paths_told(mine, kind):
            first, second = (numbers_told(ran, kind, path) for ran in (mine, its))
            if not first or not second or set(first) == set(second) or alike_but_for_rounding(first, second):
                continue
            if seen.alike(((mine[0].file, mine[0].line), (its[0].file, its[0].line)), kind, path):
                continue
            if kind == BEGINS or not _is_setting((Told(path, first[0], 0), Told(path, second[0], 0)), names):
                of = "" if kind == BEGINS else _out_of((mine, its), path, names)
                return 2, f"{verb} `{path}` = {few_of(first)} {names[0]} and {few_of(second)} {names[1]}{of}"
    return None


MOST_READ = 5
"""Numbers out of which a line makes one, so that they are told."""


def _out_of(ways: Sequence[Sequence[Statement]], path: str, names: tuple[str, str]) -> str:
    """The numbers that a statement reads where it makes a number that it does not make in the other way; empty where it
    reads none that it does not read there, or many, or makes several, each of which may come of some of them alone."""
    if any(len(paths_told(own, ENDS)) > 1 for own in ways):
        return ""
    for own, other, name in ((ways[1], ways[0], names[1]), (ways[0], ways[1], names[0])):
        known = {*texts_told(other, ENDS, path)}
        read: tuple[Told, ...] = ()
        for statement in own:
            if statement.kind == BEGINS:
                read = statement.values
            new = statement.kind == ENDS and any(
                each.path == path and each.text not in known for each in statement.values
            )
            numbers = [each for each in read
                       if is_number(each.text.removeprefix(TENSOR)) and not each.path.startswith(BEHIND)]  # fmt: skip
            apart = any(each.text not in texts_told(other, BEGINS, each.path) for each in numbers)
            if new and apart and len(numbers) <= MOST_READ:
                return f" ({name} out of {', '.join(f'`{each.path}` = {shown(each.text)}' for each in numbers)})"
    return ""


def _other_tensors(
    mine: Sequence[Statement], its: Sequence[Statement], names: tuple[str, str]
) -> tuple[int, str] | None:
    """That a statement makes tensors of another dtype in two ways, or others of what is the same."""
    for path in paths_told(mine, ENDS):
        kinds = [dict.fromkeys(filter(None, map(dtype_told, texts_told(ran, ENDS, path)))) for ran in (mine, its)]
        if all(kinds) and kinds[0] != kinds[1]:
            return 0, f"makes `{path}` in {', '.join(kinds[0])} {names[0]} and in {', '.join(kinds[1])} {names[1]}"
    reads = [
        {(told.path, told.text) for one in ran if one.kind == BEGINS for told in one.values} for ran in (mine, its)
    ]
    if not reads[0] or reads[0] != reads[1]:
        return None
    for path in paths_told(mine, ENDS):
        made = [texts_told(ran, ENDS, path) for ran in (mine, its)]
        shapes = [{text.partition(")")[0] for text in texts} for texts in made]
        if shapes[0] == shapes[1] and set(made[0]) != set(made[1]) and all(map(dtype_told, (*made[0], *made[1]))):
            ways = f"{names[0]} than {names[1]}"
            few = (
                f" ({few_of([*map(shown, made[0])])} and {few_of([*map(shown, made[1])])})" if "[" in made[0][0] else ""
            )
            return 1, f"makes another `{path}` {ways}, out of what is alike as far as it is looked at{few}"
    return None


def _in_one_alone(ran: Sequence[Statement], name: str) -> tuple[int, str] | None:
    """The same of a statement that runs in one way alone; a head, or a `return`, tells what what it leads to tells."""
    if ran[0].text in _JUMPS or (ran[0].text.startswith(_HEADS) and not _is_jump(ran[0])):
        return None
    writes = any(one.kind == TOUCHES or (one.kind == ENDS and "." in told.path) for one in ran for told in one.values)
    said = f"{'holds' if _is_jump(ran[0]) else 'runs'} {name} alone"
    values = [told for one in ran if one.kind == ENDS for told in one.values if is_value(told.text)]
    kinds = [(told.path, told.text) for one in ran if one.kind == ENDS for told in one.values if dtype_told(told.text)]
    made = f", and makes `{values[0].path}` = {shown(values[0].text)}" if values else ""
    made = made or (f", and makes `{kinds[0][0]}` = {shown(kinds[0][1])}" if kinds else "")
    telling = writes or _TELLING.search(ran[0].text) or _is_jump(ran[0])
    return (0 if telling else 2), f"{said}{made}"


def _is_jump(statement: Statement) -> bool:
    """Whether a statement is an `if` with the jump that it leads to."""
    return statement.text.endswith(_JUMPS) and statement.text not in _JUMPS
