"""What runs on a node of a cluster: a laboratory of its own, in a process that a driver's calls reach.

A driver sends a `Setting` once and then scenarios, one a call. Before the first scenario the node says whether it is
fit (`NodeLaboratory.ready`): results of one run must come from one release of everything, so that a node with another
torch than the driver's, without a plugin, or without a GPU that was asked for is refused with the reason, before it can
give a wrong result.

A call answers with everything that a run keeps of a scenario: its results, what was observed, the logs of failed ranks.
Nothing of it stays on the node. Whatever goes wrong in a laboratory is a result of its own (`unknown`); the one error
that stops a run, a full disk, is part of the answer.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from shardproof.errors import HarnessError, UsageError
from shardproof.issues.known_issues import KnownIssues
from shardproof.laboratory.executor import attributed_by, installed_versions
from shardproof.laboratory.laboratory import Laboratory
from shardproof.protocol.plugin_modules import load_plugins
from shardproof.result import Result
from shardproof.scenario import Scenario
from shardproof.store import StoreFull
from shardproof.world import preflight
from shardproof.world.bounds import is_lockstep, world_of

Work = Literal["attributed", "once", "confirmed"]
"""What is asked of a scenario: all that a run wants to know of it, one look, or one look and a second at a failure."""

OURS = "SHARDPROOF_"
LOG_BYTES = 1 << 20
"""So much of the end of a rank's log travels to the driver."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What the scenarios of a run need of every node.

    * folder: the driver's current one, where plugins may lie. environment: the driver's variables of ours.
    * plugins, python, deadline_s: as of `Laboratory`.
    * versions: the release of everything installed that results depend on, as the driver has it.
    * samples: of each system, release and device that will run, the scenario with the largest world.
    * known: the issues that count as known.
    """

    folder: str
    environment: Mapping[str, str]
    plugins: tuple[str, ...]
    python: str | None
    deadline_s: float
    versions: Mapping[str, str]
    samples: tuple[Scenario, ...]
    known: KnownIssues

    @property
    def systems(self) -> set[str]:
        return {scenario.system for scenario in self.samples}


@dataclass(frozen=True)
class Answer:
    """What a node has to say of one scenario.

    * observations: packed, each with its scenario, in the order in which they were made.
    * logs: scenario id → file name → its end. full: why the node's disk stops the run; empty if it does not.
    """

    results: tuple[Result, ...]
    observations: tuple[tuple[Scenario, bytes], ...] = ()
    logs: Mapping[str, Mapping[str, bytes]] = field(default_factory=dict)
    full: str = ""


def setting_of(
    scenarios: Iterable[Scenario], plugins: tuple[str, ...], python: str | None, deadline_s: float, known: KnownIssues
) -> Setting:
    """The setting that a run of scenarios sends to its nodes: plugins, interpreter and versions of this process."""
    largest: dict[tuple[str, str, str], Scenario] = {}
    for scenario in scenarios:
        key = (scenario.system, scenario.version, scenario.device)
        if key not in largest or needed_cpus(scenario) > needed_cpus(largest[key]):
            largest[key] = scenario
    systems = {system for system, _, _ in largest}
    return Setting(
        folder=os.getcwd(), environment={name: value for name, value in os.environ.items() if name.startswith(OURS)},
        plugins=plugins, python=python, deadline_s=deadline_s, versions=installed_versions(systems, python),
        samples=tuple(largest.values()), known=known,
    )  # fmt: skip


def needed_cpus(scenario: Scenario) -> int:
    """How many CPUs a scenario takes: one a rank, and one in all where ranks are simulated or never start."""
    try:
        return 1 if is_lockstep(scenario) else world_of(scenario)
    except UsageError:
        return 1


class NodeLaboratory:
    """A laboratory that calls reach from elsewhere, several at once. The process is its own: `ready` changes its
    current folder and its environment.

    Args:
        jobs: scenarios at once.
    """

    def __init__(self, setting: Setting, jobs: int) -> None:
        self._setting, self._jobs = setting, jobs
        self._opened = ExitStack()
        self._laboratory: Laboratory | None = None
        self._logs = Path()
        self._keeping = threading.Lock()

    def ready(self) -> str:
        """Open the laboratory; why this node is not fit for the run, or nothing."""
        setting = self._setting
        os.environ.update(setting.environment)
        if Path(setting.folder).is_dir():
            os.chdir(setting.folder)
        try:
            load_plugins(setting.plugins)
            preflight.require_interpreter(setting.python)
            self._require_versions()
            preflight.require_machine(setting.samples, setting.python)
            preflight.require_releases(setting.samples, setting.python)
        except (UsageError, HarnessError) as error:
            return str(error)
        self._logs = Path(self._opened.enter_context(tempfile.TemporaryDirectory(prefix="shardproof-logs-")))
        self._laboratory = self._opened.enter_context(
            Laboratory(
                jobs=self._jobs, deadline_s=setting.deadline_s, plugins=setting.plugins, python=setting.python,
                keep=self._logs, systems=setting.systems,
            )
        )  # fmt: skip
        return ""

    def _require_versions(self) -> None:
        """Check that what is installed here is what the driver has, patch releases of Python aside.

        Raises:
            UsageError: something is another release, with both.
        """
        here = _compared(installed_versions(self._setting.systems, self._setting.python))
        wanted = _compared(self._setting.versions)
        for name in sorted(here.keys() | wanted.keys()):
            if here.get(name) != wanted.get(name):
                allowed = f"{wanted.get(name, 'none')}, which the driver has, so that all results are of one release"
                form = f"pip install {name}=={wanted[name]}" if name in wanted else f"pip uninstall {name}"
                raise UsageError.of(f"{name} on the node", here.get(name, "none"), allowed, form)

    def examine(self, scenario: Scenario, work: Work) -> Answer:
        """Do one piece of work on one scenario."""
        if self._laboratory is None:
            raise HarnessError("the node's laboratory is not open")
        laboratory, observations = self._laboratory, list[tuple[Scenario, bytes]]()

        def observed(scenario: Scenario, blob: bytes) -> None:
            observations.append((scenario, blob))

        try:
            if work == "attributed":
                results = attributed_by(laboratory, scenario, self._setting.known, observed)
            else:
                results = (laboratory.examine_one(scenario, confirm=work == "confirmed"),)
        except StoreFull as error:
            return Answer((), full=str(error))
        return Answer(results, tuple(observations), self._logs_of({scenario.id, *(s.id for s, _ in observations)}))

    def _logs_of(self, ids: Iterable[str]) -> dict[str, dict[str, bytes]]:
        """The logs that were kept of scenarios, which are removed here."""
        found = {}
        for key in sorted(ids):
            folder = self._logs / key
            with self._keeping:
                if folder.is_dir():
                    found[key] = {log.name: log.read_bytes()[-LOG_BYTES:] for log in sorted(folder.iterdir())}
                    shutil.rmtree(folder, ignore_errors=True)
        return found

    def close(self) -> None:
        """Close the node's laboratory, with all of its servers and ranks."""
        self._laboratory = None
        self._opened.close()


def _compared(versions: Mapping[str, str]) -> dict[str, str]:
    return {**versions, "python": ".".join(versions["python"].split(".")[:2])}
