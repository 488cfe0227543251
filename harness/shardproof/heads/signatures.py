"""Reads the signatures of a library's functions from its source tree, and checks whether they accept the arguments that
our driver passes.

An argument that upstream renames ends every scenario in the same `TypeError`, and a walk would only count it. Here the
calls of our driver (`calls.py`) are held against two trees, that of the newest walked release, which takes them, and
that of the head. What the first takes and the second does not is told with its place in the head:

    get_megatron_optimizer() takes no 'config_overrides' any more; new there: 'overrides'
    at megatron/core/optimizer/__init__.py:412, called in harness/shardproof/mechanisms/megatron/rank/loop.py:216

Nothing is imported, so that a tree which cannot be imported here can be read as well. A name is followed through
`from … import` to where it is defined. Of a method only the name is known: it is told where some function of that name
takes the argument in the release and none does in the head.

*Does not verify*: what a decorator makes of a signature; what is looked up by a computed name.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from shardproof.heads.calls import Call, Taken, absolute

MOST_STEPS = 8
"""So many times a name is followed from one module to the next."""


@dataclass(frozen=True)
class Takes:
    """What a function or class takes. place: file below `site-packages`, and line. names: of its arguments, in order,
    without `self`; required: those without a default. anything: whether it also takes names that it does not list."""

    place: str
    names: tuple[str, ...]
    required: tuple[str, ...]
    anything: bool


@dataclass(frozen=True)
class Changed:
    """Something that our driver uses and the head has no more, or has otherwise. what: in words. place: in the head's
    tree; empty where nothing is left there. called: where in our driver. function, argument: their names, by which a
    result that ran into it is known. asked: whether the driver may have asked the library before."""

    what: str
    place: str
    called: str
    function: str
    argument: str
    asked: bool

    def explains(self, reason: str) -> bool:
        """Whether the reason of a result without a verdict is this."""
        words = (self.function, f"'{self.argument}'" if self.argument else self.function)
        return all(word in reason for word in words)


def changes(calls: Iterable[Call], taken: Iterable[Taken], base: Tree, head: Tree) -> list[Changed]:
    """What the base offers of all that our driver uses and the head does not, each once."""
    found: dict[tuple[str, str], Changed] = {}
    for each in (*_gone(taken, base, head), *_otherwise(calls, base, head)):
        key = each.function, each.argument
        if key not in found or (found[key].asked and not each.asked):
            found[key] = each
    gone = {name for name, argument in found if not argument}
    return [each for (name, argument), each in found.items() if not argument or name not in gone]


def _gone(taken: Iterable[Taken], base: Tree, head: Tree) -> Iterator[Changed]:
    for each in taken:
        if base.has(each.name) and not head.has(each.name):
            module, _, name = each.name.rpartition(".")
            own, above = head.module(module), head.module(module.rpartition(".")[0])
            what = f"{name} is not in {module} any more" if own else f"there is no {module} any more"
            where = own or above
            place = head.shown(where) if where else ""
            yield Changed(what, place, each.place, name, "", each.asked)


def _otherwise(calls: Iterable[Call], base: Tree, head: Tree) -> Iterator[Changed]:
    for call in calls:
        if call.is_method:
            yield from _method(call, base, head)
            continue
        before, after = base.takes(call.name), head.takes(call.name)
        if before is None or after is None:
            continue
        yield from _arguments(call, before, after)


def _arguments(call: Call, before: Takes, after: Takes) -> Iterator[Changed]:
    name = call.name.rpartition(".")[2]
    new = [repr(each) for each in after.names if each not in before.names]
    hint = f"; new there: {', '.join(new)}" if new else ""
    for argument in call.keywords:
        if argument in before.names and argument not in after.names and not after.anything:
            what = f"{name}() takes no {argument!r} any more{hint}"
            yield Changed(what, after.place, call.place, name, argument, call.asked)
    if call.positional is None or not call.complete:
        return
    given = {*after.names[: call.positional], *call.keywords}
    for argument in after.required:
        if argument not in given and argument not in before.required and argument not in before.names:
            what = f"{name}() asks for {argument!r}, which it did not"
            yield Changed(what, after.place, call.place, name, argument, call.asked)


def _method(call: Call, base: Tree, head: Tree) -> Iterator[Changed]:
    """A method of an object whose class is not known: told where all functions of that name agree."""
    for argument in call.keywords:
        there = [takes for takes in base.named(call.name) if argument in takes.names]
        still = [takes for takes in head.named(call.name) if argument in takes.names or takes.anything]
        if there and not still:
            left = head.named(call.name)
            what = f"{call.name}() takes no {argument!r} any more" if left else f"there is no {call.name}() any more"
            place = left[0].place if left else ""
            yield Changed(what, place, call.place, call.name, argument if left else "", call.asked)


class Tree:
    """The source of a library. paths: the folders that hold it, as `sys.path` has them. package: dotted."""

    def __init__(self, paths: Sequence[Path], package: str) -> None:
        self._paths, self._package = tuple(paths), package
        self._parsed: dict[Path, ast.Module] = {}
        self._named: dict[str, tuple[Takes, ...]] = {}

    def module(self, name: str) -> Path | None:
        """The file of a module."""
        parts = name.split(".")
        for path in self._paths:
            for file in (path.joinpath(*parts).with_suffix(".py"), path.joinpath(*parts, "__init__.py")):
                if file.is_file():
                    return file
        return None

    def has(self, name: str) -> bool:
        """Whether a dotted name is there: a module, or something that a module binds. A name of another library that is
        handed on counts as there."""
        return self.module(name) is not None or self._holder(name) or self._find(name) is not None

    def takes(self, name: str) -> Takes | None:
        """What a function or class takes; None where that cannot be read."""
        found = self._find(name)
        return self._of(*found) if found else None

    def named(self, name: str) -> tuple[Takes, ...]:
        """What the functions and methods of one name take, wherever they are in the library."""
        if name not in self._named:
            self._named[name] = tuple(self._everywhere(name))
        return self._named[name]

    def shown(self, file: Path) -> str:
        """A file as a reader is told of it: below the folder that holds the library."""
        path = next(path for path in self._paths if file.is_relative_to(path))
        return str(file.relative_to(path))

    @cached_property
    def _texts(self) -> dict[Path, str]:
        folders = [path.joinpath(*self._package.split(".")) for path in self._paths]
        files = [file for folder in folders if folder.is_dir() for file in sorted(folder.rglob("*.py"))]
        return {file: file.read_text("utf-8", "replace") for file in files}

    def _everywhere(self, name: str) -> Iterator[Takes]:
        for file, text in self._texts.items():
            if f"def {name}(" in text and (tree := self._tree(file)) is not None:
                for node in ast.walk(tree):
                    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
                        yield _takes(node, f"{self.shown(file)}:{node.lineno}")

    def _holder(self, name: str) -> bool:
        """Whether a name is a folder of the library without an `__init__.py`."""
        return any(path.joinpath(*name.split(".")).is_dir() for path in self._paths)

    def _tree(self, file: Path) -> ast.Module | None:
        if file not in self._parsed:
            try:
                self._parsed[file] = ast.parse(file.read_text("utf-8", "replace"))
            except (SyntaxError, ValueError):
                self._parsed[file] = ast.Module([], [])
        return self._parsed[file]

    def _find(self, name: str, steps: int = MOST_STEPS) -> tuple[Path, ast.AST] | None:
        """Where a dotted name is defined: its file, and the statement that binds it."""
        module, _, attribute = name.rpartition(".")
        if not module or not steps:
            return None
        file = self.module(module)
        if file is None:
            return self._member(module, attribute, steps)
        package = module if file.name == "__init__.py" else module.rpartition(".")[0]
        tree = self._tree(file)
        stars = []
        for node in _statements(tree.body if tree else ()):
            match node:
                case ast.FunctionDef(name=bound) | ast.AsyncFunctionDef(name=bound) | ast.ClassDef(name=bound):
                    if bound == attribute:
                        return file, node
                case ast.Assign(targets=targets):
                    if any(isinstance(target, ast.Name) and target.id == attribute for target in targets):
                        return file, node
                case ast.AnnAssign(target=ast.Name(id=bound)) if bound == attribute:
                    return file, node
                case ast.Import(names=names):
                    if any((alias.asname or alias.name.partition(".")[0]) == attribute for alias in names):
                        return file, node
                case ast.ImportFrom(names=names):
                    source = absolute(node, package)
                    for alias in names:
                        if (alias.asname or alias.name) == attribute:
                            return self._find(f"{source}.{alias.name}", steps - 1) or (file, node)
                    stars += [source for alias in names if alias.name == "*"]
        return next((found for source in stars if (found := self._find(f"{source}.{attribute}", steps - 1))), None)

    def _member(self, owner: str, attribute: str, steps: int) -> tuple[Path, ast.AST] | None:
        """A method of a class."""
        found = self._find(owner, steps - 1)
        if found is None or not isinstance(found[1], ast.ClassDef):
            return None
        inside = (node for node in _statements(found[1].body) if getattr(node, "name", "") == attribute)
        return next(((found[0], node) for node in inside), None)

    def _of(self, file: Path, node: ast.AST) -> Takes | None:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                return _takes(node, f"{self.shown(file)}:{node.lineno}")
            case ast.ClassDef():
                return self._of_class(file, node)
        return None

    def _of_class(self, file: Path, node: ast.ClassDef) -> Takes | None:
        place = f"{self.shown(file)}:{node.lineno}"
        for inside in node.body:
            if isinstance(inside, ast.FunctionDef) and inside.name == "__init__":
                return _takes(inside, f"{self.shown(file)}:{inside.lineno}")
        bases = [self._base(file, base) for base in node.bases]
        if not any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list):
            return bases[0] if bases else None
        if None in bases:
            return None
        names, required = dict[str, None](), dict[str, None]()
        for base in filter(None, reversed(bases)):
            names |= dict.fromkeys(base.names)
            required |= dict.fromkeys(base.required)
        for field in node.body:
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                names[field.target.id] = None
                if field.value is None:
                    required[field.target.id] = None
                else:
                    required.pop(field.target.id, None)
        return Takes(place, tuple(names), tuple(required), any(base.anything for base in filter(None, bases)))

    def _base(self, file: Path, base: ast.expr) -> Takes | None:
        """What a base class takes; None where it is another library's."""
        path = next(path for path in self._paths if file.is_relative_to(path))
        parts = file.relative_to(path).with_suffix("").parts
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        return self.takes(f"{module}.{ast.unparse(base)}") if isinstance(base, ast.Name) else None


def _takes(node: ast.FunctionDef | ast.AsyncFunctionDef, place: str) -> Takes:
    arguments = node.args
    places = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
    without = places[: len(places) - len(arguments.defaults)]
    named = [argument.arg for argument in arguments.kwonlyargs]
    pairs = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    required = [*without, *(argument.arg for argument, default in pairs if default is None)]
    own = ("self", "cls")
    return Takes(
        place,
        tuple(name for name in (*places, *named) if name not in own),
        tuple(name for name in required if name not in own),
        arguments.kwarg is not None,
    )


def _statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a body, those under an `if` or a `try` too."""
    for node in body:
        yield node
        match node:
            case ast.If(body=first, orelse=second):
                yield from _statements((*first, *second))
            case ast.Try(body=first, handlers=handlers, orelse=second, finalbody=last):
                yield from _statements((*first, *(each for h in handlers for each in h.body), *second, *last))
