"""Spaces: files that say which axes are walked and how, and the scenario lists that need no walk.

    schema = 1
    [space]
    title = "what it is for"
    exhaustive = ["dtype", "mesh", "offload"]   # every valid combination of these axes appears
    strength = 2                                # on top: every valid pair (3: triple, "all": everything)

    [axes]                                      # each system's axes; what is missing stays at its default
    dtype = ["fp32", "bf16"]
    mesh = ["world<=4", "1x8x1"]                # `world<=N` stands for all meshes up to that world

    [system.torch-fsdp2]                        # one table a system, with what differs for it
    strength = 2
    three_way = ["load", "program"]             # axes whose triples are covered too
    budget_s = 900                              # a plan that takes longer is refused
    [system.torch-fsdp2.axes]
    checkpoint = ["dcp", "full"]
    [[system.torch-fsdp2.leave_out]]            # combinations that this walk leaves out, counted as excluded
    reason = "why, for the reader"
    axes = { offload = "cpu*", program = ["resume", "twice"] }

A file may also hold one `[scenario]` or several `[[scenario]]`, with or without a `[space]`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from importlib import resources
from itertools import product
from pathlib import Path
from typing import Any

from harness.errors import UsageError
from harness.models import model_spec
from harness.program import operations
from harness.scenario import AXES, Mesh, Scenario, load_toml, parse_axis
from harness.systems import builtin  # noqa: F401  (registers the systems)
from harness.systems.registry import system_info

WALKED_AXES = tuple(axis for axis in AXES if axis not in ("system", "version"))
MAX_STRENGTH = 4
ALL = len(WALKED_AXES)
_SPACE_KEYS = ("title", "exhaustive", "strength", "three_way", "budget_s")
_SYSTEM_KEYS = (*_SPACE_KEYS[1:], "leave_out", "axes")


@dataclass(frozen=True)
class LeaveOut:
    """Combinations that a walk leaves out. axes: axis → shell-style patterns, one of which its value matches."""

    reason: str
    axes: Mapping[str, tuple[str, ...]]

    def matches(self, scenario: Scenario) -> bool:
        return all(
            any(fnmatchcase(scenario.axis_text(axis), pattern) for pattern in patterns)
            for axis, patterns in self.axes.items()
        )


@dataclass(frozen=True)
class Walk:
    """How one system's part of a space is walked.

    axes: axis → canonical values, in order. exhaustive: axes of which every valid combination appears.
    strength: every valid combination of this many axes appears. three_way: axes of which every valid triple
    appears. budget_s: seconds the walk may take; None = any. leave_out: what it does not walk, with reasons.
    """

    system: str
    version: str = ""
    axes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    exhaustive: tuple[str, ...] = ()
    strength: int = 2
    three_way: tuple[str, ...] = ()
    budget_s: float | None = None
    leave_out: tuple[LeaveOut, ...] = ()


@dataclass(frozen=True)
class Space:
    """A space file as read. walks: one a system. general: how a system without a table of its own is walked."""

    name: str
    title: str
    walks: tuple[Walk, ...]
    general: Walk | None
    scenarios: tuple[Scenario, ...]

    def on_systems(self, names: Sequence[str]) -> Space:
        """The space on other systems, each `NAME` or `NAME@VERSION`.

        Raises:
            UsageError: an unknown system.
        """
        if not names:
            return self
        chosen = [split_system(name) for name in names]
        own = {walk.system: walk for walk in self.walks}
        walks = [
            replace(own.get(system, self.general), system=system, version=version)
            for system, version in chosen
            if self.general
        ]
        scenarios = [replace(s, system=name, version=version) for s in self.scenarios for name, version in chosen]
        return replace(self, walks=tuple(walks), scenarios=tuple(dict.fromkeys(scenarios)))

    def with_axes(self, values: Mapping[str, Sequence[str]]) -> Space:
        """The space with some axes replaced by, or widened to, the given values.

        Raises:
            UsageError: an unknown axis or value.
        """
        checked = {axis: _values(axis, texts, "--set") for axis, texts in values.items()}
        walks = tuple(replace(walk, axes={**walk.axes, **checked}) for walk in self.walks)
        choices = [dict(zip(checked, choice, strict=True)) for choice in product(*checked.values())]
        scenarios = dict.fromkeys(s.with_axes(choice) for s in self.scenarios for choice in choices)
        return replace(self, walks=walks, scenarios=tuple(scenarios))

    def at_strength(self, strength: int) -> Space:
        return replace(self, walks=tuple(replace(walk, strength=strength) for walk in self.walks))


def load_space(name: str) -> Space:
    """Read the space `name`: a file, or the name of one that ships with shardproof (`smoke`).

    Raises:
        UsageError: no such file, malformed TOML, an unknown key, axis or value.
    """
    text, origin = _text(name)
    document = load_toml(text, origin)
    _only_keys(origin, document, ("schema", "title", "space", "axes", "system", "scenario"))
    if "space" not in document and "scenario" not in document:
        raise UsageError.of(origin, sorted(document), "a table [space] or [scenario]", '[scenario]\nmodel = "dense"')
    if "space" not in document:
        _only_keys(origin, document, ("schema", "title", "scenario"))
    general, walks = _walks(document, origin) if "space" in document else (None, ())
    title = document.get("space", document).get("title", "")
    return Space(name, str(title), walks, general, _scenarios(document.get("scenario", []), origin))


def space_names() -> list[str]:
    """Names of the scenario files that ship with shardproof, regressions included."""
    root = resources.files("scenarios")
    folders = (("", root), ("regressions/", root.joinpath("regressions")))
    files = [(prefix, f) for prefix, folder in folders if folder.is_dir() for f in folder.iterdir()]
    found = [(prefix + f.name.removesuffix(".toml"), f) for prefix, f in files if f.name.endswith(".toml")]
    return sorted(
        name for name, f in found if {"[space]", "[scenario]", "[[scenario]]"} & set(f.read_text("utf-8").split())
    )


def split_system(text: str) -> tuple[str, str]:
    """`NAME[@VERSION]` in its two parts; the version is empty where none is given.

    Raises:
        UsageError: no such system.
    """
    name, _, version = text.partition("@")
    system_info(name)
    return name, version


def parse_settings(settings: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """`--set AXIS=V[,V]…` options as axis → values; a repeated axis adds values.

    A comma separates values, but for `faults`, where it joins the faults of one scenario: repeat the option there.

    Raises:
        UsageError: not of that form, or an unknown axis.
    """
    chosen: dict[str, tuple[str, ...]] = {}
    for setting in settings:
        axis, equals, text = setting.partition("=")
        if not equals or not (text or axis == "faults"):
            raise UsageError.of("--set", setting, "AXIS=VALUE[,VALUE]…", "--set dtype=bf16,fp32")
        if axis not in WALKED_AXES:
            raise UsageError.of("--set axis", axis, WALKED_AXES, "--set dtype=bf16 (systems: --system torch-fsdp2)")
        chosen[axis] = (*chosen.get(axis, ()), *([text] if axis == "faults" else text.split(",")))
    return chosen


def parse_strength(text: str) -> int:
    """`--strength`: a number of axes; `all` is their whole number.

    Raises:
        UsageError: neither.
    """
    return _strength(int(text) if text.isdecimal() else text, "--strength")


def canonical(axis: str, text: str) -> str:
    """The canonical text of an axis value, checked against what exists.

    Raises:
        UsageError: an unknown axis or value.
    """
    parse_axis(axis, text)
    if axis == "model":
        model_spec(text)
    elif axis == "program":
        operations(text)
    return Scenario().with_axes({axis: text}).axis_values()[axis]


def meshes(world: int) -> list[Mesh]:
    """Every mesh up to a world size, smallest world first."""
    sizes = range(1, world + 1)
    found = [Mesh(r, s, t) for r in sizes for s in sizes for t in sizes if r * s * t <= world]
    return sorted(found, key=lambda mesh: (mesh.world, mesh))


def _choices() -> list[str]:
    """The names for an error message; regressions, of which there are many, as one."""
    return [*(name for name in space_names() if "/" not in name), "regressions/NAME (`shardproof list` has them)"]


def _text(name: str) -> tuple[str, str]:
    """The file's text, and how to call it in errors."""
    path = Path(name)
    if path.suffix == ".toml" or path.is_file():
        try:
            return path.read_text("utf-8"), name
        except OSError as error:
            choices = f"a readable TOML file, or one of: {', '.join(_choices())}"
            raise UsageError.of(f"scenario file ({error.strerror})", name, choices, "shardproof run smoke") from None
        except UnicodeDecodeError:
            raise UsageError.of("scenario file", name, "a text file in UTF-8", "shardproof run smoke") from None
    packaged = resources.files("scenarios").joinpath(f"{name}.toml")
    if ".." in path.parts or path.is_absolute() or not packaged.is_file() or name not in space_names():
        raise UsageError.of("scenario name", name, (*_choices(), "FILE.toml"), "shardproof run smoke")
    return packaged.read_text("utf-8"), f"scenarios/{name}.toml"


