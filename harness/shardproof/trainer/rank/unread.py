"""Which statements of a function read a local name that another one makes.

A value that no statement reads, or that only a branch reads which is not taken, is worked out for nothing: an option
that was applied to it has no effect. Names are told from the text of a file, so all that could read one in another way
counts as reading: functions inside the function, `locals()`, `eval`, `global` and `nonlocal`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import NamedTuple

_Function = ast.FunctionDef | ast.AsyncFunctionDef
_LOOKS_ALL_UP = frozenset({"locals", "vars", "eval", "exec"})


class Made(NamedTuple):
    """A local name that a statement alone assigns to.

    readers: lines of the statements that read it, each with the lines of the branches of which another one is taken
    instead; empty for a statement that always runs. Those that make the name anew out of itself are left out.
    """

    name: str
    readers: tuple[tuple[int, tuple[tuple[int, int], ...]], ...]


def made_in(tree: ast.Module) -> dict[int, Made]:
    """Line of a statement that assigns to one local name of a function → that name, and who reads it."""
    found = dict[int, Made]()
    for function in ast.walk(tree):
        if isinstance(function, _Function):
            found |= _made_in(function)
    return found


def _made_in(function: _Function) -> dict[int, Made]:
    statements = list(_statements(function.body, ()))
    elsewhere, readers, makers = (
        set[str](),
        dict[str, list[tuple[int, tuple[tuple[int, int], ...]]]](),
        dict[int, str](),
    )
    for node, instead in statements:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            elsewhere |= _loaded(node)
            continue
        if isinstance(node, (ast.Global, ast.Nonlocal)):
            elsewhere |= {*node.names}
            continue
        own = _name_made(node)
        if own:
            makers[node.lineno] = own
        names = set[str]().union(*map(_loaded, _own_parts(node)))
        if names & _LOOKS_ALL_UP:
            return {}
        for name in names - {own}:
            readers.setdefault(name, []).append((node.lineno, instead))
    return {
        line: Made(name, tuple(readers.get(name, ())))
        for line, name in makers.items()
        if name not in elsewhere and name[0] != "_"
    }


def _name_made(node: ast.stmt) -> str:
    """The one name that a statement assigns a value to; empty where it does something beside."""
    match node:
        case ast.Assign(targets=[ast.Name(id=name)], value=value):
            return "" if _acts(value) else name
        case ast.AugAssign(target=ast.Name(id=name)):
            return name
    return ""


def _acts(value: ast.expr) -> bool:
    """Whether a value is asked for because of what else happens: of an update, or of a function that ends with `_`."""
    called = value.func if isinstance(value, ast.Call) else None
    name = called.attr if isinstance(called, ast.Attribute) else called.id if isinstance(called, ast.Name) else ""
    return name.endswith("_") or name in ("step", "backward", "update")


def _loaded(node: ast.AST) -> set[str]:
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name) and not isinstance(each.ctx, ast.Store)}


_INSIDE = (ast.stmt, ast.ExceptHandler, ast.match_case)


def _own_parts(node: ast.stmt) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.match_case):
            yield from (part for part in (child.pattern, child.guard) if part is not None)
        elif not isinstance(child, _INSIDE):
            yield child


def _statements(
    body: list[ast.stmt], instead: tuple[tuple[int, int], ...]
) -> Iterator[tuple[ast.stmt, tuple[tuple[int, int], ...]]]:
    """Every statement of a body, and inside its compound ones, each with the branches that may be taken instead of its
    own: also of an `if` in front of it that ends with a jump, such as a `return`. Functions inside are not entered."""
    for node in body:
        yield node, instead
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            continue
        if isinstance(node, ast.If):
            for own, other in ((node.body, node.orelse), (node.orelse, node.body)):
                yield from _statements(own, (*instead, *([_range(other)] if other else [])))
            instead = (*instead, *(_range(own) for own in (node.body, node.orelse) if own and _jumps(own)))
            continue
        for inner in ("body", "orelse", "finalbody"):
            yield from _statements(getattr(node, inner, []), instead)
        for handler in (*getattr(node, "handlers", []), *getattr(node, "cases", [])):
            yield from _statements(handler.body, instead)


def _jumps(body: list[ast.stmt]) -> bool:
    return isinstance(body[-1], (ast.Return, ast.Raise, ast.Continue, ast.Break))


def _range(body: list[ast.stmt]) -> tuple[int, int]:
    return body[0].lineno, body[-1].end_lineno or body[-1].lineno
