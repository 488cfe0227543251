"""Statements that call something for a result alone, and take none.

`logits.masked_fill(mask, -inf)` leaves `logits` as it is, and a gather through which gradients go comes to new tensors:
where the statement is nothing but the call, both are for nothing. Told from the text of a file, with what its imports
stand for, and left out where the call could do something beside.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import NamedTuple

PURE = ("torch.nn.functional.", "torch.distributed.nn.functional.", "torch.distributed.nn.",
        "torch.distributed._functional_collectives.")  # fmt: skip
"""Modules of functions that change nothing of what they are given, unless an argument asks for it."""

_ASKS = frozenset({"inplace", "out"})

_WRITES = ("_", "inplace", "wait_tensor")
"""Ends of the names of functions among these that write into what they are given, or wait for it."""

IN_PLACE_TOO = frozenset({
    "abs", "addcdiv", "addcmul", "bitwise_and", "bitwise_or", "ceil", "clamp", "clamp_max", "clamp_min", "clip", "div",
    "divide", "exp", "floor", "index_add", "index_copy", "index_fill", "index_put", "lerp", "log", "masked_fill",
    "masked_scatter", "mul", "multiply", "nan_to_num", "neg", "pow", "reciprocal", "relu", "renorm", "rsqrt", "scatter",
    "scatter_add", "scatter_reduce", "sigmoid", "sqrt", "square", "sub", "subtract", "tanh", "tril", "triu",
    "true_divide",
})  # fmt: skip
"""Methods of tensors that make a new one, while the method of the same name and `_` changes the tensor."""


class Dropped(NamedTuple):
    """of: the path of the tensor whose method a statement calls, such as `self.mask`; empty of a function. name: of the
    method or the function."""

    of: str
    name: str


def dropped_in(tree: ast.Module) -> dict[int, Dropped]:
    """Line of a statement that is nothing but a call without effect → what it calls."""
    stands_for = dict(_imports(tree))
    functions = {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)
                 and any(ast.unparse(base).endswith("Function") for base in node.bases)}  # fmt: skip
    found = dict[int, Dropped]()
    for node in ast.walk(tree):
        match node:
            case ast.Expr(value=ast.Call(func=called, args=args, keywords=words)) if not _may_write(args, words):
                if dropped := _of(called, stands_for, functions):
                    found[node.lineno] = dropped
    return found


def _may_write(args: list[ast.expr], words: list[ast.keyword]) -> bool:
    """Whether an argument may ask for a result that is written into what is given, also by its place."""
    asked = any(isinstance(each, ast.Constant) and each.value is True for each in args)
    return asked or bool({word.arg for word in words} & _ASKS)


def _of(called: ast.expr, stands_for: dict[str, str], functions: set[str]) -> Dropped | None:
    path = ast.unparse(called)
    first, dot, rest = path.partition(".")
    whole = f"{stands_for.get(first, first)}{dot}{rest}"
    name = path.rpartition(".")[2]
    if f"{whole.rpartition('.')[0]}." in PURE and not name.endswith(_WRITES):
        return Dropped("", name)
    if not isinstance(called, ast.Attribute):
        return None
    holder = ast.unparse(called.value)
    if name == "apply" and holder in functions:
        return Dropped("", path)
    return Dropped(holder, name) if name in IN_PLACE_TOO and _is_path(called.value) else None


def _is_path(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) or (isinstance(node, ast.Attribute) and _is_path(node.value))


def _imports(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Make pairs of a name that a file imports and the whole name it has where it comes from."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((each.asname, each.name) for each in node.names if each.asname)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from ((each.asname or each.name, f"{node.module}.{each.name}") for each in node.names)
