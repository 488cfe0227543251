"""The statements of a trainer's own files that ran, as the judge reads them (`shardproof.trainer.rank.ran`)."""

from __future__ import annotations

import json
import re
import zlib
from base64 import b64decode
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shardproof.observe.record import Record
from shardproof.program import Op
from shardproof.trainer.arms import RAN

MOST_OUTLINES = 1200
"""Tensors of an operation of which an outline is kept."""

MOST_TEXT = 90
"""Characters of a statement that a sentence shows."""


class Told(NamedTuple):
    """A value that a statement read or made. path: such as `self.cursor`. text: of the value. owner: of the last name
    in the path, a number."""

    path: str
    text: str
    owner: int

    @property
    def is_plain(self) -> bool:
        """Whether the text shows the value, and is no digest of a tensor."""
        return not _DIGEST.search(self.text)


_DIGEST = re.compile(r"^generator |[a-z0-9_]+ \([0-9, ]*\) (\[[^\]]*\] )?[0-9a-f]{12}")


BEGINS, ENDS, TOUCHES, CUT, DECIDES, CALLS, RETURNS = range(7)
"""What is told of a statement: that it begins, with what it reads; that it ends, with what it made; that it wrote
parameters or gradients, with a digest of all of them; that what ran behind it is not known; of an `if` or a `while`,
whether it holds; that it calls what runs next, and that this returns (`shardproof.trainer.lines.nested`)."""


WRITTEN, MADE, CHANGED, CLEARED = "written", "made", "changed", "cleared"
"""What becomes of a parameter while a statement runs; of a gradient that was not there, that was, and that goes."""

RESULT = "its result"
"""The path of what a `return` comes to."""

BUFFERS = "buffers"
"""The path of what is told of the buffers that a statement wrote, which stand under it by name."""

LASTING = "lasting"
"""What is told of tensors that last beside them, as what an optimizer keeps (`shardproof.trainer.rank.lasting`)."""

HOLDS = "whether it holds"
"""The path of what an `if` or a `while` decides, True or False."""

RATE = "the learning rate"
"""The path of what is told of learning rates that a statement set."""

DRAWS = re.compile(r"\b(shuffle|permutation|randperm|randint|choices?|sample|seed|manual_seed|set_epoch)\(")
"""Statements that draw random numbers, or say from where they are drawn."""

NO_PLACE = ("", 0, "")
"""Stands in front of the first statement of an operation, with what parameters are then, and where the rest is cut."""

GOES_ON = 8
"""Is added to each of them for a statement of a generator, which goes on where it was."""


class Statement(NamedTuple):
    """What is told of a statement that ran, at one moment of it. file, line: where it stands. text: its first line.
    of_generator: whether it is a generator's, which a run that was resumed enters anew."""

    file: str
    line: int
    text: str
    kind: int
    values: tuple[Told, ...]
    of_generator: bool = False

    @property
    def place(self) -> tuple[str, int, int]:
        return self.file, self.line, self.kind

    def shown(self) -> str:
        """Place and text, as a sentence has them."""
        text = self.text if len(self.text) <= MOST_TEXT else f"{self.text[:MOST_TEXT]}…"
        return f"{self.file}:{self.line} (`{text}`)"


class Outline(NamedTuple):
    """The numbers of a tensor of one or two dimensions or, of one with more, their sums over all behind the second; of
    a large one, the sums of its rows. shape: of the tensor. numbers: in the shape of its first two dimensions, or of
    the first and 1."""

    shape: tuple[int, ...]
    numbers: npt.NDArray[np.float32]

    @property
    def is_of_rows(self) -> bool:
        """Whether the numbers are sums of rows."""
        return len(self.shape) > 1 and self.numbers.shape != self.shape[:2]

    @property
    def of_rows(self) -> Outline:
        """The sums of the rows."""
        if len(self.shape) < 2 or self.is_of_rows:
            return self
        return Outline(self.shape, self.numbers.sum(1, keepdims=True, dtype=np.float64).astype(np.float32))


