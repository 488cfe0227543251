"""Sweeps and bisections on a terminal: release × verdict × signature, and where a failure came or went."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from shardproof.errors import unlike_a_broken_node
from shardproof.investigate.bisect import Finding, State, names
from shardproof.investigate.sweep import Sweep
from shardproof.result import Result
from shardproof.verdict import Verdict
from shardproof.wording.lines import brief

_STYLES = {
    Verdict.PASS: "green",
    Verdict.UNSUPPORTED: "dim",
    Verdict.MISMATCH: "red",
    Verdict.CRASH: "red",
    Verdict.HANG: "red",
    Verdict.NONDETERMINISTIC: "magenta",
    Verdict.UNKNOWN: "yellow",
}


def render_sweep(sweep: Sweep, width: int = 120, colour: bool = False) -> str:
    """The table of a sweep, with the scenario above it and what was not the real thing below it."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for head, no_wrap in (("release", True), ("verdict", True), ("signature", False), ("seconds", True)):
        table.add_column(head, no_wrap=no_wrap, justify="right" if head == "seconds" else "left", overflow="fold")
    for row in sweep.rows:
        result = row.result
        ran = result.version or row.asked
        table.add_row(
            _inert(ran), Text(result.verdict.value, _STYLES[result.verdict]), _inert(brief(result)),
            f"{result.duration_s:.1f}",
        )  # fmt: skip
    results = [row.result for row in sweep.rows]
    below = _noted("emulated", {item for result in results for item in result.emulated})
    below += _noted("not exercised", {item for result in results for item in result.not_exercised})
    pairs = dict.fromkeys(pair for result in results for pair in result.outside_support)
    for pair in pairs:
        releases = [result.version for result in results if pair in result.outside_support]
        below.append(f"outside what upstream supports or tested: {pair} ({names(releases)})")
    if sweep.interrupted:
        below.append("interrupted: the other releases were not tried")
    return _drawn(f"{sweep.scenario}\n", table, below, width, colour)


def render_sweeps(titles: Sequence[str], found: Sequence[Sweep], width: int = 120, colour: bool = False) -> str:
    """One sweep in full; of several, the verdicts: a row for each scenario by its title, a column for each release."""
    if len(titles) == 1:
        return render_sweep(found[0], width, colour)
    releases = list(dict.fromkeys(row.result.version or row.asked for sweep in found for row in sweep.rows))
    table = Table(box=None, pad_edge=False, header_style="bold")
    for head in ("scenario", *releases):
        table.add_column(_inert(head), no_wrap=True)
    for title, sweep in zip(titles, found, strict=False):
        verdicts = {row.result.version or row.asked: row.result.verdict for row in sweep.rows}
        cells = [Text(v.value, _STYLES[v]) if (v := verdicts.get(name)) else Text("") for name in releases]
        table.add_row(_inert(title), *cells)
    emulated = {item for sweep in found for row in sweep.rows for item in row.result.emulated}
    below = _noted("emulated", emulated)
    if any(sweep.interrupted for sweep in found):
        below.append("interrupted: the others were not tried")
    return _drawn("", table, below, width, colour)


def tried_line(asked: str, result: Result, state: State) -> str:
    """One version of a bisection, as it is tried."""
    return str(_inert(f"{asked}: {state.value} ({result.verdict.value}{': ' if brief(result) else ''}{brief(result)})"))


def render_finding(finding: Finding, subjects: dict[str, str], width: int = 120, colour: bool = False) -> str:
    """Where a failure came or went.

    Args:
        subjects: version → date and subject of the commit.
    """
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for word, version in zip(finding.words, (finding.before, finding.after), strict=True):
        style = "green" if word in ("last good", "first fixed") else "red"
        ran = finding.results[version].version
        shown = version if ran in ("", version) else f"{version} ({ran})"
        table.add_row(Text(word, style), _inert(shown), _inert(subjects.get(version, "")))
    below = [f"failure: {finding.signature}"]
    if finding.note:
        below.append(f"note: {finding.note}")
    if finding.skipped:
        why = "say nothing about this failure, so it may be one of them"
        if finding.interrupted or finding.out_of_time:
            why = "not tried" if finding.results.keys().isdisjoint(finding.skipped) else "not all tried"
        below.append(f"between them: {names(finding.skipped)}: {why}")
    others = {v: r for v, r in finding.results.items() if v in finding.skipped}
    below += [f"  {version}: {result.verdict.value}: {brief(result)}" for version, result in others.items()]
    cut = "; interrupted" if finding.interrupted else "; the budget was spent" if finding.out_of_time else ""
    below.append(f"tried {len(finding.results)} versions{cut}")
    return _drawn("", table, below, width, colour)


def _noted(word: str, items: set[str]) -> list[str]:
    return [f"{word}: {', '.join(sorted(items))}"] if items else []


def _drawn(above: str, table: Table, below: list[str], width: int, colour: bool) -> str:
    stream = io.StringIO()
    console = Console(
        file=stream, width=width, force_terminal=colour, color_system="standard" if colour else None, highlight=False,
        emoji=False, markup=False,
    )  # fmt: skip
    if above:
        console.print(_inert(above))
    console.print(table)
    console.print()
    for line in below:
        console.print(_inert(line), soft_wrap=True)
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines()) + "\n"


def _inert(text: str) -> Text:
    """Text as it is: no markup, and no control characters, so that a library's words cannot drive the terminal."""
    return Text(unlike_a_broken_node(re.sub(r"[^\n\t\x20-\x7e\xa0-\U0010ffff]", "", text)))
