"""Features of a library, looked up in its source where no release number tells whether a feature is there.

Some limits are about a thing that a library came to have: "`fully_shard_by_dtype` takes no `reshard_after_forward`
before 0.6.0". For a release that is looked up by its number. A working tree or a commit has a number too, that of the
release which its authors expect next or made last, and it says little: in August 2026 Automodel's main called itself
0.5.0 and had what the release 0.6.0 has. Asked by that number, a third of a walk would be refused for arguments that
stand in the signature. So a *feature* says both: since which release it is there, and where in the source it is seen.

1. A system declares its features beside its limits (`Accepts.features`), and a limit asks `lacks(scenario, FEATURE)`.
2. When the overlay of a tree is made (`shardproof.world.overlay`), each feature is looked for in the source. The source
   is parsed, and nothing of it runs (`found_in`).
3. What was found travels in the version that the tree's limits are asked about, as a local label of PEP 440:
   `0.5.0+has.dtype_reshard.reshard_field` (`with_features`). So a limit stays a pure function of a scenario.

What can go wrong: a feature whose definition moved to another file is not found, and its limit refuses too much. That
is coverage lost, which a run counts and says (`shardproof.report.lost_coverage`).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from shardproof.scenario import Scenario
from shardproof.versions import before

_HAS = "has"
_NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
_PLACE = re.compile(r"(?P<file>[\w/]+\.py)(: (?P<name>\w+(\.\w+)*)(\((?P<parameter>\w+)\))?)?")
_Defined = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Feature:
    """Something that a library came to have.

    * name: of letters, digits and `_`, unique in its system.
    * since: the first release that has it.
    * place: where its source shows it, in a file below the library's own folder. `config.py: Config.field` is an
      attribute or a method of a class, `utils.py: shard(mesh)` a parameter of a function, `utils.py: shard` a function
      or class of the module, and `model.py` the file itself.
    * until: the first release that has it no more; empty where all later ones have it.

    Raises:
        ValueError: a name or a place of another form.
    """

    name: str
    since: str
    place: str
    until: str = ""

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name) or not _PLACE.fullmatch(self.place):
            raise ValueError(
                f"feature {self.name!r} at {self.place!r}; the form is `name` at `file.py: Class.attribute`"
            )

    @cached_property
    def _parts(self) -> dict[str, str]:
        found = _PLACE.fullmatch(self.place)
        return found.groupdict("") if found else {}

    @property
    def file(self) -> str:
        """The file below the library's folder."""
        return self._parts["file"]

    def in_release(self, version: str) -> bool:
        """Whether a release has it. What has no number, such as the newest release unnamed, counts as the newest."""
        return not before(version, self.since) and (not self.until or before(version, self.until))

    def in_source(self, module: ast.Module | None) -> bool:
        """Whether a parsed file shows it. module: None where there is no such file."""
        if module is None:
            return False
        *path, last = self._parts["name"].split(".")
        place: ast.Module | _Defined | None = module
        for name in path:
            place = _defined(place, name) if place else None
        if place is None:
            return False
        if not last:
            return True
        found = _defined(place, last)
        if parameter := self._parts["parameter"]:
            return isinstance(found, ast.FunctionDef | ast.AsyncFunctionDef) and parameter in _parameters(found)
        return found is not None or last in _assigned(place)


def lacks(scenario: Scenario, feature: Feature) -> bool:
    """Whether the library of a scenario does not have a feature.

    A release is asked by its number. A tree whose source was read says what was found there. A tree that nobody has
    looked at yet, as when a run is planned, lacks nothing.
    """
    _, label, found = scenario.version.partition(f"+{_HAS}")
    return feature.name not in found.split(".") if label else not feature.in_release(scenario.version)


def found_in(tree: Path, features: Iterable[Feature]) -> tuple[str, ...]:
    """The names of the features that a library's folder shows, in order. Nothing of it is run."""
    asked = list(features)
    modules = {file: _parsed(tree / file) for file in {feature.file for feature in asked}}
    return tuple(sorted(feature.name for feature in asked if feature.in_source(modules[feature.file])))


def with_features(release: str, found: Sequence[str]) -> str:
    """The version string by which limits are checked for a source tree: the tree's stated release, extended by the
    features found in its source."""
    return f"{release}+{'.'.join((_HAS, *found))}"


def _parsed(file: Path) -> ast.Module | None:
    try:
        return ast.parse(file.read_text("utf-8", "replace"))
    except (OSError, SyntaxError, ValueError):
        return None


def _statements(node: ast.AST) -> Iterable[ast.stmt]:
    """The statements of a module's or a class's body, those under `if`, `try` and `with` too."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt):
            yield child
        if isinstance(child, ast.If | ast.Try | ast.With | ast.ExceptHandler):
            yield from _statements(child)


def _defined(node: ast.AST, name: str) -> _Defined | None:
    return next((s for s in _statements(node) if isinstance(s, _Defined) and s.name == name), None)


def _assigned(node: ast.AST) -> set[str]:
    """The names that a module or a class gives a value or a type."""
    targets: list[ast.expr] = []
    for statement in _statements(node):
        if isinstance(statement, ast.Assign):
            targets += statement.targets
        elif isinstance(statement, ast.AnnAssign):
            targets.append(statement.target)
    return {target.id for target in targets if isinstance(target, ast.Name)}


def _parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    arguments = function.args
    return {each.arg for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
