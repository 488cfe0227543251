"""The report on a terminal: a verdict table, failures by cause with the command that replays them, and what
was not run. Plain text unless the stream is a terminal and `NO_COLOR` is unset."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TextIO

from shardproof.errors import printable, unlike_a_broken_node
from shardproof.issues.upstream_links import compared
from shardproof.report.heads_text import describe_heads
from shardproof.report.model import Cluster, Report, cures_line
from shardproof.report.repaired import repaired
from shardproof.result import Result
from shardproof.verdict import SEVERITY, Standing, Verdict
from shardproof.wording.lines import difference_lines, first_line, headline, unsupported_pair
from shardproof.wording.titles import title

_COLOURS = {
    Verdict.PASS: "32",
    Verdict.UNSUPPORTED: "2",
    Verdict.MISMATCH: "31",
    Verdict.CRASH: "31",
    Verdict.HANG: "31",
    Verdict.NONDETERMINISTIC: "35",
    Verdict.UNKNOWN: "33",
}

_LOOKS = {
    Standing.PASS: "32",
    Standing.NEW: "31",
    Standing.KNOWN: "2",
    Standing.UNSUPPORTED: "2",
    Standing.UNKNOWN: "33",
}

Paint = Callable[[str, str], str]

SHOWN_DIFFERENCES = 5

NAMED_CURES = 5
"""How many cures the terminal names; pages and JSON name all."""

EMULATED_ONLY = "emulated only: not seen on a GPU yet"

_CONTROL = r"[^\n\t\x20-\x7e\xa0-\U0010ffff]"
_CONTROL_BUT_COLOUR = r"(?!\x1b\[[0-9;]*m)" + _CONTROL


def wants_colour(stream: TextIO, environment: Mapping[str, str]) -> bool:
    """Whether to colour: a terminal, and `NO_COLOR` empty or unset (https://no-color.org)."""
    return stream.isatty() and not environment.get("NO_COLOR") and environment.get("TERM") != "dumb"


def render_text(report: Report, page: Path | None = None, colour: bool = False) -> str:
    """The whole report as text, ending in a newline.

    Args:
        page: where the HTML report is; named in the last line.
        colour: use ANSI colours.
    """
    paint: Paint = _ansi if colour else _plain
    blocks = [
        _heading(report),
        _table(report, paint),
        *(_cluster(n, cluster, report, paint) for n, cluster in enumerate(report.clusters(), 1)),
        _left_out(report, paint),
        _closing(report, page, paint),
    ]
    return inert("\n\n".join(block for block in blocks if block), colour) + "\n"


def render_result(result: Result, colour: bool = False, *, emulated_only: bool = False) -> str:
    """One result: scenario, verdict, explanations, every difference; what `replay`, `shrink` and pytest print. With all
    that is known of it: `shardproof.report.failure_text`.

    Args:
        emulated_only: the finding was seen under emulation and not yet on a GPU.
    """
    lines = [verdict_line(result, colour), *plainly(result), *circumstances(result, emulated_only=emulated_only)]
    lines += [f"  {line}" for line in explanation_lines(result)]
    lines += _indented((line for d in result.differences for line in difference_lines(d)), 2)
    if result.error and result.error.traceback:
        lines += ["", *_indented(result.error.traceback.rstrip().split("\n"), 2)]
    return inert("\n".join(lines), colour) + "\n"


def render_brief(result: Result, colour: bool = False) -> str:
    """One result without its differences: verdict, scenario and explanations; what `explore` prints."""
    lines = [verdict_line(result, colour), *plainly(result), *circumstances(result, emulated_only=False)]
    return inert("\n".join([*lines, *(f"  {line}" for line in explanation_lines(result))]), colour)


def verdict_line(result: Result, colour: bool) -> str:
    """Verdict, library and id of a result."""
    paint: Paint = _ansi if colour else _plain
    return f"{paint(result.verdict.value, _COLOURS[result.verdict])}  {result.system} {result.version}  {result.id}"


def scenario_file(result: Result, origin: str) -> str:
    """A result's scenario as a TOML file, with what went wrong as its title. origin: what wrote it."""
    return f"# {origin}\n{result.scenario.to_toml(title(result))}"


def plainly(result: Result) -> list[str]:
    """What went wrong in plain words, as an indented line; nothing of what did not go wrong."""
    return [f"  {title(result)}"] if result.verdict.is_failure else []


def circumstances(result: Result, *, emulated_only: bool) -> list[str]:
    """What ran and how, in indented lines: scenario, device, what was emulated, cured or never supported."""
    lines = [f"  scenario: {result.scenario}"]
    if result.loaded_by:
        lines.append(f"  loaded by: {result.system} {result.loaded_by}")
    if result.failed_op:
        lines.append(f"  failed at operation {result.failed_op.index} ({result.failed_op.name})")
    if result.shrunk_from:
        lines.append(f"  shrunk from {result.shrunk_from}, which fails in the same way")
    if result.restarted:
        lines.append(f"  run a second time, since a process of shardproof's died: {result.restarted}")
    if result.device != "cpu":
        lines.append(f"  device: {result.device}")
    if emulated_only:
        lines.append(f"  {EMULATED_ONLY}")
    if result.emulated:
        lines.append(f"  emulated: {_folded(result.emulated)}")
    lines += [f"  {what}: {how}" for what, how in result.chosen.items()]
    if result.not_exercised:
        lines.append(f"  not exercised: {'; '.join(result.not_exercised)}")
    if result.outside_support:
        lines.append(f"  outside what upstream supports or tested: {'; '.join(result.outside_support)}")
    if result.cured or result.not_cured:
        lines.append(f"  {cures_line(result, NAMED_CURES, where='')}")
    if result.standing:
        lines.append(f"  {result.standing}")
    if result.reason and result.verdict.is_failure:
        lines.append(f"  {first_line(result.reason)}")
    return lines


def explanation_lines(result: Result) -> list[str]:
    """A line for each mechanism that explains a result. Without an explanation, a headline of the observed failure."""
    if not result.explanations:
        return [headline(result)]
    return [
        f"{explanation.mechanism} ({explanation.confidence}{compared(explanation.bug_ids)}): {explanation.text}"
        for explanation in result.explanations
    ]


def _heading(report: Report) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in report.run.versions.items())
    lines = [f"run {report.run.id}   seed {report.run.seed}" + (f"   {versions}" if versions else "")]
    if report.devices:
        lines.append(f"device: {'; '.join(report.devices)}")
    if report.emulated:
        lines.append(f"emulated: {_folded(report.emulated)}{', which the report names' * (len(report.emulated) > 1)}")
    lines += [f"{what}: {how}" for what, how in report.choices]
    if report.not_exercised:
        lines.append(f"not exercised: {'; '.join(report.not_exercised)}")
    for release, pairs in report.outside_support:
        remedy = "; `--torch VERSION` gives it one that was" if re.search(r"\btorch \d", pairs) else ""
        lines.append(f"{release}, outside what upstream supports or tested: {pairs}{remedy}")
    lines += [f"{release}: {told}" for release, told in report.cured_in_lines(NAMED_CURES)]
    return "\n".join(lines)


