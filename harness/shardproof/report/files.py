"""Every report file of a run, written in one call."""

from __future__ import annotations

from pathlib import Path

from shardproof.issues.known_issues import KnownIssues
from shardproof.report.html import HISTORY, INDEX, write_failure, write_html
from shardproof.report.json_report import render_json
from shardproof.report.junit import render_junit
from shardproof.report.model import Report
from shardproof.report.publish import publish
from shardproof.report.summary import render_summary
from shardproof.result import Result
from shardproof.store import Store

SUMMARY = "summary.md"

RELEASES = "releases.html"

PAGES = (INDEX, SUMMARY, RELEASES, HISTORY)
"""The files that `run`, `sweep` and `history` write into a folder beside its database and the folder of failures."""


def write_reports(report: Report, out: Path, json: Path | None = None, junit: Path | None = None) -> Path:
    """Write the pages and the job summary below `out`, JSON and JUnit XML where asked; the path of the index page.

    Raises:
        UsageError: a place cannot be written.
        StoreFull: the disk is full.
    """
    if json is not None:
        publish(json, render_json(report))
    if junit is not None:
        publish(junit, render_junit(report))
    publish(out / SUMMARY, render_summary(report))
    return write_html(report, out)


def write_page(database: Path, result: Result, issues: KnownIssues) -> Path:
    """Write the page of one result of a database, where a report has no room for all; its path.

    Raises:
        UsageError: the place cannot be written, or the database is not a sound one of ours.
        StoreFull: the disk is full.
    """
    from shardproof.investigate import sweep_folder

    with Store(database) as store:
        report = Report.from_store(store, store.runs()[-1].id, issues)
    index = RELEASES if database.name == sweep_folder.DATABASE else INDEX
    return write_failure(report, result, database.parent, index)
