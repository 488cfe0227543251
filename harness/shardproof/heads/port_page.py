"""The page of `shardproof port`, and beside it a page for each new failure."""

from __future__ import annotations

from pathlib import Path

from shardproof.heads.port import Port
from shardproof.heads.port_text import FITS, NEW, REPAIRED, counted, headline
from shardproof.report.html import render, write_failure
from shardproof.report.model import Report
from shardproof.report.publish import publish

PAGE = "port.html"


def write_page(found: Port, report: Report, folder: Path) -> Path:
    """Write the page, and one for each failure that it leads to, below a folder; its path.

    Args:
        report: of the run that holds the results.

    Raises:
        UsageError: a file there is not ours. StoreFull: the disk is full.
    """
    shown = {result.id: result for new in found.new for result in new.results[:1]}
    for result in shown.values():
        write_failure(report, result, folder, PAGE)
    return publish(folder / PAGE, page_of(found, frozenset(shown), report.place + report.again))


def page_of(found: Port, pages: frozenset[str] = frozenset(), options: str = "") -> str:
    """The page as text. pages: ids of results that have a page beside it. options: what a command needs that runs a
    result again."""
    return render(
        "port.html", found=found, headline=headline(found), counted=counted(found), titles=(FITS, REPAIRED, NEW),
        pages=pages, options=options,
    )  # fmt: skip
