"""Sweeps that are kept in a folder, so that several of them join into one table of releases × regressions.

`shardproof sweep` prints the table of what it has just run. What a maintainer wants to see is larger: every regression
of a library, on every release, put together from sweeps of several days. So each result goes into the folder's
database `sweeps.sqlite` as soon as it is there. That is a results database as a run's (`harness/shardproof/store.py`),
in a file of its own, so that a sweep may use the folder of a run and neither resumes nor is reported as one. Each
scenario that is swept is a run of it, with the command `sweep NAME --system S --versions V …`, from which the table
takes the name of the row.

The rows are scenarios without a version: the same regression that is swept again, on other releases or on the same
ones, stays one row, and of a cell the newest result counts.

*Does not verify*: that results of two sweeps come from the same torch or machine; each result says what it ran on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Self

from shardproof.folders import REPORTS
from shardproof.result import Result
from shardproof.scenario import Scenario
from shardproof.store import Store

DATABASE = "sweeps.sqlite"
COMMAND = "sweep"


@dataclass(frozen=True)
class Swept:
    """One row. name: by which it was asked for last. scenario: without a version. results: version as it was asked for
    → its newest result."""

    name: str
    scenario: Scenario
    results: Mapping[str, Result]


def folder_of(system: str) -> Path:
    """The folder of the sweeps of a system for which none was named."""
    return REPORTS / f"sweep-{system.replace(':', '-')}"  # artifacts of GitHub may have no colon in their paths


def joined(store: Store) -> tuple[Swept, ...]:
    """All sweeps of a database, a row for each scenario, in the order in which they were first asked for."""
    names: dict[Scenario, str] = {}
    cells: dict[Scenario, dict[str, Result]] = {}
    for run in store.runs():
        if run.command[:1] != (COMMAND,) or len(run.command) < 2:
            continue
        for result in store.results(run.id):
            scenario = replace(result.scenario, version="")
            names[scenario] = run.command[1]
            cells.setdefault(scenario, {})[result.scenario.version] = result
    return tuple(Swept(names[scenario], scenario, results) for scenario, results in cells.items())


class Keeper:
    """Writes the results of one command into a folder's database; entered, it has the database open.

    names: scenario without a version → the name by which it was asked for. asked: the versions of each.
    """

    def __init__(self, folder: Path, names: Mapping[Scenario, str], asked: Sequence[str]) -> None:
        self.folder, self._names, self._asked = folder, dict(names), tuple(asked)
        self._runs: dict[Scenario, str] = {}
        self._absent: dict[str, int] = {}

    def __enter__(self) -> Self:
        self.store = Store(self.folder / DATABASE)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.store.close()

    def __call__(self, result: Result) -> None:
        """Store a result."""
        scenario = replace(result.scenario, version="")
        run = self._runs.get(scenario) or self._begin(scenario)
        self.store.finished(run, result)
        self._absent[run] -= 1
        if not self._absent[run]:
            self.store.end_run(run)

    @property
    def fresh(self) -> frozenset[str]:
        """The ids of the results that this command stored."""
        return frozenset(result.id for run in self._runs.values() for result in self.store.results(run))

    def _begin(self, scenario: Scenario) -> str:
        versions = [word for version in self._asked for word in ("--versions", version)]
        command = (COMMAND, self._names[scenario], "--system", scenario.system, *versions)
        asked = [replace(scenario, version=version) for version in self._asked]
        run = self.store.begin_run(command, 0, {}, planned=asked)
        self._runs[scenario], self._absent[run] = run, len(self._asked)
        return run
