"""Its place puts `tests/` on the import path, for modules that several kinds of tests share; sets up Hypothesis and the
numerics that every test of bits needs, before anything imports torch; runs smoke once for all tests that look at it."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from browser_parts import absent
from effort import examples
from hypothesis import HealthCheck, settings

from tests.paths import PYTHONPATH

os.environ["ATEN_CPU_CAPABILITY"] = "default"
os.environ["MKL_CBWR"] = "COMPATIBLE"
os.environ["OMP_NUM_THREADS"] = "1"

signal.signal(signal.SIGINT, signal.default_int_handler)
"""Tests that a script starts in its background inherit that Ctrl-C is ignored, and so would what they start."""

# A busy machine is no failure.
settings.register_profile(
    "shardproof", deadline=None, max_examples=examples(40), suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("shardproof")

ROOT = Path(__file__).parents[1]

os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [PYTHONPATH, os.environ.get("PYTHONPATH", "")]))
"""Ranks and workers import the systems of tests too, which are modules below `tests`."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With `--dist loadgroup` all tests that run a system's ranks share a process, and with it that system's warm
    servers, each of which costs five seconds of CPU: those in the system's folder, and the cases of the others that ask
    for it. Any other file stays in one process, as with `loadfile`. A test may name a group of its own: that of a file
    with hundreds of cases, each group of which starts servers of its own anyway."""
    if config.getoption("loadgroup", default=False) or config.getoption("dist", default="no") == "loadgroup":
        for item in items:
            if item.get_closest_marker("xdist_group") is None:
                item.add_marker(pytest.mark.xdist_group(_system_of(item) or item.location[0]))
            if hasattr(config, "workerinput"):
                _show_group(item)


def _show_group(item: pytest.Item) -> None:
    """Put a test's group behind its id, where xdist's scheduler looks for it. xdist 3.8 does that through a field that
    pytest 9.2 no longer reads: every test was a group of its own, and each process started every server
    (https://github.com/pytest-dev/pytest-xdist/issues/1386)."""
    marker = item.get_closest_marker("xdist_group")
    known = getattr(item, "_id", None)
    if marker is not None and known is not None:
        item._id = type(known).parse(f"{item.nodeid}@{marker.args[0]}")


def _system_of(item: pytest.Item) -> str:
    """The name of the system that a conformance test runs, or an empty string if none is to be seen."""
    kind, *folders = item.path.relative_to(ROOT / "tests").parent.parts or ("",)
    if kind != "conformance":
        return ""
    if folders:
        return folders[0].replace("_", "-")
    asked = item.callspec.params.get("system") if hasattr(item, "callspec") else None
    return str(getattr(asked, "name", ""))


@pytest.fixture
def shipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what ships is registered. Every test process imports all test modules, and some register systems of their
    own, whose models and walks would be there for tests of what ships."""
    from shardproof import models
    from shardproof.protocol import registry

    from tests.conformance.built_in import BUILT_IN

    everything = registry.all_systems()
    ours = {system.name: system for system in BUILT_IN}
    own = {model.name for system in ours.values() for model in system.models}
    monkeypatch.setattr(registry, "_SYSTEMS", ours)
    for name in {model.name for system in everything for model in system.models} - own:
        if name in models.zoo():
            monkeypatch.delitem(models.ZOO, name)


@pytest.fixture(scope="session")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The machine report of `shardproof run smoke`, once a test process."""
    folder = tmp_path_factory.mktemp("smoke")
    command = [sys.executable, "-m", "shardproof", "run", "smoke", "--out", folder, "--json", folder / "run.json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    document: dict[str, Any] = json.loads((folder / "run.json").read_text("utf-8"))
    return document


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say, where tests in a browser or of the site were skipped, what is not there: a silent skip looks like a pass."""
    reports = terminalreporter.getreports("skipped")  # of whole modules too, which have no keywords
    skipped = [report for report in reports if "browser" in getattr(report, "keywords", ())]
    if skipped and (reason := absent()):
        terminalreporter.write_line(f"{len(skipped)} tests in a browser did not run: {reason}")
    if importlib.util.find_spec("myst_parser") is None and any("test_site" in report.nodeid for report in reports):
        terminalreporter.write_line("the documentation site was not built: pip install -e '.[docs]'")
    if importlib.util.find_spec("lxml") is None and any("test_report_machine" in report.nodeid for report in reports):
        terminalreporter.write_line("JUnit was not checked against its schema: pip install -e '.[test]'")
