"""Checks that every name which a cure's added lines use is defined in the patched file or its imports.

A cure written for one release may fit the lines of another and call a helper that this one does not have. Measured:
`universal-frozen` of DeepSpeed did so on a commit of its main branch, and 13 of 20 failures there were ours.

*Verifies*: that every bare name that an added line reads is bound in its function, in the file, by the cure itself, or
built into Python; that every attribute of `self` that it reads is named elsewhere in the file or in the classes that it
inherits from there; and that what it imports from the library is defined where it imports it from.
*Does not verify*: attributes of other objects, and that what a name stands for is still the same.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Callable, Iterable, Iterator, Set
from typing import TypeGuard

_Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
_BUILT_IN = frozenset({*dir(builtins), "__file__", "__name__", "__class__"})


def missing_name(text: str, added: Set[int], source: Callable[[str], str | None]) -> str:
    """The first name of added lines that is not there, as a reader should see it; empty if all are.

    Args:
        text: the file with the cure. added: its lines that the cure put in, from 1. source: the text of the library's
            file at a path below `site-packages`; None where there is no such file.
    """
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        return f"a file that Python can read ({error.msg}, line {error.lineno})"
    if any(isinstance(node, ast.ImportFrom) and node.names[0].name == "*" for node in tree.body):
        return ""
    everywhere = _BUILT_IN | set(_bound(tree.body))
    for within in _outermost(tree.body):
        if added.isdisjoint(range(within.lineno, (within.end_lineno or within.lineno) + 1)):
            continue
        fresh = [node for node in ast.walk(within) if getattr(node, "lineno", 0) in added]
        known = everywhere | set(_bound([within], deep=True))
        for node in fresh:
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id not in known:
                return f"`{node.id}`"
            if isinstance(node, ast.ImportFrom) and (gone := _not_exported(node, source)):
                return gone
    return _missing_attribute(tree, added)


def _outermost(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a module, those of its classes in the place of the classes."""
    for statement in body:
        if isinstance(statement, ast.ClassDef):
            yield from _outermost(statement.body)
        else:
            yield statement


def _bound(body: Iterable[ast.AST], *, deep: bool = False) -> Iterator[str]:
    """The names that statements bind. deep: in functions within them, too, and their arguments."""
    for node in body:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
                yield name
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                yield from ((each.asname or each.name).partition(".")[0] for each in names)
            case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                yield name
            case ast.Global(names=globals_):
                yield from globals_
        if deep or not isinstance(node, _Function | ast.ClassDef):
            yield from _bound(ast.iter_child_nodes(node), deep=deep)


def _not_exported(node: ast.ImportFrom, source: Callable[[str], str | None]) -> str:
    """What an import asks of the library and does not find; empty if it finds all, or asks something else."""
    if node.level or not node.module:
        return ""
    folder = node.module.replace(".", "/")
    text = source(f"{folder}.py") or source(f"{folder}/__init__.py")
    if text is None:
        known_package = source(f"{folder.partition('/')[0]}/__init__.py") is not None
        return f"the module `{node.module}`" if known_package else ""
    there = set(_bound(ast.parse(text).body))
    for each in node.names:
        submodule = source(f"{folder}/{each.name}.py") or source(f"{folder}/{each.name}/__init__.py")
        if each.name not in there and submodule is None:
            return f"`{each.name}` in {node.module}"
    return ""


def _missing_attribute(tree: ast.Module, added: Set[int]) -> str:
    """An attribute of `self` that added lines read and nothing else in the file names, of a class all of whose bases
    are in the file; what a class inherits from elsewhere cannot be told here."""
    nodes = list(ast.walk(tree))
    asked = [(node.lineno, node.attr) for node in nodes if _reads_self(node) and node.lineno in added]
    if not asked:
        return ""
    named = {name for node in nodes if not (_reads_self(node) and node.lineno in added) for name in _named(node)}
    classes = {node.name: node for node in nodes if isinstance(node, ast.ClassDef)}
    for owner in classes.values():
        whole = all(isinstance(base, ast.Name) and base.id in classes for base in owner.bases)
        inside = (attr for line, attr in asked if owner.lineno <= line <= (owner.end_lineno or line))
        if whole and (gone := next((attr for attr in inside if attr not in named), None)):
            return f"`self.{gone}`"
    return ""


def _reads_self(node: ast.AST) -> TypeGuard[ast.Attribute]:
    match node:
        case ast.Attribute(value=ast.Name(id="self"), ctx=ast.Load()):
            return True
    return False


def _named(node: ast.AST) -> tuple[str, ...]:
    """The attribute that a part of the file may give an object, or that it takes for granted."""
    match node:
        case ast.Attribute(attr=name) | ast.Constant(value=str(name)):
            return (name,)
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.AnnAssign(target=ast.Name(id=name)):
            return (name,)
    return ()
