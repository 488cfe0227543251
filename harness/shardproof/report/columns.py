"""The results of a run as columns, for a script: what the main page's table, filters and matrix are made of.

A thousand results have few different meshes, so a column is a list of its values, in the order in which a reader wants
them sorted, and one code a result. A code is one character, or two where there are more than 64 values, so that ten
thousand results with fifteen columns are a quarter of a megabyte:

    {"name": "mesh", "values": ["1x2x1", "2x2x1", "1x8x1"], "default": "1x1x1", "width": 1, "codes": "AABAC"}

An axis on which all results agree is no column: it is told once, in `same`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from shardproof.errors import UsageError
from shardproof.report.cell_axes import axis_texts, first_values, own_name
from shardproof.report.model import Report
from shardproof.result import Result
from shardproof.scenario import AXES, Mesh, Scenario
from shardproof.verdict import SEVERITY, Standing

ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"

STANDINGS = (Standing.NEW, Standing.UNKNOWN, Standing.KNOWN, Standing.PASS, Standing.UNSUPPORTED)
"""What a result means to a reader, from what he looks at first."""

_OWN = ("system", "version")
"""Axes that the columns `system` and `release` say better."""


def columns_of(report: Report, causes: Mapping[str, str], headlines: Mapping[str, str], paged: Collection[str]) -> str:
    """The results as JSON that may stand in a `script` element.

    Args:
        causes: id of a result → id of its cause. headlines: id of a cause → its headline.
        paged: ids of the results that have a page of their own.
    """
    results = report.results
    order = [verdict.value for verdict in SEVERITY]
    columns = [
        _column("standing", [r.counts_as.value for r in results], [s.value for s in STANDINGS]),
        _column("verdict", [r.verdict.value for r in results], order),
        _column("system", [r.system for r in results]),
        _column("release", [r.version for r in results]),
        _column("cause", [causes.get(r.id, "") for r in results], ["", *headlines]),
    ]
    if report.known:
        columns.append(_column("issue", [r.known_issue or "" for r in results]))
    if report.before:
        columns.append(_column("seen", [report.change(r).shown for r in results]))
    axes, same = _axes(results)
    unpaged = [n for n, r in enumerate(results) if r.id in causes and r.id not in paged]
    document = {
        "ids": "".join(r.id for r in results),
        "seconds": [float(f"{r.duration_s:.3g}") for r in results],
        "columns": columns + axes,
        "same": same,
        "place": report.place,
        "again": report.again,
        "headlines": dict(headlines),
        "unpaged": unpaged,
    }
    return _inert(json.dumps(document, separators=(",", ":"), ensure_ascii=False, allow_nan=False))


def _axes(results: Sequence[Result]) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """The columns of the axes that vary, and of the others the values that are no defaults."""
    first = first_values(result.scenario for result in results)
    own = {own_name(axis): text for axes in first.values() for axis, text in axes}
    plain = {**Scenario().axis_values(), **own}
    texts = [axis_texts(result.scenario, first.get(result.scenario.system, ())) for result in results]
    columns: list[dict[str, Any]] = []
    same: dict[str, str] = {}
    for axis in dict.fromkeys((*AXES, *own)):
        elsewhere = plain[axis] if axis in AXES else ""  # of a system that has no such axis
        values = [text.get(axis, elsewhere) for text in texts]
        if axis in _OWN or not values:
            continue
        if len(set(values)) > 1:
            columns.append({**_column(axis, values), "default": plain[axis]})
        elif values[0] != plain[axis]:
            same[axis] = values[0]
    return columns, same


def _column(name: str, values: Sequence[str], order: Iterable[str] = ()) -> dict[str, Any]:
    """A column. order: its values as they are sorted; without, meshes by their world and others as a person counts."""
    found = set(values)
    ranked = [value for value in order if value in found] or sorted(found, key=_rank(name))
    width = 1 if len(ranked) <= 64 else 2 if len(ranked) <= 64**2 else 3
    code = {value: _code(number, width) for number, value in enumerate(ranked)}
    return {"name": name, "values": ranked, "width": width, "codes": "".join(map(code.__getitem__, values))}


def _code(number: int, width: int) -> str:
    return "".join(ALPHABET[number // 64**place % 64] for place in range(width))


def _rank(name: str) -> Callable[[str], Any]:
    return _by_world if name == "mesh" else naturally


def _by_world(text: str) -> tuple[int, Any]:
    try:
        mesh = Mesh.parse(text)
    except UsageError:  # that of a release which knows other meshes
        return 0, naturally(text)
    return mesh.world, naturally(text)


def naturally(text: str) -> list[tuple[int, int, str]]:
    """How a person sorts: `release 2.9` before `release 2.10`."""
    return [(1, int(part), "") if part.isdigit() else (0, 0, part) for part in re.split(r"(\d{1,18})", text)]


def _inert(text: str) -> str:
    """JSON that ends no `script` element and opens no comment, whatever is in its texts."""
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e").replace("\u2028", "\\u2028")
