"""The HTML report: `index.html` with every cause of failure, and a page for each failure beside it.

Each page is one file that loads nothing: style and script are inline and the content security policy admits
exactly those two, so that hostile text (a tensor's name, an error message) could not run even if escaping
failed. Jinja escapes everything by default. Causes can be read without script; all results are columns of codes
(`columns.py`) for the script of the main page, so that ten thousand stay below 1 MB.
"""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardproof.diagnosis import Explanation
from shardproof.issues.upstream_links import address_of
from shardproof.program import ARMS, is_arms
from shardproof.report import figures
from shardproof.report.cell_axes import axis_texts, first_values, words_of
from shardproof.report.history import History
from shardproof.report.index_page import index_page, paged_of
from shardproof.report.model import Report
from shardproof.report.publish import publish
from shardproof.result import Result
from shardproof.verdict import Verdict
from shardproof.wording.lines import first_line, headline, unsupported_pair
from shardproof.wording.rank_ends import told_ends

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup

INDEX, HISTORY = "index.html", "history.html"

EVIDENCE_SHOWN = 6

BESIDE = {"failure": ("elements",), "index": ("past", "choices"), "history": ("past",)}
"""Page → further files of style and script that it is made of, before those of its own name."""

SYMBOLS = {
    Verdict.PASS: "✓",
    Verdict.UNSUPPORTED: "–",
    Verdict.MISMATCH: "≠",
    Verdict.CRASH: "✗",
    Verdict.HANG: "∞",
    Verdict.NONDETERMINISTIC: "~",
    Verdict.UNKNOWN: "?",
}


def write_html(report: Report, directory: Path) -> Path:
    """Write the pages below `directory`; the path of the index.

    Raises:
        UsageError: the directory cannot be written.
        StoreFull: the disk is full.
    """
    for cluster in report.clusters():
        for result in paged_of(cluster, report):
            write_failure(report, result, directory)
    return publish(directory / INDEX, render_index(report))


def write_failure(report: Report, result: Result, directory: Path, index: str = INDEX) -> Path:
    """Write the page of one failure below `directory`; its path. index: the page beside it that leads here.

    Raises:
        UsageError: the directory cannot be written.
        StoreFull: the disk is full.
    """
    return publish(directory / "failures" / f"{result.id}.html", render_failure(report, result, index))


def render_index(report: Report) -> str:
    """The overview page."""
    return render(
        "index.html",
        report=report,
        page=index_page(report),
        timings=figures.timings(report),
        nights=figures.nights(report.history),
    )


def render_failure(report: Report, result: Result, index: str = INDEX) -> str:
    """The page of one failure. index: the page beside it that leads here."""
    from shardproof.report import failure_page as page

    told = page.failure_page(result, report.issues, report.place, report.again)
    return render("failure.html", report=report, result=result, index=index, page=told, **page.FOR_TEMPLATES)


def write_history(history: History, folder: Path) -> Path:
    """Write the page of a folder's history into it; its path.

    Raises:
        UsageError: the folder cannot be written.
        StoreFull: the disk is full.
    """
    pages = {trace.example for trace in history.traces if (folder / "failures" / f"{trace.example}.html").is_file()}
    index = INDEX if (folder / INDEX).is_file() else ""
    told = {"history": history, "sections": history.sections, "pages": pages, "nights": figures.nights(history)}
    return publish(folder / HISTORY, render("history.html", folder=str(folder), index=index, **told))


def ticked(text: str) -> Markup:
    """A text, escaped, in which what stands between backticks is code."""
    from markupsafe import Markup, escape

    return Markup(re.sub(r"`([^`\n]+)`", r"<code>\1</code>", str(escape(text))))


def render(template: str, **values: Any) -> str:
    """A page from a template of this folder, with its style and script."""
    return _environment().get_template(template).render(**_dress(template), **values)


@cache
def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("shardproof.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["address_of"] = address_of
    environment.filters["ticked"] = ticked
    environment.globals.update(
        symbols={verdict.value: symbol for verdict, symbol in SYMBOLS.items()},
        first_line=first_line,
        headline=headline,
        unsupported_pair=unsupported_pair,
        evidence_columns=_evidence_columns,
        cell=_cell,
        evidence_rows=EVIDENCE_SHOWN,
        timeline_of=figures.timeline,
        courses_of=figures.courses,
        told_ends=told_ends,
        ulp_bars=figures.ulp_bars,
        op_kind=Result.kind_of,
        changed=lambda result: {*result.scenario.axis_values(only_changed=True), *words_of(result.scenario)},
        axes_shown=_axes_shown,
        axes_of=_axes,
    )
    return environment


@cache
def _dress(template: str) -> dict[str, str]:
    """Style and script of a page, and their digests for its policy: `page.css` and `page.js`, which all pages share,
    after them those in `BESIDE`, and those of the template's own name, such as `index.css`."""
    from markupsafe import Markup

    own = template.removesuffix(".html")
    parts = ("page", *BESIDE.get(own, ()), own)
    style, script = ("".join(_asset(f"{part}.{kind}") for part in parts) for kind in ("css", "js"))
    texts = {"style": Markup(style), "script": Markup(script)}
    return {**texts, "style_hash": _hash(style), "script_hash": _hash(script)}


def _asset(name: str) -> str:
    """A file beside the templates; empty where there is none."""
    file = resources.files("shardproof.report") / "templates" / name
    return file.read_text(encoding="utf-8") if file.is_file() else ""


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _evidence_columns(explanation: Explanation) -> list[str]:
    """The names in an explanation's evidence, in order of appearance."""
    return list(dict.fromkeys(name for item in explanation.evidence for name in item))


def _cell(value: object) -> str:
    """One piece of evidence as text."""
    match value:
        case None:
            return "–"
        case list() | tuple():
            return ", ".join(map(str, value))
        case _:
            return str(value)


def _axes(result: Result) -> str:
    """The non-default axes but the system, which has a column of its own."""
    changed = result.scenario.axis_values(only_changed=True)
    if not is_arms(result.scenario.program):
        return " ".join(f"{axis}={value}" for axis, value in changed.items() if axis != "system") or "defaults"
    others = [f"{axis}={value}" for axis, value in changed.items() if axis not in ("system", "options")]
    told = [*result.scenario.options, *(other for other in others if other != f"program={ARMS}")]
    return " ".join(told) or "first value of every axis"


def _axes_shown(result: Result) -> dict[str, str]:
    """The axes of a scenario with their values; of a trainer's cell, those that mean something to a trainer, and its
    own."""
    return axis_texts(result.scenario, first_values([result.scenario]).get(result.scenario.system, ()))
