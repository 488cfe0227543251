"""Runs one of upstream's suites: one pytest process a rank, over upstream's files, until every test has a verdict.

The files are those of the declared commit, written out from the clone into a folder of the suite's own. So the clone
may be bare, may have anything checked out or changed, and no test can write into it.

A test that takes too long, or that takes its process down, ends the ranks; they start again with the tests that are
left. Every rank is the leader of a process group of its own, dies with its parent, and is killed with what it started
when the suite ends.

*Verifies* that the files are those of the declared commit. *Does not verify* any value: upstream's tests do.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from shardproof.emulation.rank_barrier import free_port
from shardproof.errors import UsageError
from shardproof.protocol.registry import system_named
from shardproof.protocol.releases import package, package_of
from shardproof.suites.declared import Suite, Upstream
from shardproof.suites.verdicts import FAILED, PASSED, SKIPPED, SuiteTestResult, of_ranks
from shardproof.world.interpreter import interpreter
from shardproof.world.overlay import build, clone_variable, commit_of, install
from shardproof.world.process import die_with_parent
from shardproof.world.server import DETERMINISM

_HERE = Path(__file__).resolve().parents[2]
_ALONE_S = 30.0
"""How long the other ranks may go on once one has ended before it was done."""
_MOST_STARTS = 40


@dataclass(frozen=True)
class Place:
    """Where a suite runs. files: the folder with those of the commit. paths: what comes first on the path. scratch: for
    what ranks write. environment: the variables that it is to find."""

    files: Path
    paths: tuple[Path, ...]
    scratch: Path
    environment: Mapping[str, str]


def place(upstream: Upstream, scratch: Path) -> Place:
    """Write out the files of the declared commit, and install what the suite needs beside them.

    Raises:
        UsageError: no clone was named, or it has no such commit. OverlayError: something cannot be installed.
    """
    files = written_out(upstream, scratch)
    python = interpreter()
    paths: list[Path] = []
    for library in upstream.libraries:
        name, _, version = library.partition("@")
        paths += build(package(name), version, python).paths
    if upstream.beside:
        paths.append(install(upstream.beside, python))
    paths += [(files / path).resolve() for path in upstream.paths]
    environment = dict(text.split("=", 1) for text in upstream.environment)
    return Place(files, (*paths, _HERE), scratch, environment)


def written_out(upstream: Upstream, scratch: Path) -> Path:
    """The folder with every file of the declared commit, also those that `git archive` would leave out.

    Raises:
        UsageError: no clone was named, or it has no such commit.
    """
    under_test = package_of(system_named(upstream.system))
    try:
        commit = commit_of(under_test, upstream.commit)
    except UsageError as error:
        raise UsageError(f"{error}; it is {upstream.tag}: git fetch origin tag {upstream.tag}") from None
    folder = scratch / f"{upstream.tag}-{commit[:12]}"
    folder.mkdir(exist_ok=True)
    ours = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    git = ["git", "-C", os.environ[clone_variable(under_test.name)], "--work-tree", str(folder)]
    with tempfile.TemporaryDirectory(dir=scratch) as temporary:
        ours["GIT_INDEX_FILE"] = str(Path(temporary, "index"))  # that of the clone stays as it is
        for step in (["read-tree", commit], ["checkout-index", "--all", "--force"]):
            subprocess.run([*git, *step], check=True, capture_output=True, env=ours)
    return folder


def verdicts(upstream: Upstream, suite: Suite, ranks: int, where: Place, limit_s: float) -> dict[str, SuiteTestResult]:
    """Run a suite to its end.

    Args:
        limit_s: how long a test may take, by the clock.

    Raises:
        UsageError: nothing was collected.
    """
    collected: list[str] = []
    found: dict[str, SuiteTestResult] = {}
    tests: Sequence[str] = suite.tests
    for number in range(_MOST_STARTS):
        files = [where.scratch / f"{number}-{rank}.jsonl" for rank in range(ranks)]
        _run(_command(suite.kernels, tests, where, limit_s), files, where)
        logs = [_Log.read(file) for file in files]
        collected = collected or logs[0].collected
        before = len(found)
        found |= _merged(logs, upstream)
        left = [test for test in collected if test not in found]
        if not left or all(log.ended for log in logs) or len(found) == before:
            break
        options = [option for option in suite.tests if option.startswith("-")]
        arguments = where.scratch / f"{number}-left.txt"
        arguments.write_text("\n".join([*options, *left]))
        tests = [f"@{arguments}"]
    if not found:
        raise UsageError.of(
            f"suite {suite.name}", "no test ran", "a suite that collects", f"see {where.scratch}/0-0.jsonl.log"
        )
    for test in collected:
        found.setdefault(test, SuiteTestResult(FAILED, "never ran"))
    return dict(sorted(found.items()))


def _command(kernels: str, tests: Sequence[str], where: Place, limit_s: float) -> list[str]:
    return [
        sys.executable, "-m", "pytest", "-p", "shardproof.emulation.pytest_plugin", "--emulate", kernels,
        "--emulate-limit-s", str(limit_s), "-p", "no:cacheprovider", "-o", "addopts=", "-W", "ignore", "-q",
        "--tb=short", "--rootdir", str(where.files), *tests,
    ]  # fmt: skip


def _run(command: Sequence[str], files: Sequence[Path], where: Place) -> None:
    """Start the ranks and wait until all have ended; the others are ended soon after the first that fails to finish."""
    common = {
        **os.environ, **DETERMINISM, **where.environment, "PYTHONSAFEPATH": "1", "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONPATH": os.pathsep.join(map(str, where.paths)), "WORLD_SIZE": str(len(files)),
        "LOCAL_WORLD_SIZE": str(len(files)), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
        "SHARDPROOF_MEETING": f"127.0.0.1:{free_port()}", "TORCHDYNAMO_DISABLE": "1",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    }  # fmt: skip
    running: list[subprocess.Popen[bytes]] = []
    shared = where.scratch / "temporary"
    shared.mkdir(exist_ok=True)
    try:
        for rank, file in enumerate(files):
            own = common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            # A folder for each rank, which pytest empties; in the one above it they share what the suite shares.
            options = ["--basetemp", str(shared / str(rank)), "--emulate-verdicts", str(file)]
            running.append(_start([*command, *options], own, file, where.files))
        _wait(running)
    finally:
        for process in running:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _start(command: Sequence[str], environment: Mapping[str, str], file: Path, folder: Path) -> subprocess.Popen[bytes]:
    with file.with_suffix(".jsonl.log").open("wb") as log:
        return subprocess.Popen(
            command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
            start_new_session=True, preexec_fn=partial(die_with_parent, os.getpid()),
        )  # fmt: skip


def _wait(running: Sequence[subprocess.Popen[bytes]]) -> None:
    first: float | None = None
    while any(process.poll() is None for process in running):
        if first is None and any(process.poll() not in (None, 0, 1) for process in running):
            first = time.monotonic()
        if first is not None and time.monotonic() - first > _ALONE_S:
            return
        time.sleep(0.2)


@dataclass(frozen=True)
class _Log:
    """The pytest log of one rank. `seen` maps tests to outcomes; `cut` is the test that was running when the process
    ended, or empty."""

    collected: list[str]
    seen: dict[str, SuiteTestResult]
    cut: str
    ended: bool

    @classmethod
    def read(cls, file: Path) -> _Log:
        collected: list[str] = []
        seen: dict[str, SuiteTestResult] = {}
        open_test, ended = "", False
        for text in file.read_text("utf-8").splitlines() if file.exists() else ():
            line: dict[str, Any] = json.loads(text)
            match line["event"]:
                case "collected":
                    collected = line["tests"]
                case "start":
                    open_test = line["test"]
                case "end":
                    ended = True
                case _:
                    test = line["test"]
                    seen[test] = _worse(seen.get(test), _verdict(line))
        cut = "" if ended else open_test
        return cls(collected, seen, cut, ended)


def _verdict(line: Mapping[str, Any]) -> SuiteTestResult:
    outcome = str(line["outcome"])
    if outcome == PASSED:
        return SuiteTestResult(PASSED)
    why = str(line["why"])
    if outcome == SKIPPED and line.get("xfail") is not None:
        return SuiteTestResult(SKIPPED, f"expected to fail: {line['xfail'] or why}")
    return SuiteTestResult(outcome, why.removeprefix("Skipped: ").strip())


def _worse(one: SuiteTestResult | None, other: SuiteTestResult) -> SuiteTestResult:
    """Of two phases of a test: a failure stands, whatever follows it."""
    return one if one is not None and (one.outcome == FAILED or other.outcome == PASSED) else other


def _merged(logs: Sequence[_Log], upstream: Upstream) -> dict[str, SuiteTestResult]:
    """Combine the outcomes of all ranks into one for each test (`of_ranks`). A test during which a rank's process ended
    counts as failed."""
    cut = {log.cut for log in logs} - {""}
    tests = dict.fromkeys(test for log in logs for test in log.seen)
    found = {}
    for test in [*tests, *cut]:
        seen = [log.seen[test] for log in logs if test in log.seen]
        if test in cut and not any(verdict.outcome == FAILED for verdict in seen):
            seen = [SuiteTestResult(FAILED, "the process ended without a verdict")]
        found[test] = of_ranks(seen, partial(upstream.reason, test))
    return found
