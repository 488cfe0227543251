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
    "harness.oracle": (
        "harness.layout", "harness.diff", "harness.observe.assemble", "harness.reference", "harness.systems",
    ),
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

CHILD = (
    "harness.emulation.apex", "harness.emulation.collectives", "harness.emulation.cpu_for_cuda",
    "harness.emulation.cuda", "harness.emulation.device", "harness.emulation.functions", "harness.emulation.fused",
    "harness.emulation.generator", "harness.emulation.kernels", "harness.emulation.memory", "harness.emulation.symbols",
    "harness.emulation.te_extension", "harness.emulation.te_names", "harness.emulation.te_quantize",
    "harness.judge", "harness.observe.ambient", "harness.oracle.scaled_adam", "harness.oracle.steppers",
    "harness.oracle.twin", "harness.probe_module",
    "harness.reference.checkpoint", "harness.reference.fused_adam", "harness.reference.kernels",
    "harness.reference.numerics", "harness.reference.observe", "harness.reference.readback",
    "harness.reference.restore", "harness.reference.state", "harness.reference.system", "harness.reference.trainer",
    "harness.systems.automodel_library", "harness.systems.automodel_model", "harness.systems.automodel_rank",
    "harness.systems.automodel_recipe", "harness.systems.megatron_bridge_checkpoint",
    "harness.systems.megatron_bridge_rank", "harness.systems.megatron_core_checkpoint",
    "harness.systems.megatron_core_fsdp", "harness.systems.megatron_core_model",
    "harness.systems.megatron_core_observe",
    "harness.systems.megatron_core_rank", "harness.systems.megatron_core_state", "harness.systems.megatron_fsdp_fused",
    "harness.systems.megatron_fsdp_meta", "harness.systems.megatron_fsdp_rank",
    "harness.systems.torch_fsdp2_checkpoint", "harness.systems.torch_fsdp2_rank",
    "harness.systems.transformer_engine_model", "harness.systems.transformer_engine_rank",
)  # fmt: skip
"""Modules that load torch or a library under test: they run in ranks and workers only. Every other module, new
ones too, is the parent's."""

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
    parent = sorted(modules().keys() - set(CHILD))
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


@pytest.mark.parametrize("name", sorted(modules()))
def test_module_is_kept_well(name: str) -> None:
    path = modules()[name]
    lines = path.read_text(encoding="utf-8").count("\n")
    assert lines <= LONGEST_MODULE, f"{name} has {lines} lines: split it by what it does, not by length"
    assert not {"utils", "util", "helpers", "misc", "common"} & set(name.split(".")), f"{name}: name it by what it does"
    assert ast.get_docstring(tree(name)), f"{name} does not say what it is for"


@pytest.mark.parametrize("name", [f"harness.{c}" for c in CHECKERS])
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
