"""A comparison as plain text: what was compared, a table by role, and the differences, the first of them in full."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from shardproof.compare.differences import STRUCTURE, Comparison, EntryDifference, Side
from shardproof.errors import printable

FIRST = 20
"""How many differences of structure, and how many of values, are shown without `--all`."""

WORDS = {
    "missing": "only in A", "extra": "only in B", "kind": "tensor against plain value", "dtype": "another dtype",
    "shape": "another shape", "gap": "has gaps", "overlap": "has overlaps", "bits": "other bits",
    "value": "other value",
}  # fmt: skip
"""What each kind of difference is called."""

FOREIGN = 6


def render(comparison: Comparison, *, everything: bool = False) -> str:
    """The text, with a newline at its end.

    Args:
        everything: show all differences, however many there are.
    """
    lines = [*_side("A", comparison.a), *_side("B", comparison.b), "", *_verdict(comparison)]
    if comparison.hint:
        lines += ["", f"hint: {comparison.hint}"]
    lines += ["", *_counts(comparison)]
    structure = [one for one in comparison.found if one.kind in STRUCTURE]
    values = [one for one in comparison.found if one.kind not in STRUCTURE]
    for title, found in (("structure", structure), ("values", values)):
        if found:
            lines += ["", f"{title}: {len(found)} difference{'s' * (len(found) > 1)}"]
            lines += _listed(found, None if everything else FIRST)
    return "".join(f"{printable(one_line(line))}\n" for line in lines)


def one_line(text: str) -> str:
    """A text out of a file without its line breaks, so that it cannot look like lines of ours."""
    return text.replace("\n", "\\n")


def verdict_of(comparison: Comparison) -> str:
    """The result in one sentence."""
    both, names = sum(comparison.compared.values()), len({one.name for one in comparison.found})
    if comparison.equal:
        return f"equal: {_many(both, 'name')}, {comparison.elements} elements, bit for bit"
    absent = sum(one.kind in ("missing", "extra") for one in comparison.found)
    parts = [f"{names - absent} of {_many(both, 'name')} that both have differ"] if both else []
    for kind in ("missing", "extra"):
        count = sum(one.kind == kind for one in comparison.found)
        parts += [f"{count} {WORDS[kind]}"] if count else []
    return f"different: {', '.join(parts)}"


def size_of(count: int) -> str:
    """A number of bytes: `1.5 GB`."""
    size, unit = float(count), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if size < 1000:
            break
        size, unit = size / 1000, larger
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"


def _side(label: str, side: Side) -> Iterator[str]:
    held = f"{_many(side.tensors, 'tensor')} of {size_of(side.nbytes)}, {_many(side.plain, 'plain value')}"
    yield f"{label}  {side.path}"
    yield f"   {side.form}: {held}"
    if side.foreign:
        yield f"   {foreign_names(side.foreign)}"


def foreign_names(names: Sequence[str]) -> str:
    """The names in a checkpoint's pickles that are no plain data, the first few of them."""
    shown = ", ".join(names[:FOREIGN]) + ("" if len(names) <= FOREIGN else ", …")
    return f"names in its pickles, taken as text and not executed: {shown}"


def unread_files(names: Sequence[str]) -> str:
    """The files in a checkpoint's folder of which nothing was read, the first few of them."""
    shown = ", ".join(names[:FOREIGN]) + ("" if len(names) <= FOREIGN else ", …")
    return f"not read: {shown}"


def _verdict(comparison: Comparison) -> Iterator[str]:
    yield verdict_of(comparison)
    if comparison.left_out:
        yield f"left out by --only: {_many(comparison.left_out, 'name')}"
    if not comparison.checksums:
        yield "checksums were not verified"


def _counts(comparison: Comparison) -> Iterator[str]:
    counts = comparison.counts()
    kinds = kinds_of(counts)
    cells = [["role", "on both sides", "equal", *(WORDS[kind] for kind in kinds)]]
    for role, row in counts.items():
        cells.append([role, str(row["compared"]), str(row["equal"]), *(str(row.get(kind, 0)) for kind in kinds)])
    widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
    for line in cells:
        padded = (cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True))
        yield "  ".join((line[0].ljust(widths[0]), *padded))


def kinds_of(counts: Mapping[str, Mapping[str, int]]) -> list[str]:
    """The kinds of difference that a table of counts has, in their order."""
    return [kind for kind in (*STRUCTURE, "bits", "value") if any(row.get(kind) for row in counts.values())]


def _listed(found: Iterable[EntryDifference], most: int | None) -> Iterator[str]:
    every = list(found)
    for one in every[:most]:
        yield f"  {one.name}  ({one.role}): {WORDS[one.kind]}"
        yield from (f"      {line}" for line in facts_of(one))
    if most is not None and len(every) > most:
        yield f"  … and {len(every) - most} more: --all shows them, --json FILE has them"


def facts_of(one: EntryDifference) -> Iterator[str]:
    """What a difference is, in lines; the explanation comes first."""
    if one.explanation:
        yield one.explanation
    if one.kind == "bits":
        if not one.first_index:
            yield f"{one.a}: A {one.first_a}, B {one.first_b}{_distance(one)}"
            return
        where = f"from {list(one.first_index)} to {list(one.last_index)}"
        yield f"{one.a}: {one.mismatched} of {_many(one.total, 'element')}, {where}"
        yield f"first: A {one.first_a}, B {one.first_b}{_distance(one)}"
    elif one.detail:
        yield one.detail
    elif one.a and one.b:
        yield f"A {one.a}, B {one.b}"
    else:
        yield one.a or one.b


def _distance(one: EntryDifference) -> str:
    parts = []
    if one.max_ulp is not None and one.mechanism != "counted":
        parts.append(f"{'at most' if one.mismatched - one.nan > 1 else 'by'} {one.max_ulp} ULP")
    if one.nan:
        parts.append(f"{one.nan} NaN")
    return f"; {', '.join(parts)}" if parts else ""


def _many(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"
