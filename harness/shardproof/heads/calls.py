"""Lists the library functions that our driver of a system calls, by parsing the driver's source without importing
it.

The modules that run in ranks import the library inside of functions, under names of their own. For example,
`from megatron.core.optimizer import OptimizerConfig` and later `OptimizerConfig(**values)`. Each such call becomes a
`Call`: the full name of what is called, and the arguments that are handed over by name, those of a dict literal that
the function builds for `**values` too. Calls of methods of the library's objects have no full name; they keep the
method's name alone.

*Does not verify*: what is looked up by a computed name.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from shardproof.protocol.system import System


@dataclass(frozen=True)
class Call:
    """One call in our driver.

    * name: dotted, from the library's top on; of a method, its name alone. is_method: whether it is one.
    * keywords: arguments by name. positional: number of those by place; None where a `*` hides it.
    * complete: whether `keywords` are all that there are, with no `**` that could not be read.
    * asked: whether it stands behind a condition, which may have asked the library first.
    * place: file and line, of ours.
    """

    name: str
    is_method: bool
    keywords: tuple[str, ...]
    positional: int | None
    complete: bool
    asked: bool
    place: str


@dataclass(frozen=True)
class Taken:
    """A name of the library that our driver imports, such as a module or a class of one, and where."""

    name: str
    asked: bool
    place: str


def driver_calls(system: System, tree: str) -> tuple[list[Call], list[Taken]]:
    """All calls of a system's library, and all that is imported of it, in the modules of ours that its ranks run.

    Args:
        tree: the library's package, dotted.
    """
    calls: list[Call] = []
    taken: list[Taken] = []
    for name, path in sorted(driver_modules(system).items()):
        reader = _Reader(name, path, tree)
        reader.visit(ast.parse(path.read_text("utf-8")))
        calls += reader.calls
        taken += reader.taken
    return calls, taken


def driver_modules(system: System) -> dict[str, Path]:
    """Dotted name → file of every module of ours, or of the plugin's, that a system's ranks run: that of its rank
    class, and all that it imports from its own package on."""
    home = sys.modules[system.home]
    top = system.home.partition(".")[0]
    above = Path(str(home.__file__)).resolve()
    above = above.parents[len(system.home.split(".")) - (0 if above.name == "__init__.py" else 1)]
    todo = [system.entry(entry).partition(":")[0] for entry in (system.rank, system.warm_up, system.library) if entry]
    found: dict[str, Path] = {}
    while todo:
        name = todo.pop()
        path = _file_of(above, name)
        if path is None or name in found:
            continue
        found[name] = path
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        imported = _imported(ast.parse(path.read_text("utf-8")), package)
        todo += [each for each in imported if each.partition(".")[0] == top and _of_ranks(each, system)]
    return found


def _of_ranks(module: str, system: System) -> bool:
    """Whether a module drives a library, and is no part of the core: it is the system's own, or in a package `rank`."""
    return module.startswith(f"{system.home}.") or module == system.home or "rank" in module.split(".")


def _file_of(above: Path, name: str) -> Path | None:
    base = above.joinpath(*name.split("."))
    return next((file for file in (base.with_suffix(".py"), base / "__init__.py") if file.is_file()), None)


def _imported(tree: ast.Module, package: str) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            source = absolute(node, package)
            yield source
            yield from (f"{source}.{alias.name}" for alias in node.names)


def absolute(node: ast.ImportFrom, package: str) -> str:
    """The module that a `from … import` names, in full."""
    parents = package.split(".")
    base = ".".join(parents[: len(parents) - node.level + 1]) if node.level else ""
    return ".".join(part for part in (base, node.module) if part)