def _walks(document: Mapping[str, Any], origin: str) -> tuple[Walk, tuple[Walk, ...]]:
    space = _table(document, "space", origin)
    _only_keys(f"{origin}: [space]", space, _SPACE_KEYS)
    general = _settled(Walk(""), {**space, "axes": document.get("axes", {})}, f"{origin}: [space]")
    walks = []
    for system in _table(document, "system", origin):
        split_system(system)
        own = _table(document["system"], system, origin)
        _only_keys(f"{origin}: [system.{system}]", own, _SYSTEM_KEYS)
        walks.append(_settled(replace(general, system=system), own, f"{origin}: [system.{system}]"))
    if not walks:
        raise UsageError.of(f"{origin}: systems", "none", "a table [system.NAME] for each", "[system.torch-fsdp2]")
    return general, tuple(walks)


def _settled(walk: Walk, table: Mapping[str, Any], where: str) -> Walk:
    """`walk` with the settings of a table; its axes are added to those already there."""
    axes = dict(walk.axes)
    for axis, texts in _table(table, "axes", where).items():
        if axis not in WALKED_AXES:
            raise UsageError.of(f"{where}: axis", axis, WALKED_AXES, 'dtype = ["fp32", "bf16"]')
        axes[axis] = _values(axis, texts, where)
    return replace(
        walk,
        axes=axes,
        exhaustive=_axis_names(table.get("exhaustive", walk.exhaustive), f"{where}: exhaustive"),
        strength=_strength(table["strength"], f"{where}: strength") if "strength" in table else walk.strength,
        three_way=_axis_names(table.get("three_way", walk.three_way), f"{where}: three_way"),
        budget_s=_seconds(table["budget_s"], where) if "budget_s" in table else walk.budget_s,
        leave_out=(*walk.leave_out, *_left_out(table.get("leave_out", []), where)),
    )


