"""The HTML report: `index.html` with every cause of failure, and a page for each failure beside it.

Each page is one file that loads nothing: style and script are inline and the content security policy admits
exactly those two, so that hostile text (a tensor's name, an error message) could not run even if escaping
failed. Jinja escapes everything by default. A page stays readable without script, and below 5 MB at
thousands of results: passing ones are a line each, causes are shown by their simplest member.
"""

from __future__ import annotations

import base64
import hashlib
import shlex
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.diagnosis import Explanation
from harness.errors import UsageError
from harness.program import expand
from harness.report import figures
from harness.report.model import Report, headline
from harness.report.publish import publish
from harness.result import Result
from harness.upstream import address_of
from harness.verdict import Verdict

if TYPE_CHECKING:
    from jinja2 import Environment

INDEX = "index.html"

PAGES_A_CAUSE = 50
"""How many members of a cause get a page of their own, the simplest first."""

DETAILED_CAUSES = 10
"""How many causes are unfolded on the index."""

DIFFERENCES_SHOWN = 60
STRIPS_SHOWN = 12
STRIP_WIDTH = 200
EVIDENCE_SHOWN = 6

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
        for result in cluster.members[:PAGES_A_CAUSE]:
            publish(directory / "failures" / f"{result.id}.html", render_failure(report, result))
    return publish(directory / INDEX, render_index(report))


def render_index(report: Report) -> str:
    """The overview page."""
    clusters = report.clusters()
    text, look = _banner(report)
    return _render(
        "index.html",
        report=report,
        clusters=clusters,
        cause_of={member.id: n for n, cluster in enumerate(clusters, 1) for member in cluster.members},
        banner=text,
        banner_class=look,
        heatmaps=figures.heatmaps(report),
        timings=figures.timings(report),
        command_line=shlex.join(report.run.command),
    )


def render_failure(report: Report, result: Result) -> str:
    """The page of one failure."""
    from harness.export.page import filing_of

    filing = filing_of(result, result.known_issue or report.issues.match(result))
    return _render("failure.html", report=report, result=result, index=INDEX, filing=filing)


def _banner(report: Report) -> tuple[str, str]:
    """The run in one sentence, and the verdict whose colour it has."""
    counts, total = report.counts, len(report.results)
    unexpected = [r for r in report.failures if r.known_issue is None and r.verdict.is_failure]
    causes = [c for c in report.clusters() if c.known_issue is None and c.simplest.verdict.is_failure]
    if counts[Verdict.UNKNOWN]:
        return f"Not all could be judged, since the harness failed: {report.in_words}", "unknown"
    if unexpected:
        causes_text = f"{len(causes)} cause{'s' * (len(causes) > 1)}"
        return f"New failures, with {causes_text}: {report.in_words}", causes[0].simplest.verdict.value
    if report.missing:
        return f"{len(report.missing)} planned scenarios have no verdict", "unknown"
    executed = total - counts[Verdict.UNSUPPORTED]
    if not executed:
        return "Nothing was run", "unknown"
    if report.known:
        return f"No new failures: {report.in_words}", "known"
    return f"All {executed} scenarios that ran pass", "pass"


def _render(template: str, **values: Any) -> str:
    return _environment().get_template(template).render(**_dress(template), **values)


@cache
def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("harness.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["address_of"] = address_of
    environment.globals.update(
        symbols={verdict.value: symbol for verdict, symbol in SYMBOLS.items()},
        headline=headline,
        evidence_columns=_evidence_columns,
        cell=_cell,
        evidence_rows=EVIDENCE_SHOWN,
        timeline_of=figures.timeline,
        strip=figures.strip,
        ulp_bars=figures.ulp_bars,
        op_kind=_op_kind,
        changed=lambda result: result.scenario.axis_values(only_changed=True),
        axes_of=_axes,
        limit=DIFFERENCES_SHOWN,
        strips=STRIPS_SHOWN,
        strip_width=STRIP_WIDTH,
        pages=PAGES_A_CAUSE,
        detailed=DETAILED_CAUSES,
    )
    return environment


@cache
def _dress(template: str) -> dict[str, str]:
    """Style and script of a page, and their digests for its policy: `page.css` and `page.js`, which all pages share,
    and after them those of the template's own name, such as `index.css`."""
    from markupsafe import Markup

    own = template.removesuffix(".html")
    style, script = (f"{_asset(f'page.{kind}')}{_asset(f'{own}.{kind}')}" for kind in ("css", "js"))
    texts = {"style": Markup(style), "script": Markup(script)}
    return {**texts, "style_hash": _hash(style), "script_hash": _hash(script)}


def _asset(name: str) -> str:
    """A file beside the templates; empty where there is none."""
    file = resources.files("harness.report") / "templates" / name
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


def _op_kind(result: Result, index: int) -> str:
    """The kind of the operation at `index` of a result's program; empty if it has none."""
    try:
        return next((op.kind for op in expand(result.scenario) if op.index == index), "")
    except UsageError:
        return ""


def _axes(result: Result) -> str:
    """The non-default axes but the system, which has a column of its own."""
    changed = result.scenario.axis_values(only_changed=True)
    return " ".join(f"{axis}={value}" for axis, value in changed.items() if axis != "system") or "defaults"
