"""Where two runs of a trainer part, by the statements of its own files (`shardproof.trainer.rank.ran`).

The statements of a step are taken in turn on the same rank of both runs. The first that is another one, that reads
another value, or that makes another value of what is alike, is where they part. Of a value that is read, both runs tell
which statement set it last.

*Verifies*: that the statement ran so, in both. *Does not verify*: that what differs later follows from it, or that it
is the statement that has to change.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import zip_longest
from typing import NamedTuple

from shardproof.trainer.lines.iterators_apart import done_again, made_anew
from shardproof.trainer.lines.nested import called_by
from shardproof.trainer.lines.setters import MOST_BACK, begin_of, came_from, given_by, set_last
from shardproof.trainer.lines.statements import (
    BEGINS,
    BEHIND,
    CUT,
    DECIDES,
    ENDS,
    RATE,
    TOUCHES,
    Moment,
    Name,
    OfRanks,
    Statement,
    Told,
    last_word,
    places_that_write,
    shown,
    unpacked,
)
from shardproof.trainer.values import wording

READ, MADE, TOUCH, TURN, DECIDED = "read", "made", "touched", "turn", "decided"
KINDS = {BEGINS: READ, ENDS: MADE, TOUCHES: TOUCH, DECIDES: DECIDED}
OUT_OF_ALIKE = "out of what is alike, as far as it is looked at,"


class Parting(NamedTuple):
    """Where two runs part. one, other: the statement in either; None where a run has no further one. kind: `turn`, or
    what is told of the statement when it is another value. first, second: the values, of all but a turn. at: the places
    of the statement among those of either run. before: the statement in front of it in the first."""

    kind: str
    one: Statement | None
    other: Statement | None
    first: Told | None = None
    second: Told | None = None
    at: tuple[int, int] = (0, 0)
    before: Statement | None = None


def apart_in(one: OfRanks, other: OfRanks, leave: Iterable[Name] = ()) -> tuple[int, Parting] | None:
    """A rank on which two operations part, and where: the first of those where they part by something else than what
    ranks exchange, if there is one. leave: what is another one whenever it is made."""
    without, found = frozenset(leave), list[tuple[int, Parting]]()
    for rank in sorted(one.keys() & other.keys()):
        mine, its = unpacked(one[rank]), unpacked(other[rank])
        parting = next(partings(mine, its, without), None)
        if parting:
            found.append((rank, _in_generators(parting, mine, its) or parting))
    return min(found, key=lambda each: (_may_follow(each[1]), each[0]), default=None)


_EXCHANGES = re.compile(r"\b(all_\w+|reduce\w*|broadcast\w*|gather\w*|scatter\w*|backward|step)\(")


def _may_follow(parting: Parting) -> bool:
    """Whether what is not alike on a rank may have come from another rank."""
    text = parting.one.text if parting.one else ""
    return parting.kind == TOUCH or (parting.kind == MADE and bool(_EXCHANGES.search(text)))


def begin_apart(one: OfRanks, other: OfRanks) -> bool:
    """Whether a rank has other parameters before the first statement of the one than before that of the other."""
    rows = ((unpacked(one[rank]), unpacked(other[rank])) for rank in one.keys() & other.keys())
    return any(mine and its and mine[0].place == its[0].place and not mine[0].file and mine[0].values != its[0].values
               for mine, its in rows)  # fmt: skip


def never_alike(one: OfRanks, other: OfRanks) -> set[Name]:
    """What is not alike in two operations that should be, as two runs of the same."""
    found = set[Name]()
    for rank in one.keys() & other.keys():
        for parting in partings(unpacked(one[rank]), unpacked(other[rank]), frozenset()):
            if parting.one and parting.first:
                found.add((parting.one.file, parting.one.line, parting.first.path))
    return found


_Rows = Sequence[tuple[int, Statement]]


def partings(one: Sequence[Statement], other: Sequence[Statement], leave: frozenset[Name]) -> Iterator[Parting]:
    """All that is not alike in two rows of statements, until they take another turn. What generators run is left out,
    and so is what the second run does before it comes to where the first begins, such as its launch."""
    rows = [[(at, each) for at, each in enumerate(row) if each.file and not each.of_generator] for row in (one, other)]
    before: Statement | None = None
    along = _from_the_same(*rows)
    launched = along is not rows[1]
    if launched and along is not None:  # whose parameters are not known before its first update
        rows[0], along = ([each for each in row if _is_known(each[1])] for row in (rows[0], along))
    for number, (mine, its) in enumerate(zip_longest(rows[0], along) if along is not None else ()):
        at = (mine[0] if mine else len(one), its[0] if its else len(other))
        if mine and its and mine[1].place == its[1].place:
            if launched and not number:
                continue  # the head of a loop, which a launch enters with other numbers
            known = {told.path: told for told in its[1].values}
            for told in mine[1].values:
                second = known.get(told.path)
                if not second or told.path.startswith(BEHIND):
                    continue  # looked at where what is made of it differs
                if second.text != told.text and (mine[1].file, mine[1].line, told.path) not in leave:
                    yield Parting(KINDS[mine[1].kind], mine[1], its[1], told, second, at, before)
            before = mine[1]
            continue
        both = [each[1] if each else None for each in (mine, its)]
        if any(row and row[-1].kind == CUT for row, each in zip((one, other), both, strict=True) if each is None):
            return
        touches = any(each and each.kind == TOUCHES for each in both)
        yield Parting(TOUCH if touches else TURN, both[0], both[1], at=at, before=before)
        return


def _is_known(statement: Statement) -> bool:
    """Whether what is told of a statement does not depend on which parameters are known."""
    return statement.kind != TOUCHES or any(told.path == RATE for told in statement.values)


def _from_the_same(one: _Rows, other: _Rows) -> _Rows | None:
    """The second row from where it runs along with the first for longest, which it may come to late; None where it
    nowhere does. A row that does from its first statement on is given as it is."""
    if not one or not other or one[0][1].place == other[0][1].place:
        return other

    def along(start: int) -> int:
        pairs = zip(one, other[start:], strict=False)
        return next((at for at, (a, b) in enumerate(pairs) if a[1].place != b[1].place), len(other) - start)

    starts = [at for at, (_, each) in enumerate(other) if each.place == one[0][1].place]
    return other[max(starts, key=lambda at: (along(at), at)) :] if starts else None


def _in_generators(parting: Parting, one: Sequence[Statement], other: Sequence[Statement]) -> Parting | None:
    """For a value that a statement made of what is alike: what a generator read otherwise that ran in it, or what of an
    object that it asks is not alike."""
    if parting.kind != MADE or parting.one is None:
        return None
    windows = list[dict[tuple[str, int, int], int]]()
    starts = [begin_of(row, end) for row, end in zip((one, other), parting.at, strict=True)]
    for row, start, end in zip((one, other), starts, parting.at, strict=True):
        windows.append({row[number].place: number for number in range(start, end) if row[number].of_generator})
    inside = [(windows[0][place], windows[1][place]) for place in windows[0] if place in windows[1]]
    for at in [*inside, (starts[0], starts[1])]:
        known = {told.path: told for told in other[at[1]].values}
        for told in one[at[0]].values if one[at[0]].kind == BEGINS else ():
            second = known.get(told.path)
            if told.is_plain and second and second.text != told.text:
                told, second = (each._replace(path=each.path.removeprefix(BEHIND)) for each in (told, second))
                return Parting(READ, one[at[0]], other[at[1]], told, second, at)
    return None


def behind_which(turn: Parting, rows: tuple[Sequence[Statement], Sequence[Statement]], ways: tuple[str, str]) -> str:
    """What stands in front of where two rows take another turn, with what it reads otherwise."""
    if turn.before is None:
        return ""
    begins = turn.before.file, turn.before.line, BEGINS
    values = [next((row[at].values for at in range(min(end, len(row)) - 1, -1, -1) if row[at].place == begins), ())
              for row, end in zip(rows, turn.at, strict=True)]  # fmt: skip
    known = {told.path: told for told in values[1]}
    pairs = ((told, known[told.path]) for told in values[0] if told.path in known)
    apart = next((pair for pair in pairs if pair[0].text != pair[1].text and pair[0].is_plain), None)
    where = f", where `{apart[0].path.removeprefix(BEHIND)}` is {of_both(apart, ways)}" if apart else ""
    return f", behind {turn.before.shown()}{where}"


def of_both(values: tuple[Told, Told], ways: tuple[str, str]) -> str:
    """Two values, with what a sentence says of the way that has each."""
    return " and ".join(f"{shown(each.text)} {way}" for each, way in zip(values, ways, strict=True))


MOST_PLACES = 3
"""Values that a sentence names which two runs of a statement have alike."""


def goes(turn: Parting, ways: tuple[str, str]) -> str:
    """With which statement either of two ways goes on that take another turn."""
    return " and ".join(
        f"{way} goes on with {statement.shown()}" if statement else f"{way} with no other one of its own"
        for way, statement in zip(ways, (turn.one, turn.other), strict=True)
    )


def followed(
    values: tuple[Told, Told], ways: tuple[str, str], moments: tuple[Sequence[Moment], Sequence[Moment]], rank: int,
    at: tuple[int, int], back: tuple[int, int] = (0, 0), depth: int = 0,
) -> str:  # fmt: skip
    """Who set two values that are not alike, and where that is one statement in both, what it read otherwise, and so
    on; with a space in front.

    Args:
        at: the places of the statements that read them. back: how many operations before the last those are.
    """
    found = [set_last(*each) for each in zip(values, moments, (rank, rank), at, back, strict=True)]
    one, other = found
    if one is None or other is None or one.statement.place != other.statement.place or depth == MOST_BACK:
        each = zip(ways, values, found, moments, strict=True)
        told = "; ".join(f"in {way} {setter.told()}{came_from(value, setter, own, rank)}"
                         for way, value, setter, own in each if setter)  # fmt: skip
        return f" {told[0].upper()}{told[1:]}." if told else ""
    rows = [unpacked(own[-1 - each.moment].ran[rank]) for own, each in zip(moments, (one, other), strict=True)]
    begins = [begin_of(row, setter.at) for row, setter in zip(rows, (one, other), strict=True)]
    reads = [rows[side][begin].values for side, begin in enumerate(begins)]
    known = {told.path: told for told in reads[1]}
    pairs = [(told, known[told.path]) for told in reads[0] if told.path in known and (told.is_plain or draws(told))]
    unlike = [(mine, its) for mine, its in pairs
              if mine.text != its.text and (draws(mine) or shown(mine.text) != shown(its.text))]  # fmt: skip
    apart = min(unlike, key=lambda pair: "… " in pair[0].text, default=None)
    called = called_by([own[-1 - each.moment].ran[rank] for own, each in zip(moments, (one, other), strict=True)],
                       (one.at, other.at), ways)  # fmt: skip
    first, gave = f" {one.statement.shown()} set it last in both{called}", given_by(rows, (one, other), ways)
    if apart is not None and last_word(apart[0].path) == last_word(values[0].path) and depth:
        return ""  # a count that goes on counting
    if apart is None or apart[0].path == values[0].path:
        first += f", in {one.when} and in {other.when}" if one.when != other.when else f", in {one.when}"
        itself = of_both(apart, (f"in {ways[0]}", f"in {ways[1]}")) if apart and apart[0].text != values[0].text else ""
        since = one.since or other.since
        return f"{first}, out of what it was, {itself}{since}.{gave}" if itself else f"{first}{since}.{gave}"
    path = apart[0].path.removeprefix(BEHIND)
    both = of_both(apart, (f"in {ways[0]}", f"in {ways[1]}"))
    which = "a generator whose state is not the same" if draws(apart[0]) else f"which is {both}"
    told = f"{first}, out of `{path}`, {which}.{gave}"
    then = (begins[0], begins[1]), (one.moment, other.moment)
    return told + followed(apart, ways, moments, rank, *then, depth + 1)


def who_set(
    rows: Sequence[Sequence[Statement]],
    place: tuple[str, int],
    path: str,
    names: tuple[str, str],
    moments: tuple[Sequence[Moment], Sequence[Moment]],
) -> str:
    """Who set what a statement reads otherwise in two ways for the first time, with a space in front; empty where that
    is not known.

    Args:
        rows: what ran on the first rank. place: file and line of the statement. path: of what it reads.
    """
    begins = [[at for at, each in enumerate(row) if each.place == (*place, BEGINS)] for row in rows]
    for at in zip(*begins, strict=False):
        one, other = (next((told for told in row[number].values if told.path == path), None)
                      for row, number in zip(rows, at, strict=True))  # fmt: skip
        if one is not None and other is not None and one.text != other.text:
            ways = f"the run {names[0]}", f"the run {names[1]}"
            return followed((one, other), ways, moments, 0, (at[0], at[1]))
    return ""


def draws(told: Told) -> bool:
    """Whether a value is a random generator, of which the text has a digest of the state."""
    return told.text.startswith("generator ")


def wrote_before(
    wrong: Collection[str], moments: tuple[Sequence[Moment], Sequence[Moment]], ways: tuple[str, str], rank: int
) -> str:
    """What a statement that writes wrong parameters in a load reads otherwise than when it wrote them in a step before;
    empty where none did.

    Args:
        wrong: names of parameters. moments: the operations of the run that saves until then, and those of the one that
            loads until its load. ways: what a sentence calls them.
    """
    before, loads = moments
    data = loads[-1].ran.get(rank) if loads else None
    if data is None:
        return ""
    load = unpacked(data)
    for place in places_that_write(data, wrong):
        steps = ((back, op, unpacked(ran[rank])) for back, (op, ran) in enumerate(reversed(before)) if rank in ran)
        found = next(((back, op, row, at) for back, op, row in steps if (at := _begins(row, place))), None)
        if found is None:
            continue
        back, op, row, begins = found
        for mine, its in zip(reversed(begins), reversed(_begins(load, place)), strict=False):
            apart, same = _reads_of((row, load), (mine, its))
            if apart is None:
                continue
            alike = f"the same {' and '.join(f'`{path}`' for path in same[:MOST_PLACES])} and of " if same else ""
            when = wording.at(op)
            who = followed(apart, ways, moments, rank, (mine, its), (back, 0))
            return f"{load[its].shown()} wrote them in {when} too, out of {alike}another `{apart[0].path}`.{who}"
    return ""


def _begins(row: Sequence[Statement], place: tuple[str, int]) -> list[int]:
    """Where in a row the statement of a file and line begins."""
    return [at for at, each in enumerate(row) if each.place == (*place, BEGINS)]


def _reads_of(
    rows: tuple[Sequence[Statement], Sequence[Statement]], at: tuple[int, int]
) -> tuple[tuple[Told, Told] | None, list[str]]:
    """The first value that a statement reads otherwise in two places, and the paths of tensors that it reads alike;
    what it calls a method of, to write it, is left out."""
    statement = rows[0][at[0]]
    own = {told.path for told in statement.values if statement.text.startswith(f"{told.path}.")}
    known = {told.path: told for told in rows[1][at[1]].values}
    both = [(told, known[told.path]) for told in rows[0][at[0]].values if told.path in known and told.path not in own]
    apart = [pair for pair in both if pair[0].text != pair[1].text and not pair[0].path.startswith(BEHIND)]
    same = [one.path for one, other in both if one.text == other.text and not one.is_plain]
    return (apart[0] if apart else None), same


def sentence(
    rank: int, parting: Parting, ways: tuple[str, str], moments: tuple[Sequence[Moment], Sequence[Moment]]
) -> str:
    """Where two runs part, in words.

    Args:
        ways: what a sentence calls them, such as `the run without a break`. moments: of each, the operations of its
            session until the one in which they part.
    """
    on = f" in step {moments[0][-1].op.iteration}, on rank {rank}"
    one, first, second = parting.one, parting.first, parting.second
    if parting.kind == TOUCH:
        before = (unpacked(own[-1].ran[rank])[:at] for own, at in zip(moments, parting.at, strict=True))
        return _of_touch(parting, ways, on, left_out=any(each.of_generator for row in before for each in row))
    if one is None or first is None or second is None:
        rows = unpacked(moments[0][-1].ran[rank]), unpacked(moments[1][-1].ran[rank])
        behind = behind_which(parting, rows, (f"in {ways[0]}", f"in {ways[1]}"))
        anew = _again(parting, rows, moments, rank, ways)
        return f"Line by line, the two part{on}{behind}: {goes(parting, ways)}.{anew}"
    if parting.kind == DECIDED:
        holds, not_so = ways if first.text == "True" else ways[::-1]
        rows = unpacked(moments[0][-1].ran[rank]), unpacked(moments[1][-1].ran[rank])
        read = _read_in_one(parting, rows, ways) or "though what it reads is alike as far as it is looked at"
        anew = _again(parting, rows, moments, rank, ways)
        return (
            f"Line by line, the two part at {one.shown()}{on}: it holds in {holds} and not in {not_so}, {read}.{anew}"
        )
    texts = [each.text.partition("… ")[0] + "…" * ("… " in each.text) for each in (first, second)]
    values = f"{texts[0]} in {ways[0]} and {texts[1]} in {ways[1]}"
    if texts[0] == texts[1] or not (first.is_plain and second.is_plain):
        values = f"not the same in {ways[0]} and in {ways[1]}"
    if parting.kind == MADE:
        rows = unpacked(moments[0][-1].ran[rank]), unpacked(moments[1][-1].ran[rank])
        mine, its = (row[begin_of(row, end) : end] for row, end in zip(rows, parting.at, strict=True))
        anew = made_anew((mine, its), moments[0], rank, ways)
        return (
            f"Line by line, the two part at {one.shown()}{on}: {OUT_OF_ALIKE} it makes `{first.path}`, which is "
            f"{values}.{anew}"
        )
    more = followed((first, second), ways, moments, rank, parting.at)
    more += _not_in_load(second, moments[1], rank)
    return f"Line by line, the two part at {one.shown()}{on}: it reads `{first.path}`, which is {values}.{more}"


def _read_in_one(parting: Parting, rows: tuple[Sequence[Statement], Sequence[Statement]], ways: tuple[str, str]) -> str:
    """The first value that an `if` reads which has a text in one of two runs alone, as None has and an iterator has
    not, as a part of a sentence; empty where there is none."""
    assert parting.one
    begins = parting.one.file, parting.one.line, BEGINS
    values = [next((row[at].values for at in range(end, -1, -1) if row[at].place == begins), ())
              for row, end in zip(rows, parting.at, strict=True)]  # fmt: skip
    for own, its, way, other in zip(values, values[::-1], ways, ways[::-1], strict=True):
        known = {told.path for told in its}
        alone = next((told for told in own if told.path not in known and not told.path.startswith(BEHIND)), None)
        if alone:
            return f"where `{alone.path}` is {shown(alone.text)} in {way}, and something without a text in {other}"
    return ""


def _again(
    turn: Parting, rows: tuple[Sequence[Statement], Sequence[Statement]],
    moments: tuple[Sequence[Moment], Sequence[Moment]], rank: int, ways: tuple[str, str],
) -> str:  # fmt: skip
    """What the second run does once more that the first did in an earlier operation, or enters anew, with a space in
    front."""
    own, rest = (row[at + (turn.kind == DECIDED) :] for row, at in zip(rows, turn.at, strict=True))
    return done_again((own, rest), moments[0], rank, ways) or _entered_anew(turn, rows, moments[1], rank, ways[1])


def _entered_anew(
    turn: Parting, rows: tuple[Sequence[Statement], Sequence[Statement]], moments: Sequence[Moment], rank: int, way: str
) -> str:
    """What a generator reads first that the second run alone enters, as one that is made when it is needed, with a
    space in front."""
    known = {each.place for each in rows[0]}
    for at in range(turn.at[1], len(rows[1])):
        statement = rows[1][at]
        for told in statement.values if statement.of_generator and statement.place not in known else ():
            plain = re.fullmatch(r"-?[0-9.]+", told.text) and "." in told.path and statement.kind == BEGINS
            setter = set_last(told, moments, rank, at) if plain else None
            if setter:
                path = told.path.removeprefix(BEHIND)
                return f" There {statement.shown()} reads `{path}` = {told.text} in {way}; {setter.told()}."
    return ""


def _not_in_load(told: Told, moments: Sequence[Moment], rank: int) -> str:
    """That no statement of a load assigns a value, with a space in front; empty where one does, or nobody loaded."""
    loads = [ran[rank] for op, ran in moments if op.kind == "load" and rank in ran]
    for statement in (each for data in loads for each in unpacked(data) if each.kind == ENDS):
        if any(last_word(made.path) == last_word(told.path) and made.owner == told.owner for made in statement.values):
            return ""
    simple = told.owner > 0 and not re.match(r"(list|tuple|dict|OrderedDict|set|frozenset|deque) \[", told.text)
    return f" No statement of yours in `load` assigns `{last_word(told.path)}`." if loads and simple else ""


def _of_touch(parting: Parting, ways: tuple[str, str], on: str, *, left_out: bool) -> str:
    """That a statement leaves other gradients or parameters, or any in one of two runs alone. left_out: whether lines
    of a generator, which a resumed run enters anew, ran before it and are not looked at."""
    if parting.one and parting.first and parting.second and parting.first.path == RATE:
        rates = of_both((parting.first, parting.second), (f"in {ways[0]}", f"in {ways[1]}"))
        return f"Line by line, {parting.one.shown()} sets {RATE} otherwise{on}, to {rates}."
    if parting.one and parting.first:
        alike = "until there all is alike, as far as it is looked at, and it"
        begins = "lines of a generator before it are not looked at, and it" if left_out else alike
        left = f"leaves other {parting.first.path} in {ways[0]} than in {ways[1]}"
        return f"Line by line, the two part at {parting.one.shown()}{on}: {begins} {left}."
    both = zip((parting.one, parting.other), ways, ways[::-1], strict=True)
    statement, way, other = next(each for each in both if each[0] and each[0].kind == TOUCHES)
    assert statement
    written = " and ".join(told.path for told in statement.values)
    return f"Line by line, the two part at {statement.shown()}{on}: it writes {written} in {way}, and not in {other}."
