"""Scenarios on several releases of a library, side by side: release × verdict × signature.

A release that cannot be installed or imported is a row that says so; it never ends the sweep and is never a pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Protocol

from packaging.version import Version

from shardproof.errors import UsageError
from shardproof.laboratory.laboratory import Laboratory
from shardproof.protocol.releases import Package
from shardproof.result import Result
from shardproof.scenario import Scenario
from shardproof.verdict import ExitStatus, Verdict, exit_status
from shardproof.versions import SOURCES, split_cures, with_cures

RANGE = ".."


@dataclass(frozen=True)
class Row:
    """What a scenario showed on one version. asked: the version as it was asked for."""

    asked: str
    result: Result


@dataclass(frozen=True)
class Sweep:
    """Rows in the order of the versions asked for. interrupted: by Ctrl-C, with the rows that were reached."""

    scenario: Scenario
    rows: tuple[Row, ...]
    interrupted: bool = False

    @property
    def status(self) -> ExitStatus:
        """1 as soon as one release fails, even if nothing could be told of others."""
        verdicts = [row.result.verdict for row in self.rows]
        if any(verdict.is_failure for verdict in verdicts):
            return ExitStatus.FAILURE
        return exit_status({verdict: verdicts.count(verdict) for verdict in Verdict})

    def to_json(self) -> dict[str, Any]:
        """The sweep in JSON types: `rows` are results by the command line's contract, with what was asked for."""
        return {
            "scenario": self.scenario.axis_values(),
            "interrupted": self.interrupted,
            "rows": [{"asked": row.asked, **row.result.to_json()} for row in self.rows],
        }


def versions(package: Package, texts: Sequence[str]) -> tuple[str, ...]:
    """The versions that `--versions` means: ranges `A..B` of declared releases, releases, `git:REV` and `path:DIR`.

    Without any: every declared release.

    Raises:
        UsageError: an end that is no version, or a range without a declared release.
    """
    if not texts:
        return tuple(release.version for release in package.releases)
    found: list[str] = []
    for text in texts:
        if text.startswith(SOURCES) or RANGE not in text:
            release, wanted = split_cures(text)
            named = release if release.startswith(SOURCES) else package.release(release).version
            found.append(with_cures(named, wanted))
        else:
            found += _declared(package, text)
    return tuple(dict.fromkeys(found))


def beyond(package: Package, texts: Sequence[str]) -> Iterator[str]:
    """A sentence on each end of a range that is no declared release, and is therefore not run itself."""
    for text in texts:
        for end in split_cures(text)[0].split(RANGE) if RANGE in text and not text.startswith(SOURCES) else ():
            if end and not package.declares(end):
                declared = ", ".join(release.version for release in package.releases)
                yield f"{text}: {end} is not declared, and not run; a range has the declared releases: {declared}"


def _declared(package: Package, text: str) -> list[str]:
    text, wanted = split_cures(text)
    first, _, last = text.partition(RANGE)
    if not first and not last:
        form = f"{package.releases[0].version}{RANGE}{package.newest.version}"
        raise UsageError.of("--versions", text, "a range with a beginning or an end; all releases without it", form)
    if len(package.releases) == 1:
        allowed = f"releases one by one, since {package.releases[0].version} is the only one that is declared here"
        raise UsageError.of("--versions", text, allowed, " ".join(f"--versions {end}" for end in (first, last) if end))
    low, high = (Version(package.release(end).version) for end in (first or package.releases[0].version, last))
    inside = [with_cures(r.version, wanted) for r in package.releases if low <= Version(r.version) <= high]
    if first and last and low > high:
        raise UsageError.of(
            "--versions",
            text,
            "a range from the older release to the newer",
            with_cures(f"{last}{RANGE}{first}", wanted),
        )
    if not inside:
        declared = ", ".join(release.version for release in package.releases)
        oldest = package.releases[0].version
        raise UsageError.of(
            "--versions", text, f"a range with one of: {declared}", f"{oldest}{RANGE}{package.newest.version}"
        )
    return inside


Keep = Callable[[Result], None]
"""What is done with each result as soon as it is there."""


class Progress(Protocol):
    """What shows how far a sweep is."""

    def finished(self, result: Result, /) -> None:
        """Count a result."""


Watch = Callable[[Mapping[str, float]], AbstractContextManager[Progress | None]]
"""Opens the progress of a sweep. It gets the ids of what will run, each with its share of the work."""


def sweep(
    scenario: Scenario, asked: Sequence[str], laboratory: Laboratory, keep: Keep | None = None,
    watch: Watch = lambda cells: nullcontext(),
) -> Sweep:  # fmt: skip
    """Run a scenario on every version, several at a time; Ctrl-C keeps the rows that are there.

    Args:
        laboratory: entered already.
        keep: gets each result as soon as it is there.
        watch: shows how far the sweep is; nothing is shown without.
    """
    cells = {replace(scenario, version=version): version for version in asked}
    rows: dict[str, Row] = {}
    interrupted = False
    try:
        for result in _examined(cells, laboratory, watch):
            rows[cells[result.scenario]] = Row(cells[result.scenario], result)
            if keep is not None:
                keep(result)
    except KeyboardInterrupt:
        interrupted = True
    return Sweep(scenario, tuple(rows[version] for version in asked if version in rows), interrupted)


def sweeps(
    scenarios: Sequence[Scenario], asked: Sequence[str], laboratory: Laboratory, keep: Keep | None = None,
    watch: Watch = lambda cells: nullcontext(),
) -> list[Sweep]:  # fmt: skip
    """A sweep of each scenario, in order; Ctrl-C keeps those that were begun. keep, watch: as `sweep` takes them."""
    found: list[Sweep] = []
    for scenario in scenarios:
        found.append(sweep(scenario, asked, laboratory, keep, watch))
        if found[-1].interrupted:
            break
    return found


def status(found: Sequence[Sweep]) -> int:
    """The exit status of all rows together; 130 after Ctrl-C."""
    if any(one.interrupted for one in found):
        return 130
    return Sweep(found[0].scenario, tuple(row for one in found for row in one.rows)).status


def _examined(cells: dict[Scenario, str], laboratory: Laboratory, watch: Watch) -> Iterator[Result]:
    with watch({cell.id: 1.0 for cell in cells}) as progress:
        for result in laboratory.examine(cells, lambda scenario, blob: None):
            if progress is not None:
                progress.finished(result)
            yield result