OfRanks = Mapping[int, bytes]
"""Rank → what ran there, packed."""

Name = tuple[str, int, str]
"""File, line and path of a value that is another one whenever it is made, such as a time."""


TENSOR = "tensor "
"""What the text of a tensor with one element begins with, in front of its number."""

BEHIND = "~"
"""What the path of a value begins with that a statement does not name, and that lies behind an object it names."""


class Moment(NamedTuple):
    """An operation, with the statements that ran in it on each rank."""

    op: Op
    ran: OfRanks


def ran_by_op(records: Iterable[Record]) -> dict[int, dict[int, bytes]]:
    """Operation → rank → what ran, packed."""
    found: dict[int, dict[int, bytes]] = {}
    for record in records:
        if record.role == RAN:
            found.setdefault(record.op, {})[record.rank] = record.data
    return found


class Touch(NamedTuple):
    """What became of parameters and their gradients while a statement ran. place: as a sentence has it. done: `written`
    of a parameter, or `made`, `changed` or `cleared` of its gradient → names, each as often as it was done; `buffers`
    or `lasting` → those that were written.
    reduced: in how many reductions the rank takes part meanwhile, for each time that the statement runs. scaled: by
    which numbers gradients were multiplied. rated: of which group it set the learning rate, if there are several, from
    what to what, each time. back: the parameters that it gave the values which they had after an operation before the
    latest → that operation. regrouped: of which group it changed which other setting, from what to what."""

    place: str
    done: Mapping[str, Sequence[str]]
    reduced: Sequence[int] = ()
    scaled: Sequence[float] = ()
    rated: Sequence[tuple[str, str, str]] = ()
    back: Mapping[str, int] = {}
    regrouped: Sequence[tuple[str, str, str, str]] = ()


def touched(data: bytes) -> list[Touch]:
    """The statements that touched parameters or gradients, in the order of their first time, and then those that took
    part in reductions alone."""
    said = _said(data)
    done = {(file, line, text): done for (file, line, text), done in said["touched"] if any(done.values())}
    often = {(file, line, text): often for (file, line, text), often in said["reduced"]}
    scaled = {(file, line, text): factors for (file, line, text), factors in said["scaled"]}
    rated = {(file, line, text): changes for (file, line, text), changes in said["rated"]}
    back = {(file, line, text): own for (file, line, text), own in said["back"]}
    regrouped = {(file, line, text): own for (file, line, text), own in said["regrouped"]}
    scaled = {place: factors for place, factors in scaled.items() if place not in often}  # a sum is no multiple
    return [
        Touch(
            Statement(*place, TOUCHES, ()).shown(), done.get(place, {}), often.get(place, ()), scaled.get(place, ()),
            rated.get(place, ()), back.get(place, {}), regrouped.get(place, ()),
        )
        for place in dict.fromkeys((*done, *often, *rated, *regrouped))
    ]  # fmt: skip


def rated_of(data: bytes) -> dict[tuple[str, int], list[str]]:
    """The learning rates that statements leave, each time that they set one, by file and line of the statement."""
    return {
        (file, line): [f"{after}{which}" for which, _, after in changes]
        for (file, line, _), changes in _said(data)["rated"]
    }


def places_that_write(data: bytes, names: Iterable[str]) -> list[tuple[str, int]]:
    """Return file and line of the statements that write parameters or lasting tensors of the given names."""
    wanted = {*names}
    return [
        (file, line)
        for (file, line, _), done in _said(data)["touched"]
        if wanted & {*done.get(WRITTEN, ()), *done.get(LASTING, ())}
    ]


def reductions_of(data: bytes) -> dict[tuple[str, int], list[int]]:
    """File and line of a statement → in how many reductions a rank takes part, for each time that it runs."""
    return {(file, line): often for (file, line, _), often in _said(data)["reduced"]}