def _folded(what: Sequence[str]) -> str:
    """The first of several things, and how many more there are."""
    more = len(what) - 1
    return f"{what[0]}; and {more} more" if more else what[0]


def _table(report: Report, paint: Paint) -> str:
    """Systems by verdicts; a verdict that nothing has is left out, except pass."""
    rows = report.table()
    if not rows:
        return paint("nothing was run", "33")
    shown = [v for v in SEVERITY if report.counts[v] or v is Verdict.PASS]
    head = ["system", "version", *(v.value for v in shown), "total", "seconds"]
    body = [
        [row.system, row.version, *(str(row.counts.get(v, 0)) for v in shown), str(row.total), f"{row.duration_s:.1f}"]
        for row in rows
    ]
    widths = [max(len(line[column]) for line in [head, *body]) for column in range(len(head))]
    colours = ["", "", *(_COLOURS[v] for v in shown), "", ""]
    lines = [_line(head, widths), _line(["-" * width for width in widths], widths)]
    for cells in body:
        padded = _line(cells, widths, lambda text, column: paint(text, colours[column] if text.strip() != "0" else "2"))
        lines.append(padded)
    return "\n".join(lines)


def _line(cells: Sequence[str], widths: Sequence[int], dress: Callable[[str, int], str] = lambda text, _: text) -> str:
    padded = (
        cell.ljust(width) if column < 2 else cell.rjust(width)
        for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
    )
    return "  ".join(dress(text, column) for column, text in enumerate(padded)).rstrip()


def _cluster(number: int, cluster: Cluster, report: Report, paint: Paint) -> str:
    simplest = cluster.simplest
    on = f" on {cluster.releases}" if cluster.releases else ""
    notes = [f"{len(cluster.members)} scenario{'s' * (len(cluster.members) > 1)}{on}"]
    notes += [f"{n} {change.shown}" for change, n in report.changes_of(cluster).items() if n]
    if simplest.standing:
        notes.append(simplest.standing)
    if report.emulated_only(simplest):
        notes.append(EMULATED_ONLY)
    heading = paint(title(simplest), _COLOURS[simplest.verdict] if not cluster.known_issue else "2")
    lines = [f"{number}. {heading}  [{', '.join(notes)}]", f"   {cluster.signature}"]
    if cluster.mechanism:
        best = simplest.explanations[0]
        lines.append(f"   {cluster.mechanism} ({best.confidence}{compared(best.bug_ids)})")
    lines.append(f"   {headline(simplest)}")
    if outside := unsupported_pair(simplest):
        lines.append(f"   {outside}")
    if simplest.reason and simplest.verdict.is_failure:
        lines.append(f"   {first_line(simplest.reason)}")
    lines.append(f"   {'smallest' if len(cluster.members) > 1 else 'scenario'}: {simplest.scenario}")
    if condition := report.condition_of(cluster):
        lines.append(f"   where: {condition.text}")
    if simplest.failed_op:
        lines.append(f"   failed at operation {simplest.failed_op.index} ({simplest.failed_op.name})")
    for difference in simplest.differences[:SHOWN_DIFFERENCES]:
        lines += _indented(difference_lines(difference), 5)
    hidden = len(simplest.differences) - SHOWN_DIFFERENCES
    if hidden > 0:
        lines.append(f"     … and {hidden} more differences")
    lines.append(f"   replay: {paint(simplest.replay + report.place + report.again, '1')}")
    return "\n".join(lines)


