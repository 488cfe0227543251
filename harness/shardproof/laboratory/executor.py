"""Runs the scenarios of a plan to their results, on this machine or on the nodes of a cluster.

The run (`shardproof.run`) plans, stores, shows progress and reports. An executor gives it results. There are two:

* `LocalExecutor`, here: one laboratory of this machine, as many scenarios at once as it has jobs.
* `shardproof.cluster.handout.ClusterExecutor`: a laboratory on each node of a cluster, which hands scenarios out to
  them.

Both do the same with one scenario, and it is one piece of work: `attributed_by`. The scenario, its twin, the run that
confirms a failure and the run with a known defect cured belong to one piece, so that whoever does it does all of it, on
one machine, with one kind of CPU.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from types import TracebackType
from typing import Protocol, Self

from shardproof import __version__
from shardproof.issues.known_issues import KnownIssues
from shardproof.laboratory.attribution import attributed
from shardproof.laboratory.laboratory import Laboratory, Observed
from shardproof.protocol.registry import system_named
from shardproof.result import Result
from shardproof.scenario import Scenario
from shardproof.world.interpreter import interpreter


class Executor(Protocol):
    """A context in which scenarios run."""

    def attributed(self, scenarios: Iterable[Scenario], observed: Observed) -> Iterator[tuple[Result, ...]]:
        """What `attributed_by` makes of each scenario, in the order in which they are reached. `observed` gets what
        was observed of a scenario before its results are given out.

        Raises:
            StoreFull: a disk filled; results given out before stay valid.
        """
        ...

    def examine_one(self, scenario: Scenario, *, confirm: bool = True) -> Result:
        """As `Laboratory.examine_one`."""
        ...

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def attributed_by(
    laboratory: Laboratory, scenario: Scenario, known: KnownIssues, observed: Observed
) -> tuple[Result, ...]:
    """A scenario's result, confirmed or known, and after it what fails behind a known issue."""

    def once(scenario: Scenario) -> Result:
        return laboratory.examine_one(scenario, observed, confirm=False)

    return attributed(once(scenario), known, once, laboratory.confirmed, laboratory.witness)


class LocalExecutor:
    """Runs scenarios in a laboratory of this machine, which it opens and closes."""

    def __init__(self, laboratory: Laboratory, known: KnownIssues) -> None:
        self._laboratory, self._known = laboratory, known

    def __enter__(self) -> Self:
        self._laboratory.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._laboratory.__exit__(kind, error, trace)

    def attributed(self, scenarios: Iterable[Scenario], observed: Observed) -> Iterator[tuple[Result, ...]]:
        """See `Executor`."""
        return self._laboratory.side_by_side(
            lambda scenario: attributed_by(self._laboratory, scenario, self._known, observed), scenarios
        )

    def examine_one(self, scenario: Scenario, *, confirm: bool = True) -> Result:
        """See `Executor`."""
        return self._laboratory.examine_one(scenario, confirm=confirm)


def installed_versions(systems: Collection[str], python: str | None) -> dict[str, str]:
    """The release of everything that results of these systems depend on, as the interpreter of the ranks has it.

    Args:
        systems: names. python: path of the interpreter; this process's own without one.
    """
    wanted = {"torch", "numpy", "ml_dtypes"}
    for system in systems:
        wanted |= set(system_named(system).distributions)
    ranks = interpreter(python)
    found = {name: release for name in sorted(wanted) if (release := ranks.release(name))}
    return {"python": ranks.python, "shardproof": __version__, **found}
