"""Which settings of a trainer's own files are given, and which names anything reads.

A setting is what a line takes from outside, or fixes, for later: `self.warmup = cfg.warmup` and `self.dropout = 0.1` in
a function that builds something, a field of a dataclass, a keyword of a `SimpleNamespace`, a parameter of an
`__init__`. One that nothing reads has no effect. All is told from the text of files, and whatever could read a name in
another way counts as reading: a string of the same text, and a file that asks for all attributes of an object.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from shardproof.trainer.base import Trainer

_Function = ast.FunctionDef | ast.AsyncFunctionDef

_ALL_AT_ONCE = frozenset({"vars", "locals", "__dict__", "asdict", "astuple", "fields", "eval", "exec", "dir"})
"""Names by which a file may read every attribute."""

_PLAIN_BASES = frozenset({"", "Trainer", "Module", "object", "Dataset", "IterableDataset", "Sampler", "ABC"})
"""Bases of which nobody knows to read an attribute that a class of one's own has named."""

_OF_LOADERS = frozenset({"batch_size", "drop_last", "sampler", "batch_sampler", "generator", "epoch", "num_samples"})
"""Attributes of samplers and data sets that torch's loaders, and libraries around them, look for."""

_BUILDS = frozenset({"__init__", "build", "setup", "configure"})


class Settings(NamedTuple):
    """Of a file. given: line → name of a setting, and its text. read: names that something reads, in any way. whole:
    whether the file may read every name there is."""

    given: dict[int, tuple[str, str]]
    read: frozenset[str]
    whole: bool


def settings_of(source: str) -> Settings:
    """The settings that a file gives, and what it reads.

    Raises:
        SyntaxError, ValueError: the source is no Python.
    """
    tree, lines = ast.parse(source), source.split("\n")
    handed_on = {id(node.value) for node in ast.walk(tree)
                 if isinstance(node, ast.Assign) and _hands_on(node)}  # fmt: skip
    attributes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and id(node) not in handed_on]
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    texts = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    read = {node.attr for node in attributes if not isinstance(node.ctx, ast.Store)} | texts
    whole = bool((names | read) & _ALL_AT_ONCE)
    stored = Counter(node.attr for node in attributes if isinstance(node.ctx, ast.Store))
    given = {
        line: (name, lines[line - 1].strip()) for line, name in _given(tree) if name[0] != "_" and stored[name] < 2
    }
    return Settings(given, frozenset(read), whole)


def _given(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and {_last(base) for base in node.bases} <= _PLAIN_BASES:
            ours = dir(Trainer) if "Trainer" in map(_last, node.bases) else []
            yield from ((line, name) for line, name in _given_in(node) if name not in ours)
        elif isinstance(node, ast.Call) and _last(node.func) == "SimpleNamespace":
            yield from ((word.value.lineno, word.arg) for word in node.keywords if word.arg)


def _given_in(node: ast.ClassDef) -> Iterator[tuple[int, str]]:
    if any(_last(each.func if isinstance(each, ast.Call) else each) == "dataclass" for each in node.decorator_list):
        for field in node.body:
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                yield field.lineno, field.target.id
    for function in node.body:
        if isinstance(function, _Function) and function.name in _BUILDS:
            yield from _kept(function)


def _kept(function: _Function) -> Iterator[tuple[int, str]]:
    """Find the attributes to which a function assigns a plain value, and uses that value for nothing else."""
    every = Counter(ast.unparse(each) for each in ast.walk(function)
                    if isinstance(each, (ast.Name, ast.Attribute, ast.Subscript))
                    and not isinstance(each.ctx, ast.Store))  # fmt: skip
    for node in ast.walk(function):
        match node:
            case ast.Assign(targets=[ast.Attribute(value=ast.Name(id="self"), attr=name)], value=value):
                if _is_plain(value) and every[ast.unparse(value)] < 2:
                    yield node.lineno, name


def _hands_on(node: ast.AST) -> bool:
    """Whether a statement gives an attribute the value of another one of the same name, as `self.lr = cfg.lr` does."""
    match node:
        case ast.Assign(targets=[ast.Attribute(attr=name)], value=ast.Attribute(attr=other)):
            return name == other
    return False


def _is_plain(value: ast.expr) -> bool:
    """Whether a value is a constant, or a path of names, such as `cfg.warmup`."""
    match value:
        case ast.Constant(value=held):
            return held is not None
        case ast.Name():
            return True
        case ast.Attribute(value=held):
            return isinstance(held, (ast.Name, ast.Attribute))
        case ast.Subscript(value=held, slice=ast.Constant()):
            return isinstance(held, (ast.Name, ast.Attribute))
        case ast.Tuple(elts=each) | ast.List(elts=each):
            return bool(each) and all(isinstance(one, ast.Constant) for one in each)
    return False


def _last(node: ast.expr) -> str:
    """The last name of a path, such as `Module` of `torch.nn.Module`."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else "?"
