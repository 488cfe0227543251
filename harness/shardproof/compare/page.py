"""A comparison as a self-contained HTML page, with the style and the content security policy of the report's pages."""

from __future__ import annotations

from pathlib import Path

from shardproof.compare.differences import STRUCTURE, Comparison
from shardproof.compare.text import WORDS, kinds_of, size_of, verdict_of
from shardproof.report.html import render
from shardproof.report.publish import publish

MOST = 500
"""How many differences of structure, and how many of values, a page shows."""


def write_page(comparison: Comparison, path: Path) -> None:
    """Write the page of a comparison.

    Raises:
        UsageError: the place cannot be written, or holds something that is not ours.
        StoreFull: the disk is full.
    """
    publish(path, page_of(comparison))


def page_of(comparison: Comparison) -> str:
    """The page as text."""
    counts = comparison.counts()
    kinds = kinds_of(counts)
    structure = [one for one in comparison.found if one.kind in STRUCTURE]
    values = [one for one in comparison.found if one.kind not in STRUCTURE]
    return render(
        "diff.html",
        comparison=comparison,
        verdict=verdict_of(comparison),
        counts={role: {**dict.fromkeys(kinds, 0), **row} for role, row in counts.items()},
        kinds=kinds,
        words=WORDS,
        parts=(("structure", structure), ("values", values)),
        most=MOST,
        size_of=size_of,
    )
