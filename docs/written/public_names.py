"""`docs/plugins.md`: which names of the package a plugin may use, written from docs/public.toml and from docstrings.

python -m docs.written.public_names > docs/plugins.md
"""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
LIST = ROOT / "docs" / "public.toml"

HEAD = """\
<!-- Written by `python -m docs.written.public_names` from docs/public.toml and docstrings: change those. -->
# What plugins may use

A *plugin* is a module of yours that adds a system, a model, a program, a fault or a diagnosis rule: `--plugin
my_package.my_plugin` names it, or an installed package does, with an entry point in the group `shardproof.plugins`. It
is imported by the command, by every worker and by every rank.

**The promise.** A name on this page keeps its place and its meaning. Arguments and fields may be added with defaults.
What has to change otherwise keeps working for at least one release after the change, with a `DeprecationWarning` that
says what to write instead, and stands in the changelog. The same holds for the command line, for the keys of `--json`
and of scenario files, and for exit statuses.

**Everything else is private**, whatever its name looks like: modules that this page does not list, and names of listed
modules that it leaves out, may change with any commit. If a plugin needs one of them, say so in an issue, and it comes
onto this page.
"""


def groups() -> list[dict[str, Any]]:
    """The groups of the list, in order: `title`, `text`, and `names`, module → names."""
    found: list[dict[str, Any]] = tomllib.loads(LIST.read_text("utf-8"))["group"]
    return found


def public_names() -> Mapping[str, list[str]]:
    """Module → the names of it that are public."""
    return {module: names for group in groups() for module, names in group["names"].items()}


def source_of(module: str) -> Path:
    """The file of a module."""
    place = ROOT.joinpath("harness", *module.split("."))
    return next(file for file in (place.with_suffix(".py"), place / "__init__.py") if file.is_file())


def said_of(module: str) -> Mapping[str, str]:
    """Name → the first sentence of what its module says of it, for all that it defines or hands on at its top level."""
    body = ast.parse(source_of(module).read_text("utf-8")).body
    found: dict[str, str] = {}
    for node, after in zip(body, [*body[1:], None], strict=True):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                found[name] = ast.get_docstring(node) or ""
            case ast.ImportFrom(module=str(origin), names=[ast.alias(name=name, asname=str(other))]):
                found[other] = said_of(origin).get(name, "") if origin.startswith("shardproof.") else ""
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                match after:
                    case ast.Expr(value=ast.Constant(value=str(text))):
                        found[name] = text
                    case _:
                        found[name] = ""
    return {name: _first(text) for name, text in found.items()}


def _first(text: str) -> str:
    paragraph = " ".join(text.split("\n\n")[0].split())
    end = paragraph.find(". ")
    return paragraph if end < 0 else paragraph[: end + 1]


def render() -> str:
    """The page."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield HEAD.rstrip()
    for group in groups():
        yield ""
        yield f"## {group['title']}"
        yield ""
        yield group["text"].strip()
        for module, names in group["names"].items():
            said = said_of(module)
            yield ""
            yield f"From `{module}`:"
            yield ""
            yield from (f"* `{name}`" + (f": {said[name]}" if said[name] else "") for name in names)


if __name__ == "__main__":
    print(render(), end="")
