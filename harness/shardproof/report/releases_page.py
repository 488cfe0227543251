"""The page of sweeps: releases as columns, regressions as rows, a table for each system, from a folder's sweeps.

A cell has the verdict in words and leads to the page of its failure. Beside the tables the page says when each defect
came and went, and whether the system's `issues.toml` says the same (`came_and_went.py`); what contradicts it comes
first, since somebody has to correct either. The text on the terminal has the same sentences.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from packaging.version import Version

from shardproof.errors import UsageError
from shardproof.investigate.sweep_folder import Swept, joined
from shardproof.issues.findings import section_of
from shardproof.issues.known_issues import KnownIssues, known_issues_of
from shardproof.protocol.registry import system_named
from shardproof.protocol.releases import package_of
from shardproof.report.columns import naturally
from shardproof.report.defect_lifetimes import Entry, conclusive, contradictions, describe_lifetime, others
from shardproof.report.files import RELEASES
from shardproof.report.html import render, write_failure
from shardproof.report.model import Report
from shardproof.report.publish import publish
from shardproof.result import Result
from shardproof.scenario import Scenario
from shardproof.space.files import load_space
from shardproof.store import Run, Store
from shardproof.verdict import Verdict
from shardproof.versions import is_version, split_cures
from shardproof.wording.lines import brief


@dataclass(frozen=True)
class Cell:
    """One regression on one release. page: whether the result has a page of its own."""

    result: Result
    page: bool
    brief: str


@dataclass(frozen=True)
class Line:
    """One regression. cells: one for each column, None where it was not tried. lifetime: when it came and went. entry:
    what is known of it. against: how the entry is contradicted. otherwise: releases on which it fails in another
    way."""

    name: str
    scenario: Scenario
    cells: tuple[Cell | None, ...]
    lifetime: str
    entry: Entry | None
    against: tuple[str, ...]
    otherwise: tuple[str, ...]

    @property
    def agreement(self) -> str:
        """What the comparison with `issues.toml` comes to, in two words or so."""
        if self.entry is None:
            return "no entry"
        if self.against:
            return "contradicts"
        judged = any(cell and conclusive(cell.result) is not None for cell in self.cells)
        return "agrees" if self.entry.comparable and judged else "not comparable"


@dataclass(frozen=True)
class Table:
    """The sweeps of one system. columns: versions as they were asked for, releases first, oldest to newest."""

    system: str
    columns: tuple[str, ...]
    lines: tuple[Line, ...]

    @property
    def counts(self) -> dict[Verdict, int]:
        """How many cells have which verdict."""
        found = Counter(cell.result.verdict for line in self.lines for cell in line.cells if cell)
        return {verdict: found[verdict] for verdict in Verdict if found[verdict]}


def tables(rows: Iterable[Swept]) -> tuple[Table, ...]:
    """A table for each system, of rows in the order of their names."""
    found: dict[str, list[Swept]] = {}
    for row in rows:
        found.setdefault(row.scenario.system, []).append(row)
    return tuple(_table(system, found[system]) for system in sorted(found))


def _table(system: str, rows: Sequence[Swept]) -> Table:
    columns = _columns(version for row in rows for version in row.results)
    entries = _entries(system)
    declared = [release.version for release in package_of(system_named(system)).releases]
    lines = [_line(row, columns, entries.get(row.scenario.id), declared) for row in rows]
    return Table(system, columns, tuple(sorted(lines, key=lambda line: naturally(line.name))))


def _columns(versions: Iterable[str]) -> tuple[str, ...]:
    """Releases by age, each with its cured forms behind it; then working trees and commits, as they were asked for."""
    seen = list(dict.fromkeys(versions))
    releases = [version for version in seen if is_version(split_cures(version)[0])]
    releases.sort(key=lambda version: (Version(split_cures(version)[0]), version))
    return (*releases, *(version for version in seen if version not in releases))


def _line(row: Swept, columns: Sequence[str], known: tuple[str, Entry] | None, declared: Sequence[str]) -> Line:
    name, entry = known or (row.name, None)
    cells = tuple(_cell(row.results[version]) if version in row.results else None for version in columns)
    against = contradictions(row.results, entry) if entry else ()
    otherwise = others(row.results, entry) if entry else ()
    return Line(name, row.scenario, cells, describe_lifetime(row.results, declared), entry, against, otherwise)


def _cell(result: Result) -> Cell:
    return Cell(result, result.verdict.is_failure or result.verdict is Verdict.UNKNOWN, brief(result))


def _entries(system: str) -> dict[str, tuple[str, Entry]]:
    """Id of a regression's scenario, without a version → its name and its entry in `issues.toml`."""
    info = system_named(system)
    issues = {issue.id: issue for issue in known_issues_of(info)}
    found = {}
    for finding in section_of(info).findings:
        for regression in finding.regressions:
            name = f"regressions/{system}-{regression}"
            for scenario in load_space(name).scenarios:
                found[replace(scenario, version="").id] = (name, Entry(finding, issues.get(finding.id)))
    return found


def _sentences(found: Iterable[Table], fresh: frozenset[str]) -> list[str]:
    """A line for each contradiction between swept results and `issues.toml`, limited to rows with a fresh result."""
    swept = [line for table in found for line in table.lines if fresh & {c.result.id for c in line.cells if c}]
    return [f"{line.name}: {said}" for line in swept for said in line.against]


def write_releases(store: Store, folder: Path, issues: KnownIssues, fresh: frozenset[str]) -> tuple[Path, list[str]]:
    """Write the page of all sweeps of a folder's database, and the pages of failures that it leads to.

    Args:
        fresh: ids of the results of this command. Their pages are written anew; others keep the page that is there.

    Returns:
        The path of the page, and what of this command contradicts `issues.toml`.

    Raises:
        UsageError: a place cannot be written.
        StoreFull: the disk is full.
    """
    rows = joined(store)
    found = tables(rows)
    results = tuple(result for row in rows for result in row.results.values())
    report = Report(_latest(store), results, issues=issues)
    for cell in (cell for table in found for line in table.lines for cell in line.cells if cell and cell.page):
        there = folder / "failures" / f"{cell.result.id}.html"
        if cell.result.id in fresh or not there.is_file():
            write_failure(report, cell.result, folder, RELEASES)
    return publish(folder / RELEASES, render_releases(found)), _sentences(found, fresh)


def _latest(store: Store) -> Run:
    runs = store.runs()
    if not runs:
        raise UsageError.of("sweeps", str(store.path), "a database with a sweep", "shardproof sweep bug.toml")
    return runs[-1]


def render_releases(found: Sequence[Table]) -> str:
    """The page as text."""
    return render("releases.html", tables=found, sentence=_sentence(found), short_version=_short)


def _sentence(found: Sequence[Table]) -> str:
    against = sum(1 for table in found for line in table.lines if line.against)
    lines, columns = sum(len(table.lines) for table in found), {column for table in found for column in table.columns}
    swept = f"{lines} regression{'s' * (lines != 1)} on {len(columns)} release{'s' * (len(columns) != 1)}"
    return f"{swept}; {against} contradict{'s' * (against == 1)} issues.toml" if against else swept


def _short(version: str) -> str:
    """A version as the head of a column: a working tree by the name of its folder, a commit by twelve characters."""
    release, _ = split_cures(version)
    if release.startswith("path:"):
        return "path:…/" + release.rstrip("/").rpartition("/")[2]
    return f"git:{release[4:16]}" if release.startswith("git:") else version
