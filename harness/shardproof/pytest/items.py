"""Scenarios as pytest items: their ids, how they are run, and how a verdict becomes passed, failed, skipped or
xfailed.

| what a scenario shows | what pytest reports |
|---|---|
| pass | passed |
| new failure | failed; the message is all that differs, in the wording of `torch.testing.assert_close` |
| known issue | xfailed, with the id of the issue as the reason |
| unsupported | skipped, with the reason |
| unknown: the harness failed | error, in the setup |

Each pytest process, and so each worker of xdist, has one laboratory, which takes one scenario at a time. It opens for
the first scenario and closes with the process's session. Of several ranks of torchrun each runs its share of the
scenarios, and skips those of others.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from shardproof.cli import arguments
from shardproof.errors import HarnessError, UsageError, printable
from shardproof.issues.known_issues import KnownIssues
from shardproof.program import ARMS, is_arms
from shardproof.protocol.plugin_modules import load_plugins
from shardproof.protocol.registry import system_named
from shardproof.report.text import render_result
from shardproof.result import Result, with_elements
from shardproof.scenario import AXES, Scenario
from shardproof.space.files import Space, load_space
from shardproof.space.plan import Selection, make_plan
from shardproof.trainer.arms import trainer_of
from shardproof.trainer.cells import values_of
from shardproof.trainer.system import register_described
from shardproof.verdict import Standing, Verdict
from shardproof.versions import TREE, with_cures
from shardproof.wording.lines import headline
from shardproof.world import preflight
from shardproof.world.bounds import require_world

if TYPE_CHECKING:
    from shardproof.laboratory.laboratory import Laboratory
    from shardproof.trainer.described import Described

RESULTS = pytest.StashKey[tuple[Result, ...]]()
"""On an item: what its scenario showed."""

ASKED = pytest.StashKey[Scenario]()
"""On an item: its scenario, from before it runs."""

_MOST_OF_A_PROGRAM = 40
_MOST_OF_A_CELL = 80

DECORATOR = "@scenarios"
"""How errors call the decorator `shardproof.pytest.scenarios`."""


class HarnessFailedError(HarnessError):
    """shardproof could not come to a verdict. Nothing is known of the library under test."""


class ScenarioFailedError(AssertionError):
    """A scenario's observed state differs from the oracle's. The message lists every difference."""


def readable_id(scenario: Scenario) -> str:
    """The id of a scenario as an item's name, unique by its digest: `torch-fsdp2/dense-bf16-1x2x1-resume-1a2b3c4d5e6f`.

    Of a trainer's cell it has the values that are not the first of their axis, or `plain` where there are none:
    `my_trainer:Mine/mesh:4+offload:true-1a2b3c4d5e6f`.

    Its characters are those that `-k` and `-m` take, so that `fp32/param=bf16` becomes `fp32+param:bf16`.
    """
    release = "path" if scenario.release.startswith(TREE) else scenario.release
    version = with_cures(release, scenario.cures)
    program = scenario.program.replace(" ", "+")[:_MOST_OF_A_PROGRAM]
    parts: tuple[str, ...] = (scenario.model, scenario.axis_text("dtype"), str(scenario.mesh), program, scenario.id)
    if is_arms(scenario.program):
        cell = "+".join(scenario.options)[:_MOST_OF_A_CELL] or "plain"
        parts = (cell, *((program,) if program != ARMS else ()), scenario.id)
    system = scenario.system + (f"@{version}" if version else "")
    return f"{_typeable(system)}/{_typeable('-'.join(parts))}"


def _typeable(text: str) -> str:
    return re.sub(r"[^\w.+:@-]", "_", text.replace("/", "+").replace("=", ":"), flags=re.ASCII)


def system_mark(config: pytest.Config, system: str) -> pytest.MarkDecorator:
    """The marker that scenarios of a system have, which is its name, and of a trainer `my_trainer.Mine`; known to
    `--strict-markers` from now on."""
    name = system.replace(":", ".")  # pytest takes a marker's name to end at the first colon
    line = f"{name}: scenarios of that system"
    if line not in config.getini("markers"):
        config.addinivalue_line("markers", line)
    mark: pytest.MarkDecorator = getattr(pytest.mark, name)
    return mark


@contextmanager
def as_pytest_usage_errors() -> Iterator[None]:
    """What is wrong with a word of the user's is an error of pytest's usage."""
    try:
        yield
    except UsageError as error:
        raise pytest.UsageError(f"shardproof: {error}") from None


def stated(
    config: pytest.Config, names: Sequence[str], system: str, axes: Mapping[str, object]
) -> tuple[Scenario, ...]:
    """The scenarios that a decorator asks for, those that their system refuses last.

    Raises:
        pytest.UsageError: an unknown name, system, axis or value; a scenario that has no right answer.
    """
    with as_pytest_usage_errors():
        bench(config)  # whose plugins may bring the system
        if (unknown := next((axis for axis in axes if axis not in AXES), None)) is not None:
            raise UsageError.of(f"{DECORATOR}: axis", unknown, ("known", *AXES), '@scenarios(dtype="bf16")')
        spaces = [load_space(name) for name in names] or [Space("smoke", "", (), None, ({},))]
        systems = (arguments.placed(system, config.rootpath),) if system else ()
        given = {axis: _texts(values) for axis, values in axes.items()}
        return make_plan(spaces, Selection(systems, given, given_by=DECORATOR)).scenarios


def _texts(values: object) -> tuple[str, ...]:
    listed = values if isinstance(values, list | tuple) else [values]
    return tuple(str(value).lower() if isinstance(value, bool) else str(value) for value in listed)


@dataclass
class Bench:
    """The laboratory of a pytest process.

    * modules: plugins of shardproof's that are loaded, for the ranks to import too. systems: that scenarios of this
      process are of.
    * trainers: name of a trainer's system → its file and class.
    """

    config: pytest.Config
    modules: tuple[str, ...]
    systems: set[str] = field(default_factory=set)
    issues: KnownIssues = field(default_factory=arguments.shipped_issues)
    trainers: dict[str, str] = field(default_factory=dict)
    _open: Laboratory | None = None

    def use_trainer(self, trainer: Described) -> None:
        """Have a trainer known as a system: here, and by its file to the ranks, with the known issues beside that file.

        Raises:
            UsageError: another trainer in this session has the same name. A scenario names its system, so that one of
                the two would be run in the place of the other.
        """
        if self.trainers.setdefault(trainer.system, trainer.plugin) != trainer.plugin:
            allowed = f"names that differ: {self.trainers[trainer.system]} has it already"
            raise UsageError.of("trainer", trainer.plugin, allowed, "another name for the file or for the class")
        register_described(trainer)
        if trainer.plugin not in self.modules:
            self.modules = (*self.modules, trainer.plugin)
            self.issues = arguments.shipped_issues()

    def examined(self, scenario: Scenario, known: KnownIssues) -> tuple[Result, ...]:
        """What a scenario shows and, after a known issue in front, what fails behind it."""
        from shardproof.laboratory.attribution import attributed

        require_world(scenario)
        preflight.require_machine([scenario], None)
        laboratory = self._laboratory()

        def once(wanted: Scenario) -> Result:
            return laboratory.examine_one(wanted, confirm=False)

        return attributed(once(scenario), known, once, laboratory.confirmed, laboratory.witness)

    def _laboratory(self) -> Laboratory:
        if self._open is None:
            from shardproof.laboratory.laboratory import Laboratory

            stack = ExitStack()
            out = self.config.getoption("shardproof_out")
            self._open = stack.enter_context(
                Laboratory(
                    jobs=1, deadline_s=_seconds(self.config), plugins=self.modules, systems=self.systems or None,
                    keep=Path(out) / "logs" if out else None,
                )
            )  # fmt: skip
            self.config.add_cleanup(stack.close)
        return self._open


def _seconds(config: pytest.Config) -> float:
    from shardproof.cli.options import DEADLINE_S

    with as_pytest_usage_errors():
        given = config.getoption("shardproof_deadline_s")
        try:
            return float(DEADLINE_S(given))
        except Exception:
            allowed = f"seconds from {DEADLINE_S.min} to {DEADLINE_S.max}"
            form = "--shardproof-deadline-s 60"
            raise UsageError.of("--shardproof-deadline-s", given, allowed, form) from None


_BENCH = pytest.StashKey[Bench]()


def bench(config: pytest.Config) -> Bench:
    """The laboratory of this process, with shardproof's plugins loaded and nothing started yet.

    Raises:
        pytest.UsageError: a plugin cannot be imported, a clone is none, or the deadline is no number of seconds.
    """
    if _BENCH not in config.stash:
        _seconds(config)
        with as_pytest_usage_errors():
            modules = load_plugins(config.getoption("shardproof_plugin"))
            preflight.use_clones(config.getoption("shardproof_clone"))
        config.stash[_BENCH] = Bench(config, modules)
    return config.stash[_BENCH]


@dataclass
class Examination:
    """A scenario that was run for a test, and what it showed.

    * results: its own first; after it what fails behind a known issue.
    """

    scenario: Scenario
    results: tuple[Result, ...]
    issues: KnownIssues
    looked: bool = False

    @property
    def result(self) -> Result:
        """The result of the first scenario. Reading it marks the test as judging by its own assertions, so that a
        failing verdict alone no longer fails the test."""
        self.looked = True
        return self.results[0]

    def check(self) -> None:
        """Pass where every compared bit is as it has to be.

        Raises:
            ScenarioFailedError: it is not, and no known issue is the reason.
            pytest.xfail.Exception: a known issue is.
        """
        __tracebackhide__ = True
        self.looked = True
        new = [result for result in self.results if result.counts_as is Standing.NEW]
        if new:
            raise ScenarioFailedError("\n".join(map(self._failure_message, new)))
        known = [result for result in self.results if result.counts_as is Standing.KNOWN]
        if known:
            pytest.xfail(known[0].standing)
            raise ScenarioFailedError("\n".join(map(self._told, known)))  # with --runxfail

    def _failure_message(self, result: Result) -> str:
        return failure_message(result, emulated_only=self.issues.emulated_only(result))


class Awaited:
    """Stands for the argument `result` of a test of a trainer's cell until the cell has been run."""


