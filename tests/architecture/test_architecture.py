"""The shape of the code base: who may import whom, what the parent process never loads, and how modules are kept.

*Verifies*: imports at any level of nesting, as written in the source; what really gets loaded by importing
each parent-side module in a fresh interpreter.
*Does not verify*: imports by computed name.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HARNESS = ROOT / "harness"
LONGEST_MODULE = 500
"""Lines; a longer module does more than one thing (2 screens of names are hard to hold in one's head)."""

FOUNDATION = {
    "harness.errors": set(),
    "harness.layout": set(),
    "harness.verdict": set(),
    "harness.scenario": {"harness.errors"},
    "harness.observe.record": set(),
    "harness.observe.logical": set(),
}
"""Modules that everything else rests on, and all that they may import of ours."""

FORBIDDEN = {
    "harness.reference": (
        "harness.layout", "harness.diff", "harness.observe.assemble", "harness.oracle.twin", "harness.diagnosis",
        "harness.systems.torch_fsdp2", "harness.world", "harness.judge",
    ),
    "harness.oracle": ("harness.layout", "harness.diff", "harness.observe.assemble", "harness.reference", "harness.systems"),
    "harness.layout": ("torch", "numpy"),
    "harness.diff": ("harness.oracle", "harness.reference", "harness.systems", "harness.world"),
    "harness.observe": ("harness.oracle", "harness.reference", "harness.systems", "harness.world", "harness.diff"),
    "harness.diagnosis": (
        "harness.oracle.twin", "harness.reference", "harness.systems", "harness.world", "harness.run", "harness.report",
    ),
    "harness.report": ("harness.oracle", "harness.reference", "harness.world"),
    "harness.models": ("harness.systems", "harness.oracle", "harness.reference"),
}  # fmt: skip
"""Module or package → what neither it nor anything under it imports. Oracle, reference and layout share no code."""

PARENT = (
    "__main__", "cli", "run", "plan", "space", "constraints", "covering", "scenario", "program", "verdict", "models",
    "probe", "layout", "diff", "diagnosis", "observe.record", "observe.logical", "observe.assemble", "oracle.contracts",
    "oracle.kernels_table", "systems.protocol", "systems.registry", "systems.builtin", "systems.torch_fsdp2", "result",
    "codec", "known_issues", "store", "report", "shrink", "laboratory", "readers", "faults", "pytest_plugin",
    "world.server", "world.supervisor", "world.host", "world.job", "world.wire",
)  # fmt: skip
"""Modules the parent process imports. One that does not exist yet is skipped, and checked as soon as it does."""

CHECKERS = ("diff", "judge", "observe.assemble", "oracle.twin", "diagnosis.engine")
"""Modules that decide; their docstrings say what they verify and what they do not."""


@cache
def modules() -> dict[str, Path]:
    """Dotted name → file of every module of the package."""
    found = {}
    for path in sorted(HARNESS.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def tree(name: str) -> ast.Module:
    return ast.parse(modules()[name].read_text(encoding="utf-8"))


def imported(name: str) -> Iterator[str]:
    """Dotted names that a module imports anywhere in its source; `from a import b` gives both `a` and `a.b`."""
    package = name if modules()[name].name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(tree(name)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")
            base = ".".join(parents[: len(parents) - node.level + 1]) if node.level else ""
            source = ".".join(part for part in (base, node.module) if part)
            yield source
            yield from (f"{source}.{alias.name}" for alias in node.names)


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def test_the_scan_sees_the_package() -> None:
    assert {"harness.scenario", "harness.layout", "harness.observe.record"} <= modules().keys()
    assert "harness.errors" in set(imported("harness.scenario"))


@pytest.mark.parametrize("name", FOUNDATION)
def test_foundation_imports_nothing_of_ours(name: str) -> None:
    ours = {target for target in imported(name) if within(target, "harness")}
    stray = {t for t in ours if not any(within(t, allowed) for allowed in FOUNDATION[name])}
    assert not stray, f"{name} may import {sorted(FOUNDATION[name]) or 'nothing of ours'}, imports {sorted(stray)}"


@pytest.mark.parametrize("package", FORBIDDEN)
def test_forbidden_imports(package: str) -> None:
    offences = [
        f"{name} imports {target}"
        for name in modules()
        if within(name, package)
        for target in imported(name)
        if any(within(target, banned) for banned in FORBIDDEN[package]) and not within(target, package)
    ]
    assert not offences, "\n".join(offences)


def test_the_parent_never_loads_torch() -> None:
    present = [f"harness.{name}" for name in PARENT if f"harness.{name}" in modules()]
    script = """
import importlib, json, sys
for name in json.loads(sys.argv[1]):
    importlib.import_module(name)
    if "torch" in sys.modules:
        sys.exit(f"importing {name} loads torch")
"""
    done = subprocess.run(
        [sys.executable, "-c", script, json.dumps(present)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", sorted(modules()))
def test_module_is_kept_well(name: str) -> None:
    path = modules()[name]
    lines = path.read_text(encoding="utf-8").count("\n")
    assert lines <= LONGEST_MODULE, f"{name} has {lines} lines: split it by what it does, not by length"
    assert not {"utils", "util", "helpers", "misc", "common"} & set(name.split(".")), f"{name}: name it by what it does"
    assert ast.get_docstring(tree(name)), f"{name} does not say what it is for"


@pytest.mark.parametrize("name", [f"harness.{c}" for c in CHECKERS])
def test_checkers_say_what_they_verify(name: str) -> None:
    if name not in modules():
        pytest.skip(f"{name} does not exist yet")
    text = ast.get_docstring(tree(name)) or ""
    assert "*Verifies*" in text or "*verifies*" in text.lower()
    assert "*does not" in text.lower(), f"{name} does not say what it does not verify"


def test_no_file_names_a_path_of_this_machine() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    needles = {str(ROOT).encode(), str(Path.home()).encode(), b"/" + b"work/main", b"/" + b"work/shared"} - {b"/", b""}
    offences = []
    for name in filter(None, listed.stdout.decode().split("\0")):
        path = ROOT / name
        if path.is_file():
            content = path.read_bytes()
            offences += [
                f"{name}: {needle.decode()}" for needle in needles if needle + b"/" in content or needle == content
            ]
    assert not offences, "\n".join(offences)


def test_every_test_directory_is_known() -> None:
    known = {"architecture", "browser", "conformance", "golden", "properties", "unit"}
    present = {p.name for p in (ROOT / "tests").iterdir() if p.is_dir() and not p.name.startswith((".", "__"))}
    assert present <= known | {"end_to_end", "faults", "canaries"}, sorted(present - known)


def test_packages_can_be_found() -> None:
    assert find_spec("harness") is not None
