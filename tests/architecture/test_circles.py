"""Nothing in the house goes in a circle: neither folders nor files import each other around.

A folder counts without those below it: `systems/deepspeed/rank` is another one than `systems/deepspeed`. What lies flat
in the package is a place of its own, file by file.

*Verifies*: imports as the source has them, also those inside functions and those for type checkers alone.
*Does not verify*: imports by computed name, such as the entries of a system.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from graphlib import CycleError, TopologicalSorter

from tests.architecture.test_architecture import HARNESS, imported, modules

MOST_FLAT = 32
"""Modules that may lie flat in the package. A newcomer reads their names first."""


def module_of(target: str) -> str:
    """The module that an imported name is, or stands in; empty for what is not ours."""
    while target and target not in modules():
        target = target.rpartition(".")[0]
    return target


def arrows() -> dict[str, set[str]]:
    """Module → the modules that it imports."""
    found: dict[str, set[str]] = {}
    for name in modules():
        targets = sorted(set(imported(name)), key=len)
        exact = {module_of(target) for target in targets} - {"", name, "shardproof"}
        # `from a.b import c` names both `a.b` and `a.b.c`: where `c` is a module, `a.b` was only the way to it
        packages = {
            t for t in exact if modules()[t].name == "__init__.py" and any(x.startswith(f"{t}.") for x in exact)
        }
        found[name] = exact - packages
    return found


def place_of(name: str) -> str:
    """The folder of a module; the module itself where it lies flat."""
    is_package = modules()[name].name == "__init__.py"
    folder = name if is_package else name.rpartition(".")[0]
    return name if folder == "shardproof" else folder


def circle(graph: Mapping[str, Iterable[str]]) -> str:
    """A circle of a graph, as text; empty where there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return " → ".join(error.args[1])
    return ""


def test_a_circle_is_found() -> None:
    assert circle({"a": ["b"], "b": ["c"], "c": ["a"], "d": ["a"]}).count("→") == 3
    assert not circle({"a": ["b", "c"], "b": ["c"]})


def test_no_files_import_each_other_in_a_circle() -> None:
    found = circle(arrows())
    assert not found, f"cut one of these imports, by handing in what is needed or by moving it down: {found}"


def test_no_folders_import_each_other_in_a_circle() -> None:
    between: dict[str, set[str]] = {}
    for name, targets in arrows().items():
        between.setdefault(place_of(name), set()).update({place_of(t) for t in targets} - {place_of(name)})
    found = circle(between)
    assert not found, f"cut one of these imports, by handing in what is needed or by moving it down: {found}"


def test_few_files_lie_flat() -> None:
    flat = [path.name for path in HARNESS.glob("*.py")]
    assert len(flat) <= MOST_FLAT, f"{len(flat)} files lie flat; put one where it belongs: {sorted(flat)}"
