"""A pytest plugin under which a suite that was written for GPUs runs, unmodified, on a CPU.

    python -m pytest -p shardproof.emulation.pytest_plugin --emulate te test_optimizer.py

From before the suite's first conftest until the end of the session the process has an emulated CUDA device, the fused
kernels that `--emulate` names, `triton` by name, gloo for NCCL, and checkpoint managers and workers that are forked.
After each test the process groups are destroyed that it made and forgot. Under several ranks, each a pytest process of
its own with the environment of torchrun, `--emulate-devices` tells how many devices the machine has.

`--emulate-verdicts FILE` writes one line of JSON a test, for whoever compares verdicts.
docs/emulation.md says what an emulated device can show and what it cannot.
"""

from __future__ import annotations

import faulthandler
import json
import os
from collections.abc import Generator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TextIO

import pytest

KERNELS = ("apex", "te", "te-apex", "te-optimizers", "none")
_MEMORY_BYTES = 1 << 29
"""Of a device. Suites fill some share of it to see how a library runs out, and this memory is the computer's."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options of this plugin."""
    group = parser.getgroup("shardproof-emulation", "an emulated CUDA device")
    group.addoption(
        "--emulate", choices=KERNELS, default="apex",
        help="fused kernels that can be imported: of apex; of TransformerEngine, whose own Python has to be installed "
        "(te); of it and apex, with grouped_gemm by name (te-apex); of its optimizers alone (te-optimizers); or none",
    )  # fmt: skip
    group.addoption("--emulate-devices", type=int, default=0, help="devices of the machine; as many as local ranks")
    group.addoption(
        "--emulate-capability", default="9.0", metavar="MAJOR.MINOR", help="compute capability; default 9.0"
    )
    group.addoption("--emulate-verdicts", type=Path, help="write one line of JSON for each test there")
    group.addoption("--emulate-group-limit-s", type=float, default=120.0, help="how long a collective waits for a rank")
    group.addoption(
        "--emulate-hang-up-s", type=float, default=15.0, help="how long after a failure a rank shuts its connections"
    )
    group.addoption("--emulate-limit-s", type=float, default=0.0, help="kill the process where one test takes longer")


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Begin before any file of the suite is imported."""
    options = early_config.known_args_namespace
    session = _Session(options)
    early_config.pluginmanager.register(session, "shardproof-emulation")


class _Session:
    """The emulation of one pytest process."""

    def __init__(self, options: Any) -> None:
        from shardproof.emulation import groups
        from shardproof.emulation.rank_barrier import Meeting

        self.limit_s: float = options.emulate_limit_s
        self.stack = ExitStack()
        self.forgotten = groups.Forgotten()
        self.file: TextIO | None = None
        if options.emulate_verdicts:
            self.file = self.stack.enter_context(options.emulate_verdicts.open("a", encoding="utf-8"))
        devices = options.emulate_devices or int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        major, _, minor = options.emulate_capability.partition(".")
        capability = int(major), int(minor or 0)
        self.stack.enter_context(emulation(options.emulate, devices, capability, options.emulate_group_limit_s))
        self.meeting = Meeting.of_environment(options.emulate_hang_up_s)
        self.outcomes: list[str] = []

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Ranks begin a test together. What it forgot goes when it has ended."""
        self._write(test=item.nodeid, event="start")
        if self.limit_s:
            faulthandler.dump_traceback_later(self.limit_s, exit=True)
        self.outcomes = []
        try:
            return (yield)
        finally:
            self.meeting.after(item.nodeid, self.outcomes)
            self.forgotten.destroy()
            if self.limit_s:
                faulthandler.cancel_dump_traceback_later()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Keep each phase's outcome."""
        report = yield
        if report.when == "call" or report.outcome != "passed":
            error = call.excinfo.value if call.excinfo else None
            expected = getattr(report, "wasxfail", None)
            self.outcomes.append(f"{report.outcome} {_line(error)}".strip())
            if report.failed:
                self.meeting.failed()
            self._write(
                test=item.nodeid, event=report.when, outcome=report.outcome,
                xfail=expected, why=_line(error), where=_where(report),
            )  # fmt: skip
        return report

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Keep what cannot be collected."""
        if report.failed:
            last = str(report.longrepr).strip().splitlines()[-1:]
            self._write(test=report.nodeid, event="collect", outcome="failed", why="".join(last), where="")

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Keep what there is to run, so that a test that never starts is seen."""
        self._write(event="collected", tests=[item.nodeid for item in session.items])

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Say what was emulated."""
        from shardproof.emulation.used_symbols import used_symbols

        terminalreporter.write_line(f"emulated by shardproof: {', '.join(used_symbols()) or 'nothing'}")

    def pytest_unconfigure(self) -> None:
        """Leave no group and no device."""
        from shardproof.emulation import groups

        groups.drop_all()
        self._write(event="end")
        self.stack.close()

    def _write(self, **line: Any) -> None:
        if self.file:
            self.file.write(json.dumps(line) + "\n")
            self.file.flush()


def _line(error: BaseException | None) -> str:
    """An error in one line. Where the emulation refused a call, and leaving a block raised something else after that,
    it is the refusal."""
    if error is None:
        return ""
    earlier = error.__context__
    while earlier is not None:
        if isinstance(earlier, NotImplementedError) and "not emulated" in str(earlier):
            error = earlier
        earlier = earlier.__context__
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:400]


def _where(report: pytest.TestReport) -> str:
    """File and line of the innermost frame that a report shows."""
    crash = getattr(report.longrepr, "reprcrash", None)
    return f"{crash.path}:{crash.lineno}" if crash else ""


def emulation(kernels: str, devices: int, capability: tuple[int, int], group_limit_s: float) -> ExitStack:
    """Everything that a suite for GPUs finds, until the returned stack is closed; it is entered already.

    Args:
        kernels: one of `KERNELS`. devices: how many the machine has; the process uses one of them. capability: the
            compute capability, which decides what libraries try (fp8 from 8.9 on). group_limit_s: how long a collective
            waits for another rank.

    Raises:
        ModuleNotFoundError: `te` is asked for and TransformerEngine's Python is not installed.
        RuntimeError: the real packages are loaded already.
    """
    from shardproof.emulation import apex, backend, cuda, machine, names, spawn, te_extension

    with ExitStack() as stack:
        stack.enter_context(cuda.emulated(devices, machine.Kind(capability, _MEMORY_BYTES)))
        stack.enter_context(spawn.forked(workers=True))
        stack.enter_context(names.importable(names.TRITON))
        stack.enter_context(backend.gloo_for_nccl(group_limit_s))
        if kernels in ("te", "te-apex"):
            te_extension.library()
        if kernels == "te-apex":
            names.refusing("grouped_gemm", ops=("gmm", "permute", "unpermute"))
        if kernels not in ("te", "none"):
            apex.install(te_optimizers=kernels == "te-optimizers")
        return stack.pop_all()
