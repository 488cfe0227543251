"""Notes on what a step works out for nothing: a value that no line reads, a loop over nothing, a setting that nothing
asks for, a call whose result nobody takes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from shardproof.trainer.lines.statements import (
    BEGINS,
    ENDS,
    Moment,
    Statement,
    Useless,
    is_cut,
    settings_in,
    unpacked,
    useless_of,
)

_OF_STATE = re.compile(r"\b(zip|parameters|named_parameters|buffers|named_buffers|modules|children|param_groups)\b")
"""Words of a loop over parameters and the like, which is seldom meant to go over nothing."""


MOST_READERS = 3
MOST_SETTINGS = 3


def unread(moments: Sequence[Moment]) -> str:
    """A note on the first tensor that every step makes, on the first rank, and that nothing reads, with the last line
    that makes it; empty where there is none.

    A line that reads it and did not run counts as reading, unless another branch of the same `if` ran instead.

    Args:
        moments: the steps of a run.
    """
    found = _Steps(moments)
    unused = [use for use in found.every if use.name and found.is_unread(use)]
    if not unused:
        return ""
    last = [use for use in unused if (use.file, use.name) == (unused[0].file, unused[0].name)][-1]
    lines = [f"{last.file}:{line}" for line, _ in last.readers][:MOST_READERS]
    reads, are = ("reads", "is") if len(lines) == 1 else ("read", "are")
    behind = f": {' and '.join(lines)}, which {reads} it, {are} in a branch that no step takes" if lines else ""
    return f"{found.shown(last)} makes `{last.name}` in every step, and nothing that runs reads it{behind}"


def over_nothing(moments: Sequence[Moment]) -> str:
    """A note on the first loop over parameters or the like, on the first rank, that goes over nothing in every step;
    empty where there is none.

    Args:
        moments: the steps of a run.
    """
    found = _Steps(moments)
    for use in found.every:
        first, last = use.loop
        if first and _OF_STATE.search(use.text) and not found.ran_between(use.file, first, last):
            return f"{found.shown(use)} goes over nothing in every step, so that what stands in it never runs"
    return ""


def dropped(moments: Sequence[Moment]) -> str:
    """A note on the first statement, on the first rank, that in every step calls something for a result which it does
    not take; empty where there is none.

    Args:
        moments: the steps of a run.
    """
    found = _Steps(moments)
    for use in found.every:
        if not use.dropped or not found.may_be_of_a_tensor(use):
            continue
        path, name = use.dropped
        if path:
            return (
                f"{found.shown(use)} leaves `{path}` as it is, and nothing takes what it comes to: look for an "
                f"assignment, or for `{name}_`"
            )
        return f"{found.shown(use)} runs in every step, and nothing takes what it comes to: look for an assignment"
    return ""


def unread_settings(moments: Sequence[Moment]) -> str:
    """A note on the settings that files give, on the first rank, and that none of these files reads; empty where there
    are none, or where nobody knows what is read.

    Args:
        moments: all operations of a run.
    """
    files = [each for moment in moments if moment.ran for each in settings_in(moment.ran[min(moment.ran)]).items()]
    read = set[str]().union(*(names for _, (_, names, _) in files))
    if any(whole for _, (_, _, whole) in files):
        return ""
    lines = {name: f"{file}:{line} (`{text}`)" for file, (given, _, _) in files for line, (name, text) in given
             if name not in read}  # fmt: skip
    if not lines:
        return ""
    more = f" and {len(lines) - MOST_SETTINGS} more" if len(lines) > MOST_SETTINGS else ""
    first = next(iter(lines))
    ask, are = ("a setting", "it has") if len(lines) == 1 else ("settings", "they have")
    told = ", ".join([*lines.values()][:MOST_SETTINGS])
    return (
        f"{told}{more} {'gives' if len(lines) == 1 else 'give'} {ask} that no line of your own files reads (look for "
        f"`.{first}`), so that {are} no effect"
    )


class _Steps:
    """What the first rank ran in some steps. every: of what may be useless, that which ran in each of them; none where
    the lines of a step are not all known."""

    def __init__(self, moments: Sequence[Moment]) -> None:
        packed = [moment.ran[min(moment.ran)] for moment in moments if moment.ran]
        whole = len(packed) == len(moments) and not any(map(is_cut, packed))
        self._rows = [unpacked(data) for data in packed] if whole else []
        self._lines = {(each.file, each.line) for row in self._rows for each in row}
        of_steps: list[Mapping[tuple[str, int], Useless]] = [useless_of(data) for data in packed] if whole else []
        first, *others = of_steps or [{}]
        self.every = [use for place, use in first.items() if all(place in other for other in others)]

    def is_unread(self, use: Useless) -> bool:
        """Whether a statement makes a tensor whenever it runs, and nothing that runs reads it."""
        made = [told for row in self._rows for each in row if _is_end_of(each, use)
                for told in each.values if told.path == use.name]  # fmt: skip
        tensors = bool(made) and not any(told.is_plain for told in made)
        return tensors and all(self._is_passed_over(use.file, *reader) for reader in use.readers)

    def may_be_of_a_tensor(self, use: Useless) -> bool:
        """Whether what a statement calls a method of is a tensor whenever it runs; also of what calls a function."""
        path, _ = use.dropped
        begins = [each for row in self._rows for each in row if (*each.place,) == (use.file, use.line, BEGINS)]
        read = [told for each in begins for told in each.values if told.path == path]
        return not path or (bool(read) and not any(told.is_plain for told in read))

    def _is_passed_over(self, file: str, line: int, instead: Sequence[Sequence[int]]) -> bool:
        """Whether a line does not run while another branch of an `if` around it does."""
        ran = (file, line) in self._lines
        return not ran and any(self.ran_between(file, first, last) for first, last in instead)

    def ran_between(self, file: str, first: int, last: int) -> bool:
        return any(name == file and first <= line <= last for name, line in self._lines)

    def shown(self, use: Useless) -> str:
        """Place and text of the statement, as a sentence has them."""
        return Statement(use.file, use.line, use.text, ENDS, ()).shown()


def _is_end_of(statement: Statement, use: Useless) -> bool:
    return statement.kind == ENDS and (statement.file, statement.line) == (use.file, use.line)