def caught_in(data: bytes) -> list[tuple[Statement, str, Statement]]:
    """Statements that raised an exception which was caught, its name, and the statement that came next."""
    found = list[tuple[Statement, str, Statement]]()
    for raises, error, goes_on in _said(data)["caught"]:
        first, following = (Statement(file, line, text, TOUCHES, ()) for file, line, text in (raises, goes_on))
        found.append((first, error, following))
    return found


class Flowed(NamedTuple):
    """A gradient that arrived at a value in a backward. made: the statement that made the value. path: of the value.
    text: of the gradient; empty where none is looked at, as at a tensor that another statement made too."""

    made: Statement
    path: str
    text: str = ""


def kinds_of(data: bytes) -> list[int]:
    """What is told at each moment, with calls and returns, in the order of `unpacked`, which leaves these out."""
    return [kind % GOES_ON for _, kind, _ in _said(data)["ran"]]


def compounds_of(data: bytes) -> dict[tuple[str, int], tuple[int, bool]]:
    """File and line of the head of a compound statement → its last line, and whether its body ends with a jump."""
    return {(file, line): (end, jumps) for (file, line, _), end, jumps in _said(data).get("compounds", [])}


class Useless(NamedTuple):
    """A statement that may be of no use. name: the local name that it alone assigns to, or empty. readers: lines that
    read the name, each with the branches that may be taken instead. loop: of a `for`, the first and the last line of
    its body. dropped: the path of a tensor and the name of its method that are called for nothing; of a function an
    empty path; empty of all else."""

    file: str
    line: int
    text: str
    name: str
    readers: Sequence[tuple[int, Sequence[Sequence[int]]]]
    loop: Sequence[int]
    dropped: Sequence[str] = ()


def useless_of(data: bytes) -> dict[tuple[str, int], Useless]:
    """File and line of the statements that ran and may be of no use (`shardproof.trainer.rank.unread`)."""
    found = dict[tuple[str, int], Useless]()
    for (file, line, text), made, loop, dropped in _said(data).get("useless", []):
        name, readers = made or ("", [])
        found[file, line] = Useless(file, line, text, name, readers, loop, dropped or ())
    return found


def settings_in(data: bytes) -> dict[str, tuple[list[tuple[int, tuple[str, str]]], list[str], bool]]:
    """File → the settings that it gives, the names that it reads, and whether it may read every name there is, as in
    `shardproof.trainer.rank.settings_read`; of files of which nothing ran before."""
    found: dict[str, tuple[list[tuple[int, tuple[str, str]]], list[str], bool]] = _said(data).get("settings", {})
    return found


def flowed(data: bytes) -> list[Flowed]:
    """The gradients that arrived at values, in the order of the backward, behind values where none is looked at."""
    arrived, unknown = _said(data).get("flowed", ([], []))
    return [Flowed(Statement(file, line, text, ENDS, ()), *more) for (file, line, text), *more in (*unknown, *arrived)]


def outline_of_number(text: str) -> Outline | None:
    """The outline of a tensor with one element; None of any other value."""
    try:
        return Outline((), np.array([[float(text.removeprefix(TENSOR))]], np.float32))
    except ValueError:
        return None


def is_cut(data: bytes) -> bool:
    """Whether later statements of an operation were not looked at."""
    row = unpacked(data)
    return bool(row) and row[-1].kind == CUT


def not_held(ran: OfRanks) -> str:
    """That not all statements of an operation were looked at, or not all of its tensors have an outline, so that later
    ones are not held side by side, as a sentence; empty where all are."""
    cut = [len(unpacked(data)) for data in ran.values() if is_cut(data)]
    if cut:
        return (
            f"Of your own lines the first {min(cut)} moments of this step were looked at, which is as far as it goes: "
            "no values are held side by side, and no line is told that runs in one way alone."
        )
    full = any(len(_said(data).get("outlines", {})) >= MOST_OUTLINES for data in ran.values())
    return (
        f"Lines read and made more than {MOST_OUTLINES} tensors in this step: later ones are not held side by side, "
        "and the first that is not alike may be among them."
    ) if full else ""  # fmt: skip


