"""docs/plugins.md lists what plugins may use: every name is there, and what outsiders write needs no other.

*Verifies*: the page against docs/public.toml and docstrings; the imports of the outsiders' packages and plugins that
tests and documentation have.
*Does not verify*: that the listed names keep their meaning.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from docs.written.public_names import public_names, render, said_of

ROOT = Path(__file__).parents[2]
OUTSIDERS = sorted(
    file
    for place in ("tests/conformance/own_adamw", "tests/conformance/torch_zero")
    for file in (ROOT / place).rglob("*.py")
    if not file.name.startswith("test_")
)
"""What somebody who does not know the house would write: the systems of the two guides."""


def test_the_page_is_what_its_sources_say() -> None:
    assert render() == (ROOT / "docs/plugins.md").read_text("utf-8"), "python -m docs.written.public_names"


@pytest.mark.parametrize("module", public_names())
def test_every_public_name_is_there_and_says_what_it_is(module: str) -> None:
    said = said_of(module)
    assert [name for name in public_names()[module] if not said.get(name)] == []


@pytest.mark.parametrize("file", OUTSIDERS, ids=lambda file: str(file.relative_to(ROOT)))
def test_outsiders_need_no_private_name(file: Path) -> None:
    public = public_names()
    private = [
        f"{node.module}.{alias.name}"
        for node in ast.walk(ast.parse(file.read_text("utf-8")))
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "shardproof"
        for alias in node.names
        if alias.name not in public.get(node.module or "", ())
    ]
    assert private == []
