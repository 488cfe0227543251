"""What can be told of a trainer's file without running it: its class, its axes, what it requires, its methods.

The parent process imports no torch, and the stack that a trainer is written for may be installed for its ranks alone.
So the file is read as a syntax tree. `axes`, `requires`, `steps`, `altered`, `alike`, `transient`, `local` and
`emulates` are therefore literals in the body of the class, or names of literals at the top of the file; a base class in
the same file may have them too.

*Does not verify*: that the methods do anything. The ranks import the file, and say what goes wrong there.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement

from shardproof.errors import A_COMMAND, UsageError
from shardproof.trainer.base import world_of

FORM = "shardproof trainer my_trainer.py"
STEPWISE = ("build", "step", "save", "load")
BITS, ROUNDING_BF16 = "bits", "rounding bf16"
"""What `alike` may say of an axis, beside `rounding`."""

RUN, CHECKPOINT, REFUSE = "run", "checkpoint", "refuse"
"""What `altered` may say of an axis: which of the two wins, or that `load` raises."""

DATA = ("axes", "requires", "steps", "altered", "alike", "transient", "local", "frozen", "emulates")
RESERVED = ("rank", "world", "seed", "device", "folder", "sizes", "values")
"""What a cell has beside axes."""

_VALUE = re.compile(r"[^\s+,=]+")
_OPEN = re.compile(r"[^\s+]+")
MOST_CELLS = 100_000


@dataclass(frozen=True)
class Described:
    """A trainer as its file says it.

    * file, name: the class of that name in this file. doc: the first line of its docstring.
    * axes: axis → the texts of its values, the first of which is the plain one. open: axes that take other values too.
    * requires, steps, altered, alike, transient, local, frozen, emulates: see `shardproof.trainer.base.Trainer`.
    * fits: whether it has `fit` in the place of `build`, `step`, `save` and `load`.
    * literals: axis → its values as they stand in the file, such as `True` where `axes` has the text `true`.
    * saves: whether it can save and load.
    """

    file: Path
    name: str
    doc: str
    axes: Mapping[str, tuple[str, ...]] = field(hash=False)
    requires: tuple[str, ...] = ()
    steps: tuple[int, int] = (2, 2)
    altered: Mapping[str, str] = field(default_factory=dict, hash=False)
    transient: tuple[str, ...] = ()
    fits: bool = False
    literals: Mapping[str, Sequence[Any]] = field(default_factory=dict, hash=False)
    alike: Mapping[str, str] = field(default_factory=dict, hash=False)
    open: frozenset[str] = frozenset()
    saves: bool = True
    local: tuple[str, ...] = ()
    emulates: str = ""
    frozen: tuple[str, ...] = ()

    def takes(self, axis: str, text: str) -> bool:
        """Whether an axis has this value."""
        if text in self.axes[axis]:
            return True
        return axis in self.open and _OPEN.fullmatch(text) is not None and (axis != "mesh" or _is_mesh(text))

    @property
    def system(self) -> str:
        """The name of the system that the trainer is, such as `my_trainer:Mine`."""
        return f"{self.file.stem}:{self.name}"

    @property
    def plugin(self) -> str:
        """What names it to every process of a run."""
        return f"{self.file}:{self.name}"


def described(text: str) -> Described:
    """The trainer that `FILE.py` or `FILE.py:CLASS` names.

    Raises:
        UsageError: there is no such file or class, it is not Python, or something in it is not as it must be.
    """
    path, _, wanted = text.rpartition(":") if re.search(r"\.py:[^/]*$", text) else (text, "", "")
    file = Path(path)
    if file.suffix != ".py" or not file.is_file():
        raise UsageError.of("FILE", path, "a Python file that is there, and behind a colon the class in it", FORM)
    return _described(file.resolve(), wanted, file.stat().st_mtime_ns)


def is_trainer(text: str) -> bool:
    """Whether a text names a file, and no module."""
    return re.search(r"\.py(:\w*)?$", text) is not None


@lru_cache(maxsize=64)
def _described(file: Path, wanted: str, _changed: int) -> Described:
    try:
        tree = ast.parse(file.read_bytes(), str(file))
    except (SyntaxError, ValueError) as error:
        raise UsageError.of("FILE", file.name, f"Python that can be read ({error})", FORM) from None
    reading = _Reading(file, tree)
    return reading.described(reading.chosen(wanted))


class _Reading:
    """One file as a syntax tree: its classes, and the names of literals at its top."""

    def __init__(self, file: Path, tree: ast.Module) -> None:
        self.file = file
        self.classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
        self.literals = dict(_literals(tree.body))

    def chosen(self, wanted: str) -> ast.ClassDef:
        """The trainer of that name; without one, the only trainer there is."""
        trainers = [name for name, node in self.classes.items() if self._is_trainer(node)]
        if wanted:
            if wanted not in self.classes:
                raise UsageError.of(
                    f"class of {self.file.name}", wanted, trainers or "none: it has no class", f"{FORM}:Mine"
                )
            return self.classes[wanted]
        last = [name for name in trainers if not any(name in self._bases(self.classes[n]) for n in trainers)]
        if len(last) != 1:
            allowed = "a file with one class that derives from shardproof.trainer.Trainer"
            if self.classes and not last:
                allowed += f", or the name of the class behind a colon where its base has another name: {FORM}:CLASS"
            if last:
                allowed += f", or the name of one of its {len(last)} behind a colon: {', '.join(last)}"
            form = f"{FORM}:{last[0]}" if last else "class Mine(Trainer): ..."
            error = UsageError.of("FILE", self.file.name, allowed, form)
            raise error if last else error.led_to(A_COMMAND)
        return self.classes[last[0]]

    def described(self, node: ast.ClassDef) -> Described:
        """The description of a trainer class, from its methods and its literals."""
        methods, data = self._methods(node), self._data(node)
        fits = "fit" in methods
        steps = self._steps(data.get("steps", (2, 2)))
        wanted = STEPWISE if steps[1] else STEPWISE[:2]
        missing = [] if fits else [name for name in wanted if name not in methods]
        if missing and not self._derives_elsewhere(node):
            allowed = "build, step, save and load; or fit alone, of a framework that owns its loop"
            has = ", ".join(sorted(methods & {*STEPWISE, "fit"})) or "none of them"
            what = f"methods of {node.name} in {self.file.name} (there is no {', no '.join(missing)})"
            raise UsageError.of(what, has, allowed, f"def {missing[0]}({_ARGUMENTS[missing[0]]}): ...")
        doc = (ast.get_docstring(node) or "").split("\n", 1)[0]
        axes, opened = _closed(data.get("axes", {}))
        return Described(
            self.file, node.name, doc or f"the trainer {node.name} of {self.file.name}",
            self._axes(axes), self._requires(data.get("requires", ())), steps,
            self._winners("altered", data.get("altered", {}), axes, (RUN, CHECKPOINT, REFUSE)),
            self._patterns("transient", data.get("transient", ()), "ROLE NAME"), fits, axes,
            self._winners("alike", data.get("alike", {}), axes, (BITS, "rounding", ROUNDING_BF16)), opened,
            fits or methods >= {*STEPWISE} or self._derives_elsewhere(node),
            self._patterns("local", data.get("local", ()), "NAME"),
            self._emulates(data.get("emulates", "")),
            self._patterns("frozen", data.get("frozen", ()), "NAME"),
        )  # fmt: skip

    def _axes(self, given: object) -> dict[str, tuple[str, ...]]:
        if not isinstance(given, dict):
            raise self._wrong("axes", given, "a mapping of names to lists of values")
        found: dict[str, tuple[str, ...]] = {}
        for axis, values in given.items():
            if not isinstance(axis, str) or not axis.isidentifier() or axis in RESERVED:
                raise self._wrong("axes", axis, f"names that a cell has not already ({', '.join(RESERVED)})")
            if not isinstance(values, (list, tuple)) or not values:
                raise self._wrong(f"axes[{axis!r}]", values, "a list of one value or more, the plainest first")
            texts = tuple(map(text_of, values))
            wrong = next((text for text in texts if not _VALUE.fullmatch(text)), None)
            if wrong is not None or len(set(texts)) != len(texts):
                raise self._wrong(f"axes[{axis!r}]", values, "different texts, numbers, True, False or None, without "
                                  "blanks and none of + , =")  # fmt: skip
            found[axis] = texts
        for mesh in found.get("mesh", ()):
            if not _is_mesh(mesh):
                raise self._wrong("axes['mesh']", mesh, "sizes with an x between them, of 1024 ranks at most")
        return found

    def _requires(self, given: object) -> tuple[str, ...]:
        if not isinstance(given, (list, tuple)):
            raise self._wrong("requires", given, "a list of packages as pip names them")
        for number, text in enumerate(given):
            try:
                found = Requirement(text)
            except (InvalidRequirement, TypeError):
                raise self._wrong("requires", text, "packages as pip names them, such as einops==0.8.1") from None
            if found.url:
                raise self._wrong(
                    "requires", text, "packages of an index, and no addresses; put a checkout on PYTHONPATH"
                )
            if not number and not re.fullmatch(r"==[^,*]+", str(found.specifier)):
                raise self._wrong("requires", text, "the package under test first, with its release behind ==")
        return tuple(given)

    def _steps(self, given: object) -> tuple[int, int]:
        match given:
            case [int(before), int(after)] if 1 <= before <= 100 and 0 <= after <= 100:
                return before, after
        allowed = "two numbers up to 100: steps before the save, one at least, and after it, 0 for no save at all"
        raise self._wrong("steps", given, allowed)

    def _winners(self, what: str, given: object, axes: object, words: tuple[str, ...]) -> dict[str, str]:
        """`altered` or `alike`: axis → one of some words."""
        known = axes if isinstance(axes, dict) else {}
        if not isinstance(given, dict):
            raise self._wrong(what, given, f"a mapping of axes to {_either(words)}")
        for axis, word in given.items():
            if axis not in known or len(known[axis]) < 2 or word not in words:
                fit = [name for name, texts in known.items() if len(texts) > 1]
                allowed = f"{_MEANS[what]}; here: {', '.join(fit) or 'no axis has two values'}"
                raise self._wrong(what, {axis: word}, allowed)
        return dict(given)

    def _patterns(self, what: str, given: object, form: str) -> tuple[str, ...]:
        """Patterns of names. A text alone would be read letter by letter, and its `*` would excuse all state."""
        if not isinstance(given, (list, tuple)) or not all(isinstance(text, str) for text in given):
            raise self._wrong(what, given, f"a list of patterns of `{form}`, each a text")
        return tuple(given)

    def _emulates(self, given: object) -> str:
        if given not in ("", "cuda"):
            raise self._wrong("emulates", given, "cuda, or nothing where ranks run on what is there")
        return str(given)

    def _wrong(self, what: str, given: object, allowed: str) -> UsageError:
        return UsageError.of(f"{what} of {self.file.name}", given, allowed, _FORMS[what.partition("[")[0]])

    def _data(self, node: ast.ClassDef) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for base in self._bases(node):
            if base in self.classes:
                found |= self._data(self.classes[base])
        for name, value in _assigned(node.body):
            if name in DATA:
                found[name] = self._literal(name, value)
        return found

    def _literal(self, name: str, value: ast.expr) -> Any:
        if isinstance(value, ast.Name) and value.id in self.literals:
            return self.literals[value.id]
        try:
            return ast.literal_eval(_Filled(self.literals).visit(value))
        except (ValueError, TypeError, SyntaxError, RecursionError):
            text = ast.unparse(value)
            allowed = "a literal, or the name of one: the file is read before it is run"
            raise self._wrong(name, text, allowed) from None

    def _methods(self, node: ast.ClassDef) -> set[str]:
        own = {item.name for item in node.body if isinstance(item, (ast.FunctionDef, ast.AsyncFunctionDef))}
        own |= {name for name, _ in _assigned(node.body)}
        return own.union(*(self._methods(self.classes[base]) for base in self._bases(node) if base in self.classes))

    def _bases(self, node: ast.ClassDef) -> list[str]:
        return [base.attr if isinstance(base, ast.Attribute) else getattr(base, "id", "") for base in node.bases]

    def _is_trainer(self, node: ast.ClassDef) -> bool:
        return any(
            base == "Trainer" or (base in self.classes and base != node.name and self._is_trainer(self.classes[base]))
            for base in self._bases(node)
        )

    def _derives_elsewhere(self, node: ast.ClassDef) -> bool:
        """Whether a base class is in another file, which may have the methods."""
        bases = self._bases(node)
        return any(
            self._derives_elsewhere(self.classes[base]) if base in self.classes else base != "Trainer" for base in bases
        )


def _closed(axes: object) -> tuple[Any, frozenset[str]]:
    """The axes without the `...` behind their values, and the names of those axes that had it."""
    if not isinstance(axes, dict):
        return axes, frozenset()
    opened = {a for a, values in axes.items() if isinstance(values, (list, tuple)) and values[-1:] in ([...], (...,))}
    return {axis: values[:-1] if axis in opened else values for axis, values in axes.items()}, frozenset(opened)


def _is_mesh(text: str) -> bool:
    return re.fullmatch(r"[1-9][0-9]{0,3}(x[1-9][0-9]{0,3})*", text) is not None and world_of(text) <= 1024


class _Filled(ast.NodeTransformer):
    """Puts the literals in the place of their names."""

    def __init__(self, literals: Mapping[str, Any]) -> None:
        self.literals = literals

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if node.id not in self.literals:
            return node
        return ast.parse(repr(self.literals[node.id]), mode="eval").body


def _assigned(body: Sequence[ast.stmt]) -> list[tuple[str, ast.expr]]:
    found = []
    for item in body:
        if isinstance(item, ast.Assign):
            found += [(target.id, item.value) for target in item.targets if isinstance(target, ast.Name)]
        elif isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name) and item.value is not None:
            found.append((item.target.id, item.value))
    return found


def _literals(body: Sequence[ast.stmt]) -> list[tuple[str, Any]]:
    found = []
    for name, value in _assigned(body):
        try:
            found.append((name, ast.literal_eval(value)))
        except (ValueError, TypeError, SyntaxError, RecursionError):
            continue
    return found


def text_of(value: object) -> str:
    """The text of an axis' value in ids and on the command line: `true`, `none`, `0.001`, or the text itself."""
    match value:
        case bool() | None:
            return json.dumps(value).replace("null", "none")
        case float():
            return repr(value)
        case _:
            return str(value)


def _either(words: Sequence[str]) -> str:
    *others, last = (f"`{word}`" for word in words)
    return f"{', '.join(others)} or {last}"


_ARGUMENTS = {"build": "self, cell", "step": "self, index", "save": "self, folder", "load": "self, folder"}

_MEANS = {
    "altered": "axes of two values or more, each with `run` or `checkpoint`: whose value wins at a load; or `refuse`",
    "alike": "axes of two values or more, each with `bits`, `rounding` or `rounding bf16`: how near its values come",
}

_FORMS = {
    "axes": 'axes = {"mesh": ["2", "2x2"], "offload": [False, True]}',
    "requires": 'requires = ["accelerate==1.15.0", "psutil"]',
    "steps": "steps = (2, 2)",
    "altered": 'altered = {"lr": "run"}',
    "alike": 'alike = {"foreach": "bits"}',
    "transient": 'transient = ("grad *",)',
    "local": 'local = ["*.experts.*"]',
    "frozen": 'frozen = ["base.*"]',
    "emulates": 'emulates = "cuda"',
}
