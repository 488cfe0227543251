"""Benchmarks are run by hand, so that nobody else would notice that one no longer starts.

*Verifies*: that each of their modules imports, with what it brings along: torch's own test classes, which
`benchmarks/world_cases.py` runs beside ours in processes of their own, import packages that torch does not require.
*Does not verify*: that a benchmark runs to its end, and what it imports of libraries under test on the way.
"""

from __future__ import annotations

import pkgutil
import subprocess
import sys
from pathlib import Path

import benchmarks

ROOT = Path(__file__).parents[2]

IMPORT_EACH = """
import importlib, sys
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except Exception as error:
        print(f"{name}: {type(error).__name__}: {error}")
"""


def test_every_module_imports_in_a_fresh_interpreter() -> None:
    names = [f"benchmarks.{module.name}" for module in pkgutil.iter_modules(benchmarks.__path__)]
    assert {"benchmarks.work", "benchmarks.world_cases"} <= set(names)
    command = [sys.executable, "-c", IMPORT_EACH, *names]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "", "a package that is missing is declared in pyproject.toml and pinned in constraints.txt"