def outlines_of(data: bytes) -> dict[str, Outline]:
    """Text of a tensor → its outline."""
    return {text: _outline(text, packed) for text, packed in _said(data).get("outlines", {}).items()}


def _outline(text: str, packed: str) -> Outline:
    shape = tuple(map(int, re.findall(r"[0-9]+", text.partition("(")[2].partition(")")[0])))
    numbers = np.frombuffer(b64decode(packed), np.float32)
    return Outline(shape, numbers.reshape(shape[:2] if len(numbers) == prod(shape[:2]) else (shape[0], 1)))


def unevenly_reduced(data: bytes) -> str:
    """A sentence about statements that take part in more reductions one time than another; empty where none does."""
    uneven = [touch for touch in touched(data) if len({*touch.reduced}) > 1]
    told = "; ".join(f"{touch.place} takes part in {reductions_told(touch.reduced)}" for touch in uneven)
    flags = _flags_in_turn(unpacked(data)) if told else []
    return f"Of the lines of this step, on rank 0: {'; '.join([told, *flags])}." if told else ""


def _flags_in_turn(row: Sequence[Statement]) -> list[str]:
    """What is said of statements that set an attribute to another truth value one time than another, and of what runs
    right in front of them."""
    found: dict[tuple[str, str], list[str]] = {}
    before, begun = dict[str, str](), list[Statement]()
    for statement in row:
        if statement.kind == BEGINS:
            begun.append(statement)
        for made in statement.values if statement.kind == ENDS else ():
            if made.text in ("True", "False") and "." in made.path:
                found.setdefault((statement.shown(), made.path), []).append(made.text)
                ahead = next((each for each in reversed(begun) if each.shown() != statement.shown()), None)
                before.setdefault(statement.shown(), f", right behind {ahead.shown()}" if ahead else "")
    return [f"{place} makes `{path}` = {', '.join(values[:MOST_TIMES])}, in turn{before[place]}"
            for (place, path), values in found.items() if len({*values}) > 1]  # fmt: skip


MOST_TIMES = 8
"""Of the times that a statement runs, for how many a sentence says in how many reductions."""


def reductions_told(often: Sequence[int]) -> str:
    """In how many reductions a statement takes part in, each time that it runs."""
    if len({*often}) == 1:
        return f"{often[0]} reduction{'s' * (often[0] != 1)}{' each time' if len(often) > 1 else ''}"
    more = ", …" if len(often) > MOST_TIMES else ""
    return f"{', '.join(map(str, often[:MOST_TIMES]))}{more} reductions, in turn"


@lru_cache(maxsize=512)
def _said(data: bytes) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(zlib.decompress(data))
    return found


@lru_cache(maxsize=512)
def unpacked(data: bytes) -> tuple[Statement, ...]:
    """The statements that ran, in order."""
    said = _said(data)
    places = said["places"]
    found = tuple(
        Statement(file, line, text, kind % GOES_ON, tuple(Told(*one) for one in values), kind >= GOES_ON)
        for (file, line, text), kind, values in ((places[number], kind, values) for number, kind, values in said["ran"])
        if kind % GOES_ON not in (CALLS, RETURNS)
    )
    return (*found, Statement(*NO_PLACE, CUT, ())) if said["cut"] else found


def shown(text: str) -> str:
    """A value as a sentence has it."""
    if found := re.fullmatch(r"([a-z0-9_]+ \([0-9, ]*\)) ?(\[[^\]]*\])? [0-9a-f]{12}", text):
        return f"{found[2]} in {found[1].partition(' ')[0]}" if found[2] else found[1]
    kind, opens, values = text.partition(" [")
    text = f"[{values}" if opens and kind in ("list", "tuple") else text.removeprefix(TENSOR)
    return f"{text.partition('… ')[0]}…" if "… " in text else text


def last_word(name: str) -> str:
    """The last word of a name or a path: `lr` of `group0.lr` and of `group['lr']`."""
    words = re.findall(r"\w+", name)
    return words[-1] if words else name