class LookedAt:
    """The result of an examination as a test's argument. Reading anything of it marks the test as judging by its own
    assertions, as `Examination.result` does; a test that only takes it has not looked."""

    def __init__(self, examined: Examination) -> None:
        self._examined = examined

    def __getattr__(self, name: str) -> Any:
        return getattr(self._examined.result, name)

    def __repr__(self) -> str:
        return repr(self._examined.results[0])


def failure_message(result: Result, *, emulated_only: bool = False) -> str:
    """A failure as the message of an assertion: what kind it is, everything that differs, and the scenario's file."""
    if result.arms:
        return cell_message(result)
    mismatch = result.verdict is Verdict.MISMATCH
    first = "Tensor-likes are not equal!" if mismatch else f"{result.verdict.value}: {printable(headline(result))}"
    return (
        f"{first}\n\n{render_result(result, emulated_only=emulated_only)}\n"
        f"The scenario as a file, for `shardproof run FILE.toml`:\n\n{result.scenario.to_toml()}"
    )


def cell_message(result: Result) -> str:
    """A trainer's cell that failed as the message of an assertion: the sentence of each arm that failed, what raised,
    and the command that shows every difference."""
    cell = " ".join(result.scenario.options) or "first value of every axis"
    failed = [arm for arm in result.arms if Verdict(arm.verdict).is_failure]
    lines = [f"{result.verdict.value} of {result.system}, {cell}", ""]
    for arm in failed:
        first, *more = arm.paragraphs or (arm.verdict,)
        lines += [f"  {arm.name}: {first}", *(f"    {paragraph}" for paragraph in more)]
    if result.error is not None and result.error.traceback:
        lines += ["", *(f"  {line}" for line in result.error.traceback.rstrip().splitlines())]
    lines += ["", "with every difference:", f"  {_command(result.scenario)}"]
    return printable("\n".join(lines))


