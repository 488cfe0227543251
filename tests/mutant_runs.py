"""Runs the tests of mutants, each in a fork of one process that has collected them all.

    mutmut run --max-children 1 shardproof.layout.x_inside__mutmut_1    makes `mutants/`, and finds which tests call
    what python -m tests.mutant_runs PATTERN...                           runs those that no test has killed yet

mutmut itself starts pytest in each fork, which collects the files of all tests that call the function: half a second
for a mutant that a test of a millisecond kills. It also limits the time on the clock, which a busy machine uses up.
Here a test has processor time, as much as it took without a mutant and some more; what needs longer has failed.
Results go where mutmut keeps its own, one by one, so that a run that was cut off goes on.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from fnmatch import fnmatchcase
from itertools import pairwise
from math import ceil
from pathlib import Path
from time import process_time
from typing import Any

import pytest

from tests.survivors import NO_TEST, ROOT, SURVIVED, TIMED_OUT

KILLED = 1
MORE_SECONDS = 3
"""Of processor time for each test, beside what it took when nothing was mutated."""


class Mutants:
    """A plugin that runs, in place of the tests that were collected, those of each mutant until one fails."""

    def __init__(self, patterns: list[str]) -> None:
        self.patterns = patterns
        stats = json.loads(Path("mutmut-stats.json").read_text("utf-8"))
        self.tests: dict[str, list[str]] = stats["tests_by_mangled_function_name"]
        self.seconds: dict[str, float] = stats["duration_by_test"]
        self.called = Counter(test for tests in self.tests.values() for test in tests)

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Every mutant that is left, pattern by pattern."""
        items = {item.nodeid: item for item in session.items}
        gc.freeze()
        for meta, name in self.left():
            tests = sorted(self.tests.get(name.partition("__mutmut_")[0], ()), key=self.telling)
            chosen = [items[test] for test in tests if test in items]
            document = json.loads(meta.read_text("utf-8"))
            document["exit_code_by_key"][name] = self.status(name, chosen) if chosen else NO_TEST
            meta.write_text(json.dumps(document), "utf-8")
        return True

    def left(self) -> Iterator[tuple[Path, str]]:
        """The mutants that no test has killed, each with the file of its result."""
        for pattern in self.patterns:
            for meta in sorted(Path().rglob("*.py.meta")):
                for name, status in json.loads(meta.read_text("utf-8"))["exit_code_by_key"].items():
                    if fnmatchcase(name, pattern) and status in (None, SURVIVED, NO_TEST, *TIMED_OUT):
                        yield meta, name

    def telling(self, test: str) -> tuple[int, float]:
        """How early a test runs: first those that call the fewest functions, which are about these, then quick ones."""
        return self.called[test], self.seconds[test]

    def status(self, name: str, tests: list[pytest.Item]) -> int:
        """What became of a mutant."""
        child = os.fork()
        if not child:
            self.become(name, tests)
        _, status = os.waitpid(child, 0)
        return SURVIVED if os.waitstatus_to_exitcode(status) == SURVIVED else KILLED

    def become(self, name: str, tests: list[pytest.Item]) -> None:
        """Run the tests with the mutant switched on; it never returns."""
        os.environ["MUTANT_UNDER_TEST"] = name
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1)
        os.dup2(silent, 2)
        try:
            for item, following in pairwise([*tests, None]):
                assert item is not None
                limit = ceil(process_time() + self.seconds[item.nodeid] + MORE_SECONDS)
                resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))
                item.ihook.pytest_runtest_protocol(item=item, nextitem=following)
        except BaseException:
            os._exit(KILLED)
        os._exit(SURVIVED)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_makereport(self, call: pytest.CallInfo[None]) -> None:
        """What a test raises ends a mutant's run, before pytest has read all of the mutated module to show it."""
        if call.excinfo is not None and not call.excinfo.errisinstance(pytest.skip.Exception):
            os._exit(KILLED)


def main(patterns: list[str]) -> None:
    """Run what is left of the mutants of these patterns."""
    settings: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["mutmut"]
    os.chdir(ROOT / "mutants")
    sys.path[:] = [str(ROOT / "mutants"), *(path for path in sys.path if Path(path).resolve() != ROOT)]
    os.environ["MUTANT_UNDER_TEST"] = ""
    chosen = settings["pytest_add_cli_args_test_selection"]
    pytest.main(
        ["--rootdir=.", "-q", "--assert=plain", *settings["pytest_add_cli_args"], *chosen], plugins=[Mutants(patterns)]
    )


if __name__ == "__main__":
    main(sys.argv[1:])