def _left_out(report: Report, paint: Paint) -> str:
    """The lines about what the verdicts above do not cover."""
    lines = []
    if report.missing:
        some = ", ".join(s.id for s in report.missing[:5]) + (", …" if len(report.missing) > 5 else "")
        lines.append(paint(f"not finished: {len(report.missing)} planned scenarios have no verdict ({some})", "33"))
    lines += [f"unsupported: {n} × {system}: {reason}" for system, reason, n in report.unsupported()]
    lines += [f"equivalent: {n} × {system}: {what}" for system, what, n in report.normalisations()]
    excluded = sum(report.run.exclusions.values())
    if excluded:
        reasons = len(report.run.exclusions)
        lines.append(f"excluded: {excluded} combinations for {reasons} reason{'s' * (reasons > 1)}, see the report")
    return "\n".join(lines)


def _closing(report: Report, page: Path | None, paint: Paint) -> str:
    shown = [paint(f"{n} {standing.value}", _LOOKS[standing]) for standing, n in report.standings.items() if n]
    lines = [f"{', '.join(shown) or 'no results'}{report.shrunk_in_words}"]
    if report.by_face:
        lines[0] += f" ({report.by_face} of the known by face only)"
    if report.cured_in_words:
        lines[0] += f"; {report.cured_in_words}"
    if report.in_spite:
        lines.append(report.in_spite)
    new = report.standings[Standing.NEW]
    for ids, n in report.resembling.items():
        of = ("it looks" if n == 1 else "all look") if n == new else f"{n} of the new {'looks' if n == 1 else 'look'}"
        lines.append(f"{of} like known issue {ids}: {_told_by(report, ids)}")
    lines += [*_without_effect(report), *_beyond(report, new)]
    for one in repaired(report):
        lines.append(
            f"no longer fails: known issue {one.issue.id}, on {one.issue.system} {one.version} ({one.result_id})"
        )
    if report.by_cause:
        lines.append(f"by cause: {report.by_cause}")
    for told in describe_heads(report):
        lines += [f"{told.name}: {printable(line)}" for line in told.lines]
    if page is not None:
        lines.append(f"report: {printable(str(page))}")
    return "\n".join(lines)


UNSTRUCK = "the planted fault "
"""How the reason of a pass begins on which a planted fault had no effect (`shardproof.laboratory.run_verdict`)."""


def _without_effect(report: Report) -> list[str]:
    """A line on planted faults that changed nothing, which a pass would hide."""
    planted = [result for result in report.results if result.scenario.faults]
    idle = [result for result in planted if result.verdict is Verdict.PASS and result.reason.startswith(UNSTRUCK)]
    if not idle:
        return []
    names = " and ".join(sorted({fault for result in idle for fault in result.scenario.faults}))
    return [f"{names} had no effect in {len(idle)} of {len(planted)}: `shardproof faults` runs each where it strikes"]


def _beyond(report: Report, new: int) -> list[str]:
    """A line on new failures with a torch that upstream does not name for the release. new: how many are new."""
    pairs = [
        pair.partition(":")[0] for result in report.results if result.counts_as is Standing.NEW
        for pair in result.outside_support if re.match(r"torch \d", pair)
    ]  # fmt: skip
    if not pairs:
        return []
    of = ("it ran" if new == 1 else "all ran") if len(pairs) == new else f"{len(pairs)} of the new ran"
    named = " and ".join(sorted(set(pairs)))
    return [f"{of} on {named}; upstream does not say that the release works with it: `--torch VERSION` gives another"]


def _told_by(report: Report, ids: str) -> str:
    """How a user finds out whether a failure is the known issue that it looks like."""
    entries = report.issues.entries_named(ids)
    systems = {issue.system for issue in entries}
    if len(systems) == 1 and all(issue.cure for issue in entries):
        return f"`--system {systems.pop()}@+cured` runs with it cured, and `--known` counts it as known"
    return "no cure tells it from another one with this face; `--known` counts it as that issue"


def _indented(lines: Iterable[str], spaces: int) -> list[str]:
    return [" " * spaces + line for line in lines]


def inert(text: str, colour: bool) -> str:
    """Without control characters, so that text from a library cannot drive the terminal; colours stay if wanted. Nor
    does it make a launcher that reads the log run the job again."""
    return unlike_a_broken_node(re.sub(_CONTROL_BUT_COLOUR if colour else _CONTROL, "", text))


def _plain(text: str, code: str) -> str:
    return text


def _ansi(text: str, code: str) -> str:
    return f"\x1b[{code}m{text}\x1b[0m" if code else text