def _command(scenario: Scenario) -> str:
    """The command that runs a trainer's cell."""
    trainer = trainer_of(scenario)
    words = ["shardproof", "trainer", trainer.plugin]
    for axis, text in values_of(trainer, scenario).items():
        words += ["--set", f"{axis}={text}"]
    words += ["--version", scenario.version] if scenario.version else []
    words += ["--program", scenario.program] if scenario.program != ARMS else []
    return shlex.join(words)


def examination(item: pytest.Item, scenario: Scenario, known: bool) -> Examination:
    """Run the scenario of an item, in its setup.

    Raises:
        HarnessFailedError: there is no verdict.
        pytest.skip.Exception: the system refuses it, or another rank of torchrun runs it.
    """
    __tracebackhide__ = True
    item.stash[ASKED] = scenario
    if other := _other_rank(scenario, os.environ):
        raise pytest.skip.Exception(f"{other} of torchrun runs it", _use_item_location=True)
    at = bench(item.config)
    at.systems |= {each.stash[ASKED].system for each in item.session.items if ASKED in each.stash}
    refused = None if scenario.version else system_named(scenario.system).refusal(scenario)
    if refused is not None:
        results: tuple[Result, ...] = (_refused(scenario, refused),)
    else:
        results = at.examined(scenario, at.issues if known else KnownIssues())
    item.stash[RESULTS] = results
    item.user_properties += _properties(results[0])
    for result in results:
        if result.verdict is Verdict.UNKNOWN:
            raise HarnessFailedError(f"no verdict on scenario {result.id}: {printable(result.reason)}")
    if results[0].verdict is Verdict.UNSUPPORTED:
        raise pytest.skip.Exception(results[0].reason, _use_item_location=True)
    return Examination(scenario, results, at.issues)