class _Reader(ast.NodeVisitor):
    """Walks one module, with the names of the library that are known where it is."""

    def __init__(self, module: str, path: Path, tree: str) -> None:
        self._module, self._path, self._tree = module, path, tree
        self._names: dict[str, str] = {}
        self._dicts: dict[str, tuple[str, ...]] = {}
        self._conditions = 0
        self.calls: list[Call] = []
        self.taken: list[Taken] = []

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        outside = dict(self._names), dict(self._dicts)
        self._dicts |= _dicts_in(node)
        self.generic_visit(node)
        self._names, self._dicts = outside

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            if self._in_library(alias.name):
                self._names[alias.asname or alias.name.partition(".")[0]] = (
                    alias.name if alias.asname else alias.name.partition(".")[0]
                )
                self._take(alias.name, node)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if node.level or not self._in_library(node.module or ""):
            return
        for alias in node.names:
            self._names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
            self._take(f"{node.module}.{alias.name}", node)

    def visit_Assign(self, node: ast.Assign) -> None:
        match node:
            case ast.Assign(
                targets=[ast.Name(id=name)],
                value=ast.Call(func=ast.Name(id="import_module"), args=[ast.Constant(value=str(module))]),
            ) if self._in_library(module):
                self._names[name] = module
                self._take(module, node)
        self.generic_visit(node)

    def visit_If(self, node: ast.If) -> None:
        self.visit(node.test)
        self._asked(*node.body, *node.orelse)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self.visit(node.test)
        self._asked(node.body, node.orelse)

    def visit_Try(self, node: ast.Try) -> None:
        self._asked(*node.body, *node.handlers, *node.orelse)
        for each in node.finalbody:
            self.visit(each)

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        if isinstance(node.func, ast.Name | ast.Attribute):
            name = self._full(node.func)
            if name or isinstance(node.func, ast.Attribute):
                self._add(node, name)

    def _add(self, node: ast.Call, name: str) -> None:
        keywords, complete = [], True
        for keyword in node.keywords:
            if keyword.arg is not None:
                keywords.append(keyword.arg)
            elif isinstance(keyword.value, ast.Name) and keyword.value.id in self._dicts:
                keywords += self._dicts[keyword.value.id]
                complete = False
            else:
                complete = False
        starred = any(isinstance(argument, ast.Starred) for argument in node.args)
        assert isinstance(node.func, ast.Name | ast.Attribute)
        method = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        self.calls.append(
            Call(
                name or method, not name, tuple(keywords), None if starred else len(node.args), complete,
                self._conditions > 0, self._place(node),
            )
        )  # fmt: skip

    def _full(self, node: ast.expr) -> str:
        """The library's name that an expression is; empty for anything else."""
        match node:
            case ast.Name(id=name):
                return self._names.get(name, "")
            case ast.Attribute(value=value, attr=attribute):
                owner = self._full(value)
                return f"{owner}.{attribute}" if owner else ""
        return ""

    def _asked(self, *nodes: ast.AST) -> None:
        self._conditions += 1
        for each in nodes:
            self.visit(each)
        self._conditions -= 1

    def _take(self, name: str, node: ast.stmt) -> None:
        self.taken.append(Taken(name, self._conditions > 0, self._place(node)))

    def _in_library(self, name: str) -> bool:
        return name == self._tree or name.startswith(f"{self._tree}.")

    def _place(self, node: ast.stmt | ast.expr) -> str:
        folder = self._module.split(".")[: None if self._path.name == "__init__.py" else -1]
        return f"{'/'.join((*folder, self._path.name))}:{node.lineno}"


def _dicts_in(function: ast.FunctionDef) -> Mapping[str, tuple[str, ...]]:
    """Variable → the keys of the dict literal, or `dict(…)`, that a function binds to it."""
    found: dict[str, tuple[str, ...]] = {}
    for node in ast.walk(function):
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Dict(keys=keys)):
                texts = [key.value for key in keys if isinstance(key, ast.Constant)]
                found[name] = (*found.get(name, ()), *(text for text in texts if isinstance(text, str)))
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call(func=ast.Name(id="dict"), keywords=keywords)):
                found[name] = (*found.get(name, ()), *(k.arg for k in keywords if k.arg))
    return found
