"""The statements of a Python file, each with the names that it reads and makes.

A statement begins at its first line; of a compound one, such as a loop, only its head counts. Names are paths that can
be looked up without calling anything: `lr`, `self.cursor`, `group["lr"]`, `self.sizes[index]`.
"""

from __future__ import annotations

import ast
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path as FilePath
from typing import TypeVar

from shardproof.trainer.rank.dropped import Dropped, dropped_in
from shardproof.trainer.rank.lines import OURS, TORCH
from shardproof.trainer.rank.settings_read import Settings, settings_of
from shardproof.trainer.rank.unread import Made, made_in

Path = ast.Name | ast.Attribute | ast.Subscript


@dataclass(frozen=True)
class Statement:
    """A statement. line, last: its first line, from 1, and its last one, of a compound one those of its head. text: the
    first line as it stands in the file, without indentation. reads, makes: paths with their texts. may_change: those
    of which a method is called, or elements are assigned to. body: of an `if` or a `while`, the first and the last line
    of what runs where it holds; zeros of all others. end: of a compound one, the last line of all of it; 0 of all
    others. jumps: whether the body of an `if` ends with a jump, such as a `return`. loop: of a `for`, the first and the
    last line of its body. made: the one local name that it assigns to, and who reads it, as
    `shardproof.trainer.rank.unread` tells them; None where it makes something else. dropped: what it calls for a result
    that it does not take (`shardproof.trainer.rank.dropped`)."""

    line: int
    last: int
    text: str
    reads: tuple[tuple[str, Path], ...]
    makes: tuple[tuple[str, Path], ...]
    may_change: tuple[tuple[str, Path], ...] = ()
    body: tuple[int, int] = (0, 0)
    end: int = 0
    jumps: bool = False
    loop: tuple[int, int] = (0, 0)
    made: Made | None = None
    dropped: Dropped | None = None


def statements_of(source: str) -> dict[int, Statement]:
    """Line of a file → the statement that it belongs to.

    Raises:
        SyntaxError, ValueError: the source is no Python.
    """
    lines, found, tree = source.split("\n"), dict[int, Statement](), ast.parse(source)
    made, dropped = made_in(tree), dropped_in(tree)
    for node in ast.walk(tree):
        if not isinstance(node, ast.stmt) or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            continue
        parts = list(_parts(node))
        added_to = [ast.parse(ast.unparse(node.target), mode="eval").body] if isinstance(node, ast.AugAssign) else []
        reads, makes = _paths([*added_to, *parts], _read), _paths(parts, _made)
        ends = (part.end_lineno or node.lineno for part in parts if isinstance(part, ast.expr))
        last = max(ends, default=node.lineno) if _is_compound(node) else node.end_lineno or node.lineno
        body = (node.body[0].lineno, node.body[-1].end_lineno or 0) if isinstance(node, (ast.If, ast.While)) else (0, 0)
        text = lines[node.lineno - 1].strip()
        end = (node.end_lineno or 0) if _is_compound(node) else 0
        jumps = isinstance(node, ast.If) and isinstance(node.body[-1], _JUMPS)
        loop = (node.body[0].lineno, node.body[-1].end_lineno or 0) if isinstance(node, ast.For) else (0, 0)
        statement = Statement(
            node.lineno, last, text, reads, makes, _paths(parts, _called), body, end, jumps, loop,
            made.get(node.lineno), dropped.get(node.lineno),
        )  # fmt: skip
        found |= dict.fromkeys(range(node.lineno, last + 1), statement)
    return found


_INSIDE = (ast.stmt, ast.ExceptHandler, ast.match_case)
"""Kinds of nodes that are, or hold, statements of their own."""


_JUMPS = (ast.Return, ast.Continue, ast.Break, ast.Raise)


def _is_compound(node: ast.stmt) -> bool:
    return any(isinstance(child, _INSIDE) for child in ast.iter_child_nodes(node))