def _refused(scenario: Scenario, reason: str) -> Result:
    return Result(scenario, scenario.system, scenario.version, Verdict.UNSUPPORTED, reason=reason)


def _other_rank(scenario: Scenario, environment: Mapping[str, str]) -> str:
    """The rank of torchrun that runs a scenario; empty for this process."""
    if "TORCHELASTIC_RUN_ID" not in environment:
        return ""
    wanted = int(scenario.id, 16) % int(environment.get("WORLD_SIZE", "1"))
    return "" if wanted == int(environment.get("RANK", "0")) else f"rank {wanted}"


def _properties(result: Result) -> list[tuple[str, object]]:
    """What JUnit and reportlog show of a result."""
    found = {
        "id": result.id, "scenario": str(result.scenario), "system": result.system, "version": result.version,
        "verdict": result.verdict.value, "standing": result.counts_as.value, "signature": result.signature,
        "known_issue": result.known_issue or "", "known_by": result.known_by, "emulated": ", ".join(result.emulated),
    }  # fmt: skip
    return [(f"shardproof.{name}", value) for name, value in found.items() if value]


class _Reports:
    """Hooks that only matter once there is a scenario."""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """The results travel with the report of the setup, to whoever writes them: xdist's controller, reportlog."""
        report = yield
        if report.when == "setup" and RESULTS in item.stash:
            vars(report)["shardproof"] = [with_elements(result) for result in item.stash[RESULTS]]
        return report

    @pytest.hookimpl(wrapper=True)
    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function) -> Generator[None, object, object]:
        """A decorated test that did not look at its scenario passes or fails with it."""
        __tracebackhide__ = True
        found = pyfuncitem.funcargs.get("shardproof")
        if isinstance(found, Examination) and isinstance(pyfuncitem.funcargs.get("result"), Awaited):
            pyfuncitem.funcargs["result"] = LookedAt(found)
        done = yield
        if isinstance(found, Examination) and not found.looked:
            found.check()
        return done


def register(config: pytest.Config) -> None:
    """Have reports carry results."""
    if not config.pluginmanager.has_plugin("shardproof-reports"):
        config.pluginmanager.register(_Reports(), "shardproof-reports")
