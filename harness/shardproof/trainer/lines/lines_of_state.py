"""What the lines of a save or of a load set, and what they decide.

*Verifies*: that the statements ran so, on the first rank. *Does not verify*: that one of them makes what differs.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence

from shardproof.trainer.lines.line_values import few_of, is_number
from shardproof.trainer.lines.setters import begin_of, set_last, with_values
from shardproof.trainer.lines.statements import (
    BEGINS,
    BEHIND,
    BUFFERS,
    DECIDES,
    ENDS,
    WRITTEN,
    Moment,
    OfRanks,
    Statement,
    Touch,
    last_word,
    shown,
    touched,
    unpacked,
)

MOST_SETS, MOST_MADE = 4, 6
"""Statements of a load that a sentence names, and those that it names of numbers."""


def of_setting(ran: OfRanks, wrong: Mapping[str, str], parameters: Iterable[str], what: str = "load") -> str:
    """Which statements of a load set what is wrong after it, or which of a save set what it changes, in order, on the
    first rank; empty where none is known.

    Args:
        wrong: names of plain values that are wrong, such as `schedule.last_epoch`, each with the number that it is;
            empty where it is none. What a line has set to another number was replaced later. parameters: of parameters.
        what: `load` or `save`.
    """
    if not ran:
        return ""
    names, rank = set(parameters), min(ran)
    last: dict[str, set[str]] = {}
    for name, number in wrong.items():
        last.setdefault(last_word(name), set()).add(number)
    told: dict[tuple[str, str], list[str]] = {}
    writes: dict[str, dict[str, None]] = {}
    for statement in unpacked(ran[rank]):
        for made in statement.values if statement.kind == ENDS else ():
            if last_word(made.path) in last and made.is_plain:
                line = f"{statement.shown()} sets `{made.path}` to"
                told.setdefault((line, last_word(made.path)), []).append(made.text)
            elif last_word(made.path) in last:
                writes.setdefault(statement.shown(), {}).setdefault(f"`{made.path}`")
    lines = [f"{line} {', then '.join(values)}" for (line, word), values in told.items()
             if not _replaced(values[-1], last[word])]  # fmt: skip
    lines += [f"{place} writes {' and '.join([*paths][:MOST_SETS])}" for place, paths in writes.items()]
    for touch in touched(ran[rank]):
        own = list(
            dict.fromkeys(name for what in (WRITTEN, BUFFERS) for name in touch.done.get(what, ()) if name in names)
        )
        if own:
            lines.append(f"{touch.place} writes {own[0] if len(own) == 1 else f'{len(own)} of them'}")
    lines = [*_regrouped(touched(ran[rank]), last), *lines]
    if not lines:
        return ""
    more = f"; and {len(lines) - MOST_SETS} more" if len(lines) > MOST_SETS else ""
    wrongly = "is wrong after it" if what == "load" else "it changes"
    return f"In `{what}`, of what {wrongly}: {'; then '.join(lines[:MOST_SETS])}{more}."


def _replaced(text: str, numbers: Collection[str]) -> bool:
    """Whether what a line has set is another number than all that are there now."""
    return is_number(text) and all(map(is_number, numbers)) and float(text) not in map(float, numbers)


def _regrouped(touches: Iterable[Touch], last: Mapping[str, Collection[str]]) -> list[str]:
    """The lines that set settings of param groups. last: the last names of those to tell, with the numbers
    that are there now."""
    return [
        f"{touch.place} sets {key}{which}{f' from {old}' if old else ', which was not there,'} to {new or 'nothing'}"
        for touch in touches
        for which, key, old, new in touch.regrouped
        if key in last
    ] + [
        f"{touch.place} sets the learning rate{which} from {old} to {new}"
        for touch in touches
        for which, old, new in touch.rated[-1:]
        if "lr" in last and not _replaced(new, last["lr"])
    ]


def that_assign(ran: OfRanks, paths: Iterable[str]) -> str:
    """The first statement of an operation, on the first rank, that assigns to something of the last name of a path, as
    it stands in a sentence; empty where none does."""
    words = [re.escape(path.rpartition(".")[2]) for path in paths]
    names = [re.compile(pattern.format(word)) for pattern in (r"\.{}\s*=[^=]", r"\b{}\b[^=(]*=[^=]") for word in words]
    statements = [each for each in (unpacked(ran[min(ran)]) if ran else ()) if each.kind == BEGINS]
    return next((each.shown() for name in names for each in statements if name.search(each.text)), "")


def numbers_made(ran: OfRanks, what: str) -> str:
    """The plain numbers to which lines of a save or a load assign a name, on the first rank, as those that a place in
    the data is worked out from; empty where there are none.

    Args:
        what: `load` or `save`.
    """
    told: dict[str, str] = {}
    for statement in unpacked(ran[min(ran)]) if ran else ():
        if statement.kind == ENDS and not statement.text.startswith(("for ", "while ", "with ")):
            own = (each for each in statement.values if is_number(each.text) and not each.path.startswith(BEHIND))
            told |= {f"{statement.shown()} makes `{each.path}`": each.text for each in own}
    lines = [f"{line} = {text}" for line, text in told.items()]
    more = f"; and {len(lines) - MOST_MADE} more" if len(lines) > MOST_MADE else ""
    return f"In `{what}`, {'; '.join(lines[:MOST_MADE])}{more}." if lines else ""


def that_decide(ran: OfRanks, what: str) -> str:
    """The statements of a save or a load, on the first rank, that come to a truth value or to nothing, or ask for one;
    empty where there is none. what: `save` or `load`."""
    told: dict[str, str] = {}
    for statement in unpacked(ran[min(ran)]) if ran else ():
        heads = statement.text.startswith(("if ", "elif "))
        if statement.text.startswith(("for ", "while ")):
            continue
        for value in statement.values if (statement.kind == BEGINS) == heads else ():
            if value.text in ("True", "False", "None") and not value.path.startswith(BEHIND):
                verb = "reads" if heads else "makes"
                told.setdefault(f"{statement.shown()} {verb} `{value.path}`", f" = {value.text}")
    lines = [f"{line}{value}" for line, value in told.items()]
    return f"In `{what}`, {'; '.join(lines[:MOST_SETS])}." if lines else ""


_LOOKS_FOR = re.compile(r"\bin\b|\b(exists|is_file|is_dir|hasattr|get|startswith|endswith|match|search)\(")
"""Conditions that look for a name, a file or a part of a text."""


def never_holds(ran: OfRanks, what: str) -> str:
    """The conditions of a save or a load that look for something and never found it, with the texts that they read;
    empty where there is none.

    Args:
        what: `save` or `load`.
    """
    asked: dict[str, dict[str, list[str]]] = {}
    held = set[str]()
    for statement in unpacked(ran[min(ran)]) if ran else ():
        if statement.kind == DECIDES and statement.values[0].text == "True":
            held.add(statement.shown())
        if not statement.text.startswith(("if ", "elif ")):
            continue
        texts = [each for each in statement.values if each.text[:1] in ("'", '"') and not each.path.startswith(BEHIND)]
        if texts or _LOOKS_FOR.search(statement.text):
            own = asked.setdefault(statement.shown(), {})
            for each in texts:
                own.setdefault(each.path, []).append(shown(each.text))
    told = [f"{line}{_with_texts(own)}" for line, own in asked.items() if line not in held]
    told.sort(key=lambda line: not _LOOKS_FOR.search(line.partition("`, which")[0]))
    return f"In `{what}`, this never holds: {'; '.join(told[:MOST_SETS])}." if told else ""


def _with_texts(read: Mapping[str, list[str]]) -> str:
    told = " and ".join(f"`{path}` = {few_of([*dict.fromkeys(texts)])}" for path, texts in read.items())
    return f", which read {told}" if told else ""


_SEEDS = re.compile(r"\b(set_rng_state\w*|manual_seed\w*|set_state|setstate|seed|seed_everything)\(")


def that_seeds(ran: OfRanks, what: str) -> str:
    """The statements of a save or a load, on the rank with most of them, that set or seed a random generator.

    Args:
        what: `save` or `load`.
    """
    every = [
        [each.shown() for each in unpacked(data) if each.kind == BEGINS and _SEEDS.search(each.text)]
        for data in ran.values()
    ]
    lines = [*dict.fromkeys(sorted(every, key=lambda own: -len(own))[0])] if every else []
    return f"In `{what}`, of random states: {'; '.join(lines[:MOST_SETS])}." if lines else ""


def never_hold(moments: Sequence[Sequence[Moment]], names: Sequence[str]) -> str:
    """The conditions of a step that hold in neither of two ways, on the first rank, of which one may skip what scales
    or reduces a gradient, and who set the flag that one reads; of those that one way alone comes to, the ones that read
    a flag. Empty where there is none. What holds in every so many steps, by a remainder, is left out.

    Args:
        moments: the operations of both ways until the step, which is the last. names: of the ways.
    """
    ways = [_failing(own) for own in moments]
    both = [line for line in ways[0] if ways[0][line] is not None and ways[1].get(line) is not None]
    told = [f"{line}{flag}" for line in both for flag in [ways[0][line] or ways[1][line]] if flag or "%" not in line]
    for own, other, name in zip(ways, ways[::-1], names, strict=True):
        alone = ((line, flag) for line, flag in own.items() if flag and line not in other)
        told += [f"{line}, to which a run comes {name} alone{flag}" for line, flag in alone]
    return f"In neither way this holds in the step: {'; '.join(told[:MOST_SETS])}." if told else ""


def _failing(moments: Sequence[Moment]) -> dict[str, str | None]:
    """What is said of the flag that each condition of the last operation reads, on the first rank; None of one that
    holds sometimes, there or in an operation before."""
    ran = moments[-1].ran if moments else {}
    rank = min(ran, default=0)
    row = unpacked(ran[rank]) if ran else ()
    before = (each for moment in moments[:-1] for each in unpacked(moment.ran.get(rank, ())))
    found: dict[str, str | None] = dict.fromkeys(each.shown() for each in before if _holds(each))
    for at, statement in enumerate(row):
        if statement.kind != DECIDES:
            continue
        line = statement.shown()
        if _holds(statement) or found.get(line, "") is None:
            found[line] = None
        elif line not in found:
            found[line] = _flag(moments, rank, at)
    return found


def _holds(statement: Statement) -> bool:
    return statement.kind == DECIDES and statement.values[0].text == "True"


def _flag(moments: Sequence[Moment], rank: int, number: int) -> str:
    """Which flag a condition reads that is False, and who set it, with a comma in front; empty where it reads none.

    Args:
        number: the place of the condition in the last operation.
    """
    row = unpacked(moments[-1].ran[rank])
    at = begin_of(row, number)
    read = row[at].values if row[at].kind == BEGINS else ()
    flag = next((told for told in read if told.text == "False" and not told.path.startswith(BEHIND)), None)
    setter = set_last(flag, moments, rank, at) if flag else None
    return f", where `{flag.path}` is False, and {setter.told()}" if flag and setter else ""


def that_ended(ran: OfRanks) -> str:
    """The last loop of a run that ended early which did not go on, or else the last condition that did not hold, on the
    first rank, with the plain values that it read, as a sentence with a space in front; empty where none is known."""
    row = unpacked(ran[min(ran)]) if ran else ()
    failed = [at for at, each in enumerate(row) if each.kind == DECIDES and each.values[0].text == "False"]
    loops = [at for at in failed if row[at].text.startswith("while ")]
    if not failed:
        return ""
    begin = row[begin_of(row, (loops or failed)[-1])]
    return f" The last condition that did not hold: {with_values(begin)}." if begin.kind == BEGINS else ""
