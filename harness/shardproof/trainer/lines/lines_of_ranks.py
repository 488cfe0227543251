"""What the lines of a trainer say of ranks that do not do the same, and of parameters that only some lines touch.

*Verifies*: that the statements ran so. *Does not verify*: that a rank should have done what another one did.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from shardproof.trainer.lines.lines_apart import TURN, behind_which, draws, goes, of_both, partings
from shardproof.trainer.lines.statements import (
    BEGINS,
    BEHIND,
    BUFFERS,
    CHANGED,
    CLEARED,
    DRAWS,
    ENDS,
    LASTING,
    MADE,
    TOUCHES,
    WRITTEN,
    Moment,
    OfRanks,
    Statement,
    Touch,
    last_word,
    touched,
    unpacked,
)
from shardproof.trainer.values.telling import times

MOST_PLACES = 3
"""Statements that a sentence names which ranks do not have in common, or which leave some parameters alone."""

_WRITES = {
    WRITTEN: "writes",
    BUFFERS: "writes the buffers",
    CHANGED: "changes the gradient of",
    MADE: "makes the gradient of",
}


def of_ranks(ran: OfRanks) -> str:
    """Where a rank takes another turn than the first one in the same operation; empty where all run the same."""
    first, *others = sorted(ran) or [0]
    for rank in others:
        one, other = unpacked(ran[first]), unpacked(ran[rank])
        turn = next((each for each in partings(one, other, frozenset()) if each.kind == TURN), None)
        if turn:
            ways = f"rank {first}", f"rank {rank}"
            behind = behind_which(turn, (one, other), (f"on rank {first}", f"on rank {rank}"))
            return f"Line by line, ranks part{behind}: {goes(turn, ways)}."
    return ""


def touched_by_ranks(ran: OfRanks) -> str:
    """A sentence about statements that write other parameters, or change other gradients, on one rank than on another;
    empty where all do the same."""
    ranks = sorted(ran)
    told = list[str]()
    by_rank = {rank: {touch.place: touch for touch in touched(ran[rank])} for rank in ranks}
    for place in dict.fromkeys(place for own in by_rank.values() for place in own):
        for what, verb in _WRITES.items():
            names = {rank: _names(by_rank[rank].get(place), what) for rank in ranks}
            if len({tuple(own) for own in names.values()}) > 1:
                each = (f"{_few(own) or 'none'} on rank {rank}" for rank, own in names.items())
                told.append(f"{place} {verb} {' and '.join([*each][:MOST_PLACES])}")
    return f"Of the lines of this step, {'; '.join(told[:MOST_PLACES])}." if told else ""


def scaled_by_ranks(ran: OfRanks) -> str:
    """A sentence about statements that multiply gradients by another number on one rank than on another; empty where
    none does."""
    told = list[str]()
    by_rank = {rank: {touch.place: touch.scaled for touch in touched(own)} for rank, own in sorted(ran.items())}
    for place in dict.fromkeys(place for own in by_rank.values() for place in own):
        factors = {rank: own.get(place, ()) for rank, own in by_rank.items()}
        if all(len(each) == 1 for each in factors.values()) and len({each[0] for each in factors.values()}) > 1:
            each = " and ".join(f"{own[0]:.5g} on rank {rank}" for rank, own in factors.items())
            told.append(f"{place} multiplies gradients by {each}")
    return f"Of the lines of this step, {'; '.join(told[:MOST_PLACES])}." if told else ""


def drawn_by_ranks(moments: Sequence[Moment]) -> str:
    """A sentence about statements that draw otherwise on one rank than on the first, of another seed or generator, or
    of one that nobody tells; empty where none does.

    Args:
        moments: the operations until the one in question.
    """
    told = dict[str, str]()
    for _, ran in moments:
        first, *others = sorted(ran) or [0]
        for rank in others:
            for mine, its in zip(*(_drawing(unpacked(ran[each])) for each in (first, rank)), strict=False):
                if mine.place != its.place:
                    break
                apart = _drawn_apart(mine, its, (first, rank))
                if apart:
                    told.setdefault(mine.shown(), f"{mine.shown()} has {apart}")
    return f"Of the lines that draw, {'; '.join([*told.values()][:MOST_PLACES])}." if told else ""


def made_apart(ran: OfRanks, names: Collection[str]) -> str:
    """A sentence about the first statement that makes one of some tensors otherwise on another rank than on the first,
    with what it reads that is not alike either; empty where none does while both run the same.

    Args:
        names: of the tensors, as parameters are called.
    """
    first, *others = sorted(ran) or [0]
    words = {name.rpartition(".")[2] for name in names}
    for rank in others:
        read: tuple[Statement, Statement] | None = None
        for mine, its in zip(unpacked(ran[first]), unpacked(ran[rank]), strict=False):
            if mine.place != its.place:
                break
            read = (mine, its) if mine.kind == BEGINS else read
            apart = _apart_in(mine, its) if mine.kind == ENDS else []
            path = next((path for path in apart if last_word(path) in words), "")
            if path:
                begun = read is not None and read[0].place[:2] == mine.place[:2]
                out_of = [each for each in _apart_in(*read) if each != path] if read is not None and begun else []
                made = f" out of {' and '.join(f'`{each}`' for each in out_of[:MOST_PLACES])}," if out_of else ""
                return (
                    f"Of the lines of this operation, {mine.shown()} is the first that makes `{path}` otherwise on "
                    f"rank {rank} than on rank {first},{made} and nothing behind it makes them one again."
                )
    return ""


def _apart_in(mine: Statement, its: Statement) -> list[str]:
    """The paths of values that one moment of a statement has otherwise on two ranks."""
    known = {each.path: each.text for each in its.values}
    return [each.path for each in mine.values if known.get(each.path, each.text) != each.text]


def _drawn_apart(mine: Statement, its: Statement, ranks: tuple[int, int]) -> str:
    """Which value a statement that draws has otherwise on a second rank. The rank itself is told of a seed alone."""
    known = {each.path: each for each in its.values}
    for one in mine.values:
        other = known.get(one.path)
        if other is None or other.text == one.text or not (one.is_plain or draws(one)):
            continue
        of_seed = "seed" in mine.text and not one.path.startswith(BEHIND)
        if (one.text, other.text) != tuple(map(str, ranks)) or of_seed:
            values = of_both((one, other), (f"on rank {ranks[0]}", f"on rank {ranks[1]}"))
            which = "another state on each" if draws(one) else values
            return f"`{one.path.removeprefix(BEHIND)}`, which is {which}"
    return ""


def _drawing(row: Sequence[Statement]) -> list[Statement]:
    """The begins and ends of statements that draw random numbers."""
    return [each for each in row if each.kind in (BEGINS, ENDS) and DRAWS.search(each.text)]


def left_alone(ran: bytes, wrong: Collection[str]) -> str:
    """A sentence about statements that change the gradients of some parameters, or write them, and none of others;
    empty where there are none.

    Args:
        wrong: the names of the others.
    """
    told = list[str]()
    for touch in touched(ran):
        for what, verb in ((WRITTEN, "writes"), (CHANGED, "changes the gradient of")):
            names = {*_names(touch, what)}
            if names and not names & {*wrong}:
                told.append(f"{touch.place} {verb} {_few(sorted(names))}")
    if not told or not wrong:
        return ""
    return f"Of the lines of this step, on rank 0: {'; '.join(told[:MOST_PLACES])}; and not {_few(sorted(wrong))}."


def touch_alone(ran: bytes, wrong: Collection[str], right: Collection[str]) -> list[str]:
    """What is said of statements that write, or change the gradients of, just some parameters and none of others.

    Args:
        wrong: the names of the ones. right: of the others.
    """
    told = list[str]()
    for touch in touched(ran):
        for what, verb in ((WRITTEN, "writes"), (CHANGED, "changes the gradient of")):
            names = {*_names(touch, what)}
            if names >= {*wrong} and not names & {*right}:
                often = times(len(touch.done[what]) // len(names))
                told.append(f"{touch.place} {verb} just those that are otherwise ({', '.join(sorted(names))}), {often}")
    return told[:MOST_PLACES]


def written_otherwise(
    one: bytes, other: bytes, wrong: Collection[str], ways: tuple[str, str], moments: Mapping[int, str] | None = None
) -> str:
    """A sentence about statements that write parameters or buffers in one of two ways alone; empty where the same write
    each.

    Args:
        wrong: their names. ways: what a sentence calls them, such as `with accumulate=1`. moments: operation → what a
            sentence calls the moment after it.
    """
    found: dict[tuple[str, ...], list[str]] = {}
    rows = [touched(data) for data in (one, other)]
    for name in wrong:
        often = [{touch.place: sum([*touch.done.get(what, ())].count(name) for what in (WRITTEN, BUFFERS, LASTING))
                  for touch in row} for row in rows]  # fmt: skip
        counts = [{place: number for place, number in own.items() if number} for own in often]
        if counts[0] != counts[1]:
            same = len(counts[0]) == 1 and counts[0].keys() == counts[1].keys()
            lines = [[f"{place}{f', {times(number)}' * same}{_put_back(row, place, name, moments or {})}"
                      for place, number in own.items()] for own, row in zip(counts, rows, strict=True)]  # fmt: skip
            lines[1] = [times(number) for number in counts[1].values()] if same else lines[1]
            found.setdefault(tuple(_few(own) for own in lines), []).append(name)
    return f"In this step, on rank 0, {_by_lines(found, ways)}." if found else ""


def _put_back(row: Sequence[Touch], place: str, name: str, moments: Mapping[int, str]) -> str:
    """That a statement writes what a parameter was some operations ago, with a comma in front; empty where not."""
    ago = next((touch.back[name] for touch in row if touch.place == place and name in touch.back), None)
    return f", which writes what was there {moments[ago]}, and not later" if ago is not None and ago in moments else ""


_DOES = {MADE: "makes", CHANGED: "changes", CLEARED: "clears"}


def gradients_otherwise(one: bytes, other: bytes, ways: tuple[str, str]) -> str:
    """A sentence about statements that run as often in both ways, and make, change or clear the gradients of other
    parameters; empty where there are none. ways: as in `written_otherwise`."""
    rows = [{touch.place: touch for touch in touched(data)} for data in (one, other)]
    often = [Counter(each.shown() for each in unpacked(data) if each.kind == BEGINS) for data in (one, other)]
    told = list[str]()
    # what other lines do to the same gradients, as one that this one calls, is nothing that is done otherwise
    every = [{what: {name for touch in row.values() for name in _names(touch, what)} for what in _DOES} for row in rows]
    for place in dict.fromkeys((*rows[0], *rows[1])):
        if often[0][place] != often[1][place]:
            continue
        for what, verb in _DOES.items():
            names = [{*_names(row.get(place), what)} for row in rows]
            if names[0] != names[1] and every[0][what] != every[1][what]:
                each = [f"{len(own) or 'none'} {way}" for own, way in zip(names, ways, strict=True)]
                told.append(f"{place} {verb} gradients, {' and '.join(each)} ({_few(sorted(names[0] ^ names[1]))})")
    return f"Of the lines of this step, on rank 0: {'; '.join(told[:MOST_PLACES])}." if told else ""


def built_otherwise(one: bytes, other: bytes, wrong: Collection[str], ways: tuple[str, str]) -> str:
    """A sentence about the statements of `build` that set last what two ways begin with otherwise, by its last name;
    empty where these are the same in both, or unknown. Arguments as in `written_otherwise`."""
    found: dict[tuple[str, ...], list[str]] = {}
    rows = [
        {last_word(made.path): each.shown() for each in unpacked(data) if each.kind == ENDS for made in each.values}
        for data in (one, other)
    ]
    for name in wrong:
        places = tuple(row.get(last_word(name), "") for row in rows)
        if places[0] != places[1]:
            found.setdefault(places, []).append(name)
    return f"In `build`, on rank 0, {_by_lines(found, ways)}." if found else ""


def _by_lines(found: Mapping[tuple[str, ...], Sequence[str]], ways: tuple[str, str]) -> str:
    """Names with the lines that write them in either way, those first of one way alone. found: lines → names."""
    told = [
        f"{_few(names)} {'is' if len(names) == 1 else 'are'} written "
        + " and ".join(_by_line(own, way) for own, way in zip(lines, ways, strict=True))
        for lines, names in sorted(found.items(), key=lambda item: all(item[0]))
    ]
    return "; ".join(told[:MOST_PLACES])


def _by_line(line: str, way: str) -> str:
    """By which line something is written in one way, or how often by the same as in the other."""
    return f"{line} {way}" if line and ":" not in line else f"by {line or 'no line of yours'} {way}"


def _names(touch: Touch | None, what: str) -> list[str]:
    return sorted({*touch.done.get(what, ())}) if touch else []


def _few(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_PLACES} more" if len(names) > MOST_PLACES else ""
    return f"{', '.join(names[:MOST_PLACES])}{more}"


def makers_of_gradients(ran: OfRanks) -> str:
    """A sentence on the lines that make gradients on the first rank, with a space in front; empty where there are none,
    or more than a few."""
    found = [touch.place for touch in touched(ran[min(ran)]) if MADE in touch.done] if ran else []
    return f" What makes gradients there: {'; '.join(found)}." if 0 < len(found) <= MOST_PLACES else ""


def changed_between(ran: Sequence[bytes | None], names: tuple[str, str]) -> str:
    """A sentence on lines that change gradients between the backwards of a step, where one way has such and the other
    has not, as a clip in a loop over micro-batches; empty where none does.

    Args:
        ran: what ran on the first rank, in both ways.
    """
    found = [_between_backwards(data) if data is not None else {} for data in ran]
    for own, its, name in zip(found, found[::-1], names, strict=True):
        lines = [f"{place}, {times(often)}" for place, often in own.items() if place not in its]
        if lines:
            return (
                f"Between the backwards of this step gradients are changed {name} alone: {'; '.join(lines)}. What "
                "comes later is added to what that leaves, so that it acts on sums that are not whole."
            )
    return ""


def _between_backwards(data: bytes) -> dict[str, int]:
    """The statements that change gradients which are there behind a backward, and before another one → how often."""
    changes = {touch.place for touch in touched(data) if touch.done.get(CHANGED) and "backward(" not in touch.place}
    found, waiting, behind = dict[str, int](), list[str](), False
    for statement in unpacked(data):
        if statement.kind == BEGINS and "backward(" in statement.text:
            for place in waiting:
                found[place] = found.get(place, 0) + 1
            waiting, behind = [], True
        elif behind and statement.kind == TOUCHES and statement.shown() in changes:
            waiting += [statement.shown()] * any(told.path == "gradients" for told in statement.values)
        elif statement.kind == TOUCHES and any(told.path == "parameters" for told in statement.values):
            waiting, behind = [], False
    return found
