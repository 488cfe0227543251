"""The places at which an issue says that a library promises something are in its newest declared release.

*Verifies*: that the file is there and has the name, for every place in `issues.toml`. *Does not verify*: that what
stands there is the promise, nor addresses of documentation.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from shardproof.issues.findings import section_of
from shardproof.protocol.releases import package_of
from shardproof.protocol.system import System
from shardproof.world.interpreter import interpreter
from shardproof.world.overlay import build

from tests.conformance.built_in import BUILT_IN

pytestmark = pytest.mark.real


@pytest.mark.parametrize("system", [s for s in BUILT_IN if s.export_entry], ids=lambda system: system.name)
def test_a_promise_is_where_an_issue_says(system: System) -> None:
    here = interpreter()
    folders = [*(build(package_of(system), "", here).paths if system.package else ()), Path(here.site)]
    places = {finding.promise for finding in section_of(system).findings}
    for place in sorted(place for place in places if place and not place.startswith("https://")):
        file, _, name = place.partition(", ")
        found = next((folder / file for folder in folders if (folder / file).is_file()), None)
        assert found, place
        assert name in defined(ast.parse(found.read_text("utf-8"))), place


def defined(tree: ast.Module | ast.ClassDef, above: str = "") -> Iterator[str]:
    """The functions, classes and annotated fields of a module, `Class.method` for one inside of a class."""
    for node in ast.walk(tree) if isinstance(tree, ast.Module) else tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield above + node.name
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield above + node.target.id
        if isinstance(node, ast.ClassDef):
            yield from defined(node, f"{node.name}.")
