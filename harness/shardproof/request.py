"""What a run is asked for, and how it ended: the values between the command line and the flow (`shardproof.run`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from shardproof.issues.known_issues import KnownIssues
from shardproof.laboratory.executor import installed_versions
from shardproof.report.model import Report
from shardproof.space.plan import Plan
from shardproof.verdict import ExitStatus


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a run was asked for.

    * out: folder of the database and the reports.
    * command: the arguments, for the record.
    * python: interpreter of the ranks.
    * releases: package under test → releases that will run.
    * known: issues that count as known; empty when scenario files were named, which report their plain verdicts.
    * issues: all entries, for what reports say of a finding.
    * json, junit: further files to write.
    * quiet: no progress is shown.
    * ray: the cluster that scenarios run on; none for this machine.
    * goes_on: the run of the folder that goes on with this plan; what it has a verdict of is not run again.
    """

    plan: Plan
    out: Path
    command: tuple[str, ...]
    seed: int
    jobs: int
    deadline_s: float
    plugins: tuple[str, ...] = ()
    python: str | None = None
    releases: Mapping[str, str] = field(default_factory=dict)
    known: KnownIssues = field(default_factory=KnownIssues)
    issues: KnownIssues = field(default_factory=KnownIssues)
    json: Path | None = None
    junit: Path | None = None
    quiet: bool = False
    ray: OnRay | None = None
    goes_on: str = ""

    def versions(self) -> dict[str, str]:
        """The release of everything that a run's results depend on, as the interpreter of its ranks has them."""
        systems = {scenario.system for scenario in self.plan.scenarios}
        return {**installed_versions(systems, self.python), **self.releases}


@dataclass(frozen=True)
class OnRay:
    """A cluster of Ray's to run on.

    * address: empty for what `ray.init` finds.
    * most: slots at once (`shardproof.cluster.handout`); as many as there is room for without.
    """

    address: str = ""
    most: int | None = None


@dataclass(frozen=True)
class Outcome:
    """How a run ended. interrupted: by Ctrl-C, with `report` holding what was reached."""

    report: Report
    page: Path
    interrupted: bool

    @property
    def status(self) -> ExitStatus:
        """The exit status that the command line promises. A planned scenario without a verdict is the harness's
        fault, unless the user pressed Ctrl-C."""
        report = replace(self.report, missing=()) if self.interrupted else self.report
        return report.status