def _left_out(tables: object, where: str) -> Iterator[LeaveOut]:
    form = '[[system.NAME.leave_out]] with reason = "…" and axes = { program = "resume" }'
    for table in tables if isinstance(tables, list) else [tables]:
        match table:
            case {"reason": str(reason), "axes": dict(axes), **rest} if axes and not rest:
                pass
            case _:
                raise UsageError.of(f"{where}: leave_out", table, "a reason and axes", form)
        for axis in axes:
            if axis not in WALKED_AXES:
                raise UsageError.of(f"{where}: leave_out: axis", axis, WALKED_AXES, form)
        patterns = {
            axis: (given,) if isinstance(given, str) else tuple(map(str, given)) for axis, given in axes.items()
        }
        yield LeaveOut(reason, patterns)


def _values(axis: str, texts: object, where: str) -> tuple[str, ...]:
    """The checked, canonical values of an axis."""
    if isinstance(texts, str) or not isinstance(texts, Sequence) or not texts:
        raise UsageError.of(f"{where}: values of {axis}", texts, "a list of one or more values", f'{axis} = ["…"]')
    found: list[str] = []
    for text in map(_plain, texts):
        if axis == "mesh" and text.startswith("world<="):
            bound = text.removeprefix("world<=")
            if not bound.isdecimal() or not 1 <= int(bound) <= 64:
                raise UsageError.of(f"{where}: mesh", text, "world<=N with N from 1 to 64", "world<=8")
            found += map(str, meshes(int(bound)))
            continue
        try:
            found.append(canonical(axis, text))
        except UsageError as error:
            raise UsageError(f"{where}: {error}") from None
    if len(set(found)) < len(found):
        twice = next(value for value in found if found.count(value) > 1)
        raise UsageError.of(
            f"{where}: values of {axis}", twice, "each value once", f"{axis} without the second {twice}"
        )
    return tuple(found)


def _plain(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _scenarios(tables: object, origin: str) -> tuple[Scenario, ...]:
    scenarios = []
    for table in tables if isinstance(tables, list) else [tables]:
        if not isinstance(table, dict):
            raise UsageError.of(f"{origin}: scenario", table, "a table [scenario]", '[scenario]\nmodel = "dense"')
        values = {axis: canonical(axis, _plain(value)) for axis, value in table.items()}
        scenario = Scenario().with_axes(values)
        system_info(scenario.system)
        scenarios.append(scenario)
    return tuple(scenarios)


def _strength(value: object, where: str) -> int:
    if value == "all":
        return ALL
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_STRENGTH:
        raise UsageError.of(where, value, ("all", *range(1, MAX_STRENGTH + 1)), "2")
    return value


def _seconds(value: object, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
        raise UsageError.of(f"{where}: budget_s", value, "a number of seconds above 0", "budget_s = 900")
    return float(value)


def _axis_names(names: object, where: str) -> tuple[str, ...]:
    if not isinstance(names, (list, tuple)) or any(name not in WALKED_AXES for name in names):
        raise UsageError.of(where, names, f"a list of axes: {', '.join(WALKED_AXES)}", '["dtype", "mesh"]')
    return tuple(names)


def _table(document: Mapping[str, Any], key: str, where: str) -> Mapping[str, Any]:
    table = document.get(key, {})
    if not isinstance(table, Mapping):
        raise UsageError.of(f"{where}: {key}", table, "a table", f"[{key}]")
    return table


def _only_keys(where: str, table: Mapping[str, Any], allowed: Sequence[str]) -> None:
    for key in table:
        if key not in allowed:
            raise UsageError.of(f"{where}: key", key, allowed, f"{allowed[-1]} = …")