def _parts(node: ast.stmt) -> Iterator[ast.AST]:
    """What belongs to a statement itself, and to no statement inside it."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, _INSIDE):
            yield child


def _paths(parts: Iterable[ast.AST], of: Callable[[ast.AST], Iterator[Path]]) -> tuple[tuple[str, Path], ...]:
    found: dict[str, Path] = {}
    for part in parts:
        for path in of(part):
            found.setdefault(ast.unparse(path), path)
    return tuple(found.items())


def _read(node: ast.AST) -> Iterator[Path]:
    """The longest paths that a part of a statement reads, and those in their indices; of a call, what it is a method
    of."""
    if isinstance(node, Path) and _is_path(node):
        if not isinstance(node.ctx, ast.Del):
            yield from _indices(node) if isinstance(node.ctx, ast.Store) else (node, *_indices(node))
    elif named := _by_name(node, "getattr"):
        yield named
        yield from _read(named.slice)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        for child in (node.func.value, *node.args, *node.keywords):
            yield from _read(child)
    else:
        for child in ast.iter_child_nodes(node):
            yield from _read(child)


def _made(node: ast.AST) -> Iterator[Path]:
    """The paths that a part of a statement assigns to."""
    for each in ast.walk(node):
        if named := _by_name(each, "setattr"):
            yield named
        if isinstance(each, Path) and isinstance(each.ctx, ast.Store) and _is_path(each):
            yield each


def _by_name(node: ast.AST, function: str) -> ast.Subscript | None:
    """An attribute that a call of `getattr` or `setattr` names by a value, as if it were `object[name]`."""
    match node:
        case ast.Call(func=ast.Name(id=called), args=[held, name, *_]) if called == function:
            if _is_path(held) and (isinstance(name, ast.Constant) or _is_path(name)):
                return ast.Subscript(held, name, ast.Load())
    return None


def _called(node: ast.AST) -> Iterator[Path]:
    """What a part of a statement calls a method of, or assigns to elements of, which may change it."""
    for each in ast.walk(node):
        if isinstance(each, ast.Subscript) and isinstance(each.ctx, ast.Store) and _is_path(each.value):
            assert isinstance(each.value, Path)
            yield each.value
        if isinstance(each, ast.Call) and isinstance(each.func, ast.Attribute):
            if isinstance(each.func.value, Path) and _is_path(each.func.value):
                yield each.func.value
            elif named := _by_name(each.func.value, "getattr"):
                yield named


def _indices(path: Path) -> Iterator[Path]:
    held: ast.AST = path
    while isinstance(held, (ast.Attribute, ast.Subscript)):
        if isinstance(held, ast.Subscript):
            yield from _read(held.slice)
        held = held.value


def _is_path(node: ast.AST) -> bool:
    match node:
        case ast.Name():
            return True
        case ast.Attribute(value=held):
            return _is_path(held)
        case ast.Subscript(value=held, slice=index):
            return _is_path(held) and (isinstance(index, ast.Constant) or _is_path(index))
    return False


_Told = TypeVar("_Told")

_FOREIGN = (OURS, TORCH, *(f"{sysconfig.get_path(kind)}/" for kind in ("stdlib", "purelib", "platlib")))


@cache
def own_statements(name: str) -> dict[int, Statement]:
    """The statements of a file; none of one that is not the trainer's own, or that cannot be read."""
    if name[:1] == "<" or name.startswith(_FOREIGN) or any(_is_installed(name, folder) for folder in sys.path):
        return {}
    return _read_as(name, statements_of) or {}


@cache
def own_settings(name: str) -> Settings | None:
    """The settings of a file that is the trainer's own; None of one that cannot be read."""
    return _read_as(name, settings_of)


def _read_as(name: str, told: Callable[[str], _Told]) -> _Told | None:
    try:
        return told(FilePath(name).read_text("utf-8"))
    except (OSError, ValueError, SyntaxError, RecursionError):
        return None


def _is_installed(name: str, folder: str) -> bool:
    """Whether a file lies in a folder of `sys.path` in which a package manager has put packages."""
    return bool(folder) and name.startswith(folder + "/") and any(FilePath(folder).glob("*.dist-info"))
