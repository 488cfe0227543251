"""The content that the page of a failure and `shardproof explain` share, before rendering.

The order is that of a reader's questions: what went wrong, what does that do to training, where is it, how do I see it
myself; then the program beside the library's calls, and the differences in groups, of which the first is the one to
look at. `templates/failure.html` draws it, `shardproof.report.failure_text` prints it.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from shardproof.diff import Difference, as_numbers, ulp_distance
from shardproof.export.case import shrink_of
from shardproof.export.page import Filing, filing_of
from shardproof.issues.known_issues import KnownIssues
from shardproof.issues.upstream_links import short
from shardproof.layout import flat_index
from shardproof.observe.assemble import as_bits
from shardproof.observe.logical import Value
from shardproof.program import is_arms
from shardproof.report.bits import Part, differing, meaning_of, parts_of
from shardproof.report.groups import COPIES, Operation, Tensor, first_picture, grouped
from shardproof.result import Result
from shardproof.tensor_pictures import FAILURE_BYTES, Elements, Picture, Side, unpack_elements
from shardproof.wording.effects import effect_of
from shardproof.wording.error_place import Place, place_of
from shardproof.wording.titles import title

SHORT_DIGITS = 5
"""Digits of a distance above which it is told as a power of two."""

TENSORS_SHOWN = 16
"""How many tensors of a role a page lists; `shardproof explain` has all of them."""

TENSORS_IN_FULL = 3
"""Of how many of these, after the first operation that differs, bits and histogram can be read without a script."""


@dataclass(frozen=True)
class Command:
    """A command to copy. name: what it does, in a word or two. text: the command. what: what comes of it."""

    name: str
    text: str
    what: str


@dataclass(frozen=True)
class BitRow:
    """One side of an element. parts: its bits, empty where that side has nothing. number, hexadecimal: as text.
    meaning: what these do not say."""

    side: str
    parts: tuple[Part, ...]
    number: str
    hexadecimal: str
    meaning: str


@dataclass(frozen=True)
class Element:
    """The first deviating element of a tensor, bit by bit. index: one entry a dim. distance: how far apart both sides
    are."""

    index: tuple[int, ...]
    rows: tuple[BitRow, ...]
    distance: str


@dataclass(frozen=True)
class FoundState:
    """What a trainer's state is made of, a line for each object.

    * read: what is compared. hidden: what cannot be read, so that no verdict says anything about it.
    * measured: what a step does, a line for each part of it.
    * others: anything else that the ranks had to say of it.
    """

    read: tuple[str, ...]
    hidden: tuple[str, ...]
    measured: tuple[str, ...]
    others: tuple[str, ...]

    @classmethod
    def of(cls, lines: Iterable[str]) -> FoundState:
        """The state that `Result.state` describes, where each line begins with `found: `, `hidden: ` or `measured: `.
        What arms tell too (`keys: `), and what is told of cells together (`ends: `, `reads: `), is left out."""
        kinds = ("found", "hidden", "measured", "keys", "ends", "reads", "")
        parts: dict[str, list[str]] = {kind: [] for kind in kinds}
        for line in lines:
            kind, colon, told = line.partition(": ")
            own = colon and kind in parts
            parts[kind if own else ""].append(told if own else line)
        return cls(*(tuple(parts[kind]) for kind in ("found", "hidden", "measured", "")))


@dataclass(frozen=True)
class FailurePage:
    """* title, effect: sentences for a person. place: where an error was raised.
    * known: ids of the known issues that it is, or looks like, joined by `+`; empty for none.
    * operations: what differs, in groups. elements: what was kept of it, and the same as base64 for a page's script.
    """

    result: Result
    title: str
    effect: str
    place: Place | None
    known: str
    filing: Filing
    commands: tuple[Command, ...]
    operations: tuple[Operation, ...]
    elements: Elements
    packed: str

    @property
    def state(self) -> FoundState:
        """Of a trainer's cell, the state that was found on the trainer."""
        return FoundState.of(self.result.state)

    @property
    def first(self) -> Tensor | None:
        """The tensor to look at first."""
        return first_picture(self.operations)


def failure_page(result: Result, issues: KnownIssues, place: str = "", again: str = "") -> FailurePage:
    """Collects the content of a failure's page from a result. `place` and `again` hold the options that a printed
    command needs after the id, as `Report.place` and `Report.again` give them."""
    known = result.known_issue or issues.match(result) or ""
    filing = filing_of(result, known or None)
    elements = unpack_elements(result.elements)
    return FailurePage(
        result=result,
        title=title(result),
        effect=(filing.description.harm if filing.description else "") or effect_of(result),
        place=place_of(result.error) if result.error else None,
        known=known,
        filing=filing,
        commands=tuple(commands(result, filing, place, again)),
        operations=grouped(result, elements),
        elements=elements,
        packed=base64.b64encode(result.elements).decode() if elements.pictures else "",
    )


