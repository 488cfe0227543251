"""The shape of the code base: who may import whom, what the parent process never loads, and how modules are kept.

*Verifies*: imports at any level of nesting, as written in the source; what really gets loaded by importing
each parent-side module in a fresh interpreter.
*Does not verify*: imports by computed name.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

from docs.written.public_names import public_names
from tests.conformance.built_in import BUILT_IN

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "harness"
HARNESS = SOURCE / "shardproof"
LONGEST_MODULE = 500
"""Lines; a longer module does more than one thing (2 screens of names are hard to hold in one's head)."""

SYSTEMS = {system.name: system.home.rpartition(".")[2] for system in BUILT_IN if system.name != "reference"}
"""Name → package of the systems that are in the house. `reference` is a word of its own: the core's second oracle."""

FOUNDATION = {
    "shardproof.errors": set(),
    "shardproof.layout": set(),
    "shardproof.verdict": set(),
    "shardproof.plain_values": {"shardproof.errors"},
    "shardproof.tables": {"shardproof.errors", "shardproof.plain_values"},
    "shardproof.scenario": {
        "shardproof.errors",
        "shardproof.plain_values",
        "shardproof.tables",
        "shardproof.versions",
    },
    "shardproof.versions": set(),
    "shardproof.observe.record": set(),
    "shardproof.observe.logical": set(),
}
"""Modules that everything else rests on, and all that they may import of ours."""

FORBIDDEN = {
    "shardproof.reference": (
        "shardproof.layout",
        "shardproof.diff",
        "shardproof.observe.assemble",
        "shardproof.oracle.twin",
        "shardproof.diagnosis",
        "shardproof.mechanisms",
        "shardproof.systems",
        "shardproof.world",
        "shardproof.laboratory.judge",
    ),
    "shardproof.oracle": (
        "shardproof.layout",
        "shardproof.diff",
        "shardproof.observe.assemble",
        "shardproof.reference",
        "shardproof.mechanisms",
        "shardproof.systems",
        "shardproof.emulation.cuda",
    ),
    "shardproof.mechanisms": (
        "shardproof.protocol.registry",
        "shardproof.laboratory.judge",
        "shardproof.world",
        "shardproof.reference",
    ),
    "shardproof.layout": ("torch", "numpy"),
    "shardproof.diff": ("shardproof.oracle", "shardproof.reference", "shardproof.systems", "shardproof.world"),
    "shardproof.observe": (
        "shardproof.oracle",
        "shardproof.reference",
        "shardproof.systems",
        "shardproof.world",
        "shardproof.diff",
    ),
    "shardproof.diagnosis": (
        "shardproof.oracle.twin",
        "shardproof.reference",
        "shardproof.systems",
        "shardproof.world",
        "shardproof.run",
        "shardproof.report",
    ),
    "shardproof.report": ("shardproof.oracle", "shardproof.reference", "shardproof.world"),
    "shardproof.models": ("shardproof.systems", "shardproof.oracle", "shardproof.reference"),
}
"""Module or package → what neither it nor anything under it imports. Oracle, reference and layout share no code."""

CHILD_PACKAGES = ("shardproof.emulation", "shardproof.reference")
"""Rooms of which most modules load torch."""

CHILD = (
    "shardproof.laboratory.judge",
    "shardproof.mechanisms.probe_module",
    "shardproof.observe.ambient",
    "shardproof.oracle.clipping",
    "shardproof.oracle.muon",
    "shardproof.oracle.scaled_adam",
    "shardproof.oracle.steppers",
    "shardproof.oracle.twin",
    "shardproof.oracle.values",
    "shardproof.torch_loop.busy",
    "shardproof.torch_loop.loop",
    "shardproof.torch_loop.optimizers",
    "shardproof.torch_loop.streams",
    "shardproof.torch_schedules",
    "shardproof.trainer.judge.altered",
    "shardproof.trainer.judge.at_the_end",
    "shardproof.trainer.judge.harmless",
    "shardproof.trainer.judge.cell",
    "shardproof.trainer.judge.judging",
    "shardproof.trainer.judge.line_by_line",
    "shardproof.trainer.judge.lines_of_cell",
    "shardproof.trainer.judge.other_mesh",
    "shardproof.trainer.judge.portrait",
    "shardproof.trainer.judge.saved_and_loaded",
    "shardproof.trainer.judge.second_resume",
    "shardproof.trainer.judge.trains",
    "shardproof.trainer.judge.twin",
    "shardproof.trainer.judge.two_ways",
    "shardproof.trainer.judge.waiting",
    "shardproof.trainer.judge.whose_data",
)
"""Further modules that load torch or a library under test: they run in ranks and workers only. A package named `rank`
is a rank's too. Every other module, new ones too, is the parent's."""

CHECKERS = (
    "diff",
    "laboratory.judge",
    "observe.assemble",
    "oracle.twin",
    "trainer.judge.twin",
    "diagnosis.rules.engine",
)
"""Modules that decide; their docstrings say what they verify and what they do not."""


@cache
def modules() -> dict[str, Path]:
    """Dotted name → file of every module of the package."""
    found = {}
    for path in sorted(HARNESS.rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
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
    assert {"shardproof.scenario", "shardproof.layout", "shardproof.observe.record"} <= modules().keys()
    assert "shardproof.errors" in set(imported("shardproof.scenario"))


@pytest.mark.parametrize("name", FOUNDATION)
def test_foundation_imports_nothing_of_ours(name: str) -> None:
    ours = {target for target in imported(name) if within(target, "shardproof")}
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


def of_a_rank(name: str) -> bool:
    """Whether a module is in a package `rank`, a system's or a mechanism's."""
    return "rank" in name.split(".")[2:-1] or (name.endswith(".rank") and modules()[name].name == "__init__.py")


def of_a_child(name: str) -> bool:
    """Whether a module may load torch when it is imported."""
    return of_a_rank(name) or name in CHILD or any(within(name, package) for package in CHILD_PACKAGES)


def test_the_parent_never_loads_torch() -> None:
    parent = sorted(name for name in modules() if not of_a_child(name))
    script = """
import importlib, json, sys
for name in json.loads(sys.argv[1]):
    importlib.import_module(name)
    if "torch" in sys.modules:
        sys.exit(f"importing {name} loads torch: import it in a function, or list it as CHILD")
"""
    done = subprocess.run(
        [sys.executable, "-c", script, json.dumps(parent)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_child_modules_exist() -> None:
    assert set(CHILD) <= modules().keys(), "CHILD names a module that is gone"
    assert any(map(of_a_rank, modules()))


def package_of(name: str) -> str:
    """The system's package that a module belongs to; empty for the core."""
    parts = name.split(".")
    return (
        parts[2]
        if parts[:2] == ["shardproof", "systems"] and parts[2:] and parts[2] in {*SYSTEMS.values(), "reference"}
        else ""
    )


def test_nothing_that_judges_imports_what_runs_on_ranks() -> None:
    offences = [
        f"{name} imports {target}"
        for name in modules()
        if not of_a_child(name)
        for target in imported(name)
        if target in modules() and of_a_rank(target)
    ]
    assert not offences, "\n".join(offences)


def test_no_system_imports_another_and_the_core_imports_none() -> None:
    offences = [
        f"{name} imports {target}"
        for name in modules()
        for target in imported(name)
        if package_of(target) and package_of(target) != package_of(name)
    ]
    assert not offences, "\n".join(offences)


def docstrings(name: str) -> set[int]:
    """Identities of the nodes that are text for readers: docstrings, and bare strings below a constant."""
    return {
        id(node.value)
        for node in ast.walk(tree(name))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }


def examples(name: str) -> set[int]:
    """Identities of the nodes inside of the examples that errors give: the last argument of `UsageError.of` and the
    like."""
    calls = (node for node in ast.walk(tree(name)) if isinstance(node, ast.Call))
    ends = (c.func.attr if isinstance(c.func, ast.Attribute) else "" for c in calls)
    calls = (node for node in ast.walk(tree(name)) if isinstance(node, ast.Call))
    return {
        id(inner)
        for call, end in zip(calls, ends, strict=True)
        if end in ("of", "wrong") and call.args
        for argument in call.args[2:]
        for inner in ast.walk(argument)
    }


def named(words: Iterable[str]) -> re.Pattern[str]:
    """Finds any of these as a whole word."""
    return re.compile("|".join(rf"(?<![\w-]){re.escape(word)}(?![\w-])" for word in words))


LIBRARIES = ("shardproof.emulation", "shardproof.mechanisms")
"""Rooms that know libraries, of which some are imported by a name that is that of a system's package too."""


@pytest.mark.parametrize(
    "name", sorted(name for name in modules() if not package_of(name) and name != "shardproof.cli.main")
)
def test_the_core_knows_no_system_by_name(name: str) -> None:
    """Names in code and in texts that are used. Help texts, docstrings and the examples of errors may name some."""
    knows_libraries = any(within(name, room) for room in LIBRARIES)
    words = named(SYSTEMS if knows_libraries else {*SYSTEMS, *SYSTEMS.values()})
    skipped = docstrings(name) | examples(name)
    found = []
    for node in ast.walk(tree(name)):
        text = ""
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in skipped:
            text = node.value
        elif isinstance(node, ast.Name | ast.Attribute):
            text = node.id if isinstance(node, ast.Name) else node.attr
        found += [f"line {getattr(node, 'lineno', 0)}: {word}" for word in words.findall(text)]
    assert not found, f"{name} knows a system: " + ", ".join(found)


def defined(name: str) -> Iterator[str]:
    """The names that a module defines at its top level, without what a decorator registers."""
    for node in tree(name).body:
        match node:
            case ast.FunctionDef(name=found, decorator_list=[]) | ast.ClassDef(name=found):
                yield found
            case ast.Assign(targets=targets):
                yield from (target.id for target in targets if isinstance(target, ast.Name))
            case ast.AnnAssign(target=ast.Name(id=found)):
                yield found


@cache
def uses() -> tuple[set[tuple[str, str]], set[str]]:
    """What is used in the package and in what runs it by name: names of a module, by itself or by those that import
    them from it; and attributes and the `module:attribute` of entries, whose module is not known."""
    of_modules: set[tuple[str, str]] = set()
    anywhere: set[str] = set()
    for name in modules():
        of_modules |= {(target.rpartition(".")[0], target.rpartition(".")[2]) for target in imported(name)}
        for node in ast.walk(tree(name)):
            match node:
                case ast.Name(id=used, ctx=ast.Load()):
                    of_modules.add((name, used))
                case ast.Attribute(attr=used):
                    anywhere.add(used)
                case ast.Constant(value=str(text)):
                    anywhere.update(re.findall(r":([A-Za-z_]\w*)", text))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    tables = [project.get("scripts", {}), *project.get("entry-points", {}).values()]
    anywhere |= {entry.partition(":")[2] for table in tables for entry in table.values()}
    plants = (ROOT / "scenarios" / "reference" / "faults.toml").read_text("utf-8")
    anywhere.update(re.findall(r'"\w+:(\w+)"', plants))
    for folder in ("benchmarks", "docs/written"):
        for path in (ROOT / folder).rglob("*.py"):
            anywhere.update(re.findall(r"\w+", path.read_text("utf-8")))
    return of_modules, anywhere


HOOKS = {"shardproof.emulation.pytest_plugin", "shardproof.pytest"}
"""Modules of which pytest calls functions by their names."""

FOR_READERS = {("shardproof.systems.automodel.dtype_contract", "RULES")}
"""Tables that a page of the documentation shows, which a test compares."""


@pytest.mark.parametrize("name", sorted(modules()))
def test_every_public_name_is_used(name: str) -> None:
    if name in HOOKS:
        return
    of_modules, anywhere = uses()
    anywhere = anywhere | set(public_names().get(name, ()))
    kept = {found for found in defined(name) if not found.startswith("_") and found != "SYSTEM"}
    unused = sorted(n for n in kept - anywhere if (name, n) not in of_modules | FOR_READERS)
    assert not unused, f"{name} defines what nothing but a test uses: {', '.join(unused)}"


@pytest.mark.parametrize("name", sorted(modules()))
def test_module_is_kept_well(name: str) -> None:
    path = modules()[name]
    lines = path.read_text(encoding="utf-8").count("\n")
    assert lines <= LONGEST_MODULE, f"{name} has {lines} lines: split it by what it does, not by length"
    assert not {"utils", "util", "helpers", "misc", "common"} & set(name.split(".")), f"{name}: name it by what it does"
    assert ast.get_docstring(tree(name)), f"{name} does not say what it is for"


@pytest.mark.parametrize("name", [f"shardproof.{c}" for c in CHECKERS])
def test_checkers_say_what_they_verify(name: str) -> None:
    text = ast.get_docstring(tree(name)) or ""
    assert "*Verifies*" in text, f"{name} does not say what it verifies"
    assert "*Does not verify*" in text or "*does not know*" in text, f"{name} does not say what it does not verify"


def test_no_file_names_a_path_of_this_machine() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    needles = [f"{path}/".encode() for path in (ROOT, ROOT.parent / "shared", Path.home()) if path != path.parent]
    offences = []
    for name in filter(None, listed.stdout.decode().split("\0")):
        content = (ROOT / name).read_bytes() if (ROOT / name).is_file() else b""
        offences += [f"{name}: {needle.decode()}" for needle in needles if needle in content]
    assert not offences, "\n".join(offences)
