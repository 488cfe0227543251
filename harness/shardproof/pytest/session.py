"""A session of `pytest --shardproof NAME`: the items that its plan comes to, and the folder that keeps its results.

Under xdist every worker makes the plan, as xdist asks of plugins: a plan depends on nothing but the command. The
controller makes it too, so that a slip of the keyboard is told once, as pytest's usage error, before anything starts.
Only the controller writes results, as they come in with the reports.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

from shardproof.cli import arguments
from shardproof.errors import UsageError
from shardproof.pytest.items import (
    Examination,
    HarnessFailedError,
    ScenarioFailedError,
    as_pytest_usage_errors,
    bench,
    examination,
    readable_id,
    register,
    system_mark,
)  # fmt: skip
from shardproof.result import from_elements
from shardproof.scenario import Scenario
from shardproof.space.plan import Plan

NODE = "shardproof"
_NAMED = f"{NODE}::"
_OPTIONS = ("system", "set", "sample", "shard")


def collect(config: pytest.Config) -> None:
    """Have this session collect scenarios, and nothing else unless the command line names paths.

    An argument such as `shardproof::torch-fsdp2/…`, copied from pytest's summary, chooses that scenario.
    """
    register(config)
    named = {word for word in config.args if word.startswith(_NAMED)}
    paths = [word for word in config.args if word not in named]
    config.args = paths if config.args_source is pytest.Config.ArgsSource.ARGS else []
    config.pluginmanager.register(_Session(config, named), "shardproof-session")


def keep(config: pytest.Config) -> None:
    """Have the results of this session written into the folder of `--shardproof-out`."""
    if not hasattr(config, "workerinput"):  # which xdist gives its workers
        config.pluginmanager.register(_Kept(config), "shardproof-kept")


class _Session:
    """Collects the scenarios of a plan. named: the items of it that the command line names; all without any."""

    def __init__(self, config: pytest.Config, named: Set[str]) -> None:
        self.config, self.named = config, named

    @cached_property
    def plan(self) -> Plan:
        """What the options ask for.

        Raises:
            pytest.UsageError: it is not there, or takes longer than its space allows.
        """
        with as_pytest_usage_errors():
            bench(self.config)
            chosen = {name: self.config.getoption(f"shardproof_{name}") for name in _OPTIONS}
            sample = None if chosen["sample"] is None else _whole_number(chosen["sample"])
            names, systems = tuple(self.config.getoption("shardproof")), tuple(chosen["system"])
            plan = arguments.planned(names, systems, tuple(chosen["set"]), None, sample, 0, (), chosen["shard"])
            plan.require_budget()
            return plan

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionstart(self) -> None:
        """Find out what is wrong with the command line before anything starts."""
        bench(self.config).systems |= {scenario.system for scenario in self.plan.supported}

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, session: pytest.Session, items: list[pytest.Item]) -> None:
        """Put the scenarios behind what else was collected, before `-k`, `-m` and `--lf` choose."""
        collector = Scenarios.from_parent(session, name=NODE, nodeid=NODE, plan=self.plan)
        collector.ihook.pytest_collectstart(collector=collector)
        report = collector.ihook.pytest_make_collect_report(collector=collector)
        if unknown := self.named - {item.nodeid for item in report.result}:
            raise pytest.UsageError(f"shardproof: not in the plan: {', '.join(sorted(unknown))}")
        chosen = [item for item in report.result if not self.named or item.nodeid in self.named]
        collector.ihook.pytest_collectreport(report=report)
        for item in chosen:
            item.ihook.pytest_itemcollected(item=item)
        if left := [item for item in report.result if item not in chosen]:
            self.config.hook.pytest_deselected(items=left)
        items += chosen


def _whole_number(text: str) -> int:
    from shardproof.cli.options import SAMPLE

    try:
        return int(SAMPLE(text))
    except Exception:
        allowed = f"a whole number from {SAMPLE.min} to {SAMPLE.max}"
        raise UsageError.of("--shardproof-sample", text, allowed, "--shardproof-sample 20") from None


class Scenarios(pytest.Collector):
    """The node above all scenarios of a plan."""

    def __init__(self, *, plan: Plan, **others: Any) -> None:
        super().__init__(**others)
        self.plan = plan

    def collect(self) -> Iterator[pytest.Item]:
        for scenario in self.plan.scenarios:
            name, known = readable_id(scenario), self.plan.is_walk
            item = ScenarioItem.from_parent(self, name=name, scenario=scenario, known=known)
            item.add_marker(system_mark(self.config, scenario.system))
            yield item


class ScenarioItem(pytest.Item):
    """One scenario. known: whether known issues count, as in walks, or not, as for scenario files."""

    def __init__(self, *, scenario: Scenario, known: bool, **others: Any) -> None:
        super().__init__(**others)
        self.scenario, self.known = scenario, known
        self.found: Examination | None = None

    def setup(self) -> None:
        """Observe and judge; what goes wrong here is no failure of the library's."""
        self.found = examination(self, self.scenario, self.known)

    def runtest(self) -> None:
        """Pass or fail."""
        assert self.found
        self.found.check()

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """What differs, without a traceback through shardproof."""
        if isinstance(excinfo.value, ScenarioFailedError | HarnessFailedError):
            return excinfo.getrepr(style="value")
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, int, str]:
        """A place for reports: no file, but the node's name; and a heading."""
        return self.config.rootpath / NODE, 0, f"scenario {self.scenario.id}: {self.scenario}"


class _Kept:
    """Writes results into a folder, as `shardproof run --out` does: the database, the page, the summary."""

    def __init__(self, config: pytest.Config) -> None:
        self.config, self.stack, self.page = config, ExitStack(), None
        config.add_cleanup(self.stack.close)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionstart(self) -> None:
        """Begin a run in the folder."""
        from shardproof.folders import at_work_in
        from shardproof.request import Request
        from shardproof.store import DATABASE, Store

        with as_pytest_usage_errors():
            self.out = Path(self.config.getoption("shardproof_out"))
            arguments.require_output_files(self.out)
            self.stack.enter_context(at_work_in(arguments.writable_folder(self.out)))
            self.store = self.stack.enter_context(Store(self.out / DATABASE))
        session = self.config.pluginmanager.get_plugin("shardproof-session")
        plan = session.plan if isinstance(session, _Session) else Plan(())
        command = ("pytest", *map(str, self.config.invocation_params.args))
        request = Request(plan=plan, out=self.out, command=command, seed=0, jobs=1, deadline_s=0.0)
        self.run_id = self.store.begin_run(command, 0, request.versions(), plan.excluded)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the results that come with a report."""
        results = [from_elements(data) for data in getattr(report, "shardproof", ())]
        self.store.plan(self.run_id, [result.scenario for result in results])
        self.store.finished_many(self.run_id, results)

    def pytest_sessionfinish(self) -> None:
        """Write the page and the summary of what was run."""
        from shardproof.report.files import write_reports
        from shardproof.report.model import Report

        self.store.end_run(self.run_id)
        page = write_reports(Report.from_store(self.store, self.run_id, arguments.shipped_issues()), self.out)
        self.stack.close()
        reporter = self.config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None:
            reporter.write_line(f"\nreport of shardproof: {page}")