def commands(result: Result, filing: Filing, place: str, again: str = "") -> Iterator[Command]:
    """What a reader can do about a failure. A command that runs something needs `again` too; explaining does not."""
    options = place + again
    yield Command("Replay", result.replay + options, "runs it again in fresh processes and prints what it shows")
    if result.verdict.is_failure:
        yield Command("Shrink", shrink_of(f"{result.id}{options}"), "the simplest that fails alike")
        if filing.calls:
            cured = " --cured" if filing.description and filing.description.patch else ""
            text = f"shardproof export {result.id}{options}{cured}"
            yield Command("Export", text, "a script of the library's own calls, and the text of an issue")
        elif is_arms(result.scenario.program):
            text = f"shardproof export {result.id}{options}"
            yield Command("Export", text, "the trainer's file with a script that runs it without shardproof")
    yield Command("Explain", f"shardproof explain {result.id}{place}", "this page on a terminal")


def element_of(tensor: Tensor) -> Element | None:
    """The first deviating element of a tensor, bit by bit; None where its elements were not kept."""
    picture = tensor.picture
    if picture is None:
        return None
    difference = next((d for d in tensor.differences if d.first_index), tensor.first)
    side = picture.expected or picture.observed
    if side is None:
        return None
    index = difference.first_index if len(difference.first_index) == len(side.shape) else (0,) * len(side.shape)
    at = flat_index(side.shape, index) - picture.first
    rows = tuple(_row(name, one, at) for name, one in (("expected", picture.expected), ("observed", picture.observed)))
    return Element(index, rows, _apart(picture, at))


def _row(name: str, side: Side | None, at: int) -> BitRow:
    if side is None or not _has(side, at):
        return BitRow(name, (), "nothing", "", "")
    pattern = side.bits(at)
    digits = len(side.data) // max(1, _count(side)) * 2
    return BitRow(
        name,
        parts_of(side.dtype, pattern),
        _number(side, at),
        f"0x{pattern:0{digits}x}",
        meaning_of(side.dtype, pattern),
    )


def _count(side: Side) -> int:
    return len(as_bits(Value(side.dtype, side.shape, side.data)))


def _has(side: Side, at: int) -> bool:
    return 0 <= at < _count(side) and not any(start <= at < start + n for start, n in side.holes)


def _number(side: Side, at: int) -> str:
    return str(as_numbers(Value(side.dtype, side.shape, side.data))[at].item())


def _apart(picture: Picture, at: int) -> str:
    """How far apart both sides of an element are."""
    expected, observed = picture.expected, picture.observed
    if expected is None or observed is None or expected.dtype != observed.dtype:
        return ""
    if not (_has(expected, at) and _has(observed, at)):
        return ""
    a, b = expected.bits(at), observed.bits(at)
    if not expected.dtype.startswith(("fp", "bf")) or "NaN" in meaning_of(expected.dtype, a) + meaning_of(
        observed.dtype, b
    ):
        return differing(a, b)
    sides = (as_bits(Value(one.dtype, one.shape, one.data))[at : at + 1] for one in (expected, observed))
    (distance,) = ulp_distance(*sides).tolist()
    return f"{distance} ULP apart; {differing(a, b)}"


def span_of(difference: Difference) -> str:
    """Where the deviating elements lie: `[8, 0] to [15, 6]`; empty where that is not known."""
    if not difference.first_index:
        return ""
    first, last = list(difference.first_index), list(difference.last_index)
    return f"{first}" if first == last else f"{first} to {last}"


def runs_of(difference: Difference, most: int = 6) -> str:
    """The deviating elements of the flattened tensor as runs: `56 to 75, 78 to 94`."""
    told = [f"{start}" if n == 1 else f"{start} to {start + n - 1}" for start, n in difference.runs[:most]]
    return ", ".join(told) + (" and more" if len(difference.runs) > most else "")


def distance_of(label: str) -> str:
    """A bucket of a histogram for a reader: `2-3` as it is, `536870912-1073741823` as `from 2^29`."""
    low, _, high = label.partition("-")
    return f"from 2^{int(low).bit_length() - 1}" if high and len(low) > SHORT_DIGITS else label


def owners_of(tensor: Tensor, most: int = 8) -> str:
    """Who holds what of a tensor: `rank 0: [0:4, 0:6]; rank 1: [4:8, 0:6]`."""
    holders = tensor.picture.owners if tensor.picture else ()
    side = (tensor.picture.observed or tensor.picture.expected) if tensor.picture else None
    shape = side.shape if side else ()
    told = []
    for holder in holders[:most]:
        if not holder.size or holder.size == shape:
            told.append(f"{_ranks(holder.ranks)}: all of it")
            continue
        ends = ", ".join(f"{at}:{at + n}" for at, n in zip(holder.start, holder.size, strict=True))
        told.append(f"{_ranks(holder.ranks)}: {'flat ' if holder.flat else ''}[{ends}]")
    return "; ".join(told) + (f"; and {len(holders) - most} more boxes" if len(holders) > most else "")


def _ranks(ranks: tuple[int, ...]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


FOR_TEMPLATES: Mapping[str, Any] = {
    "element_of": element_of, "span_of": span_of, "runs_of": runs_of, "owners_of": owners_of,
    "distance_of": distance_of, "short": short, "tensors_shown": TENSORS_SHOWN, "tensors_in_full": TENSORS_IN_FULL,
    "copies": COPIES,
    "kept_kib": FAILURE_BYTES >> 10,
}  # fmt: skip
"""What the template of a page asks for by name."""
