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
    cured = true                                # the library without its known defects; a plain sample beside it
    version = "0.15.3"                          # the release that saves; without it the newest
    budget_s = 900                              # a plan that takes longer is refused
    shrink_s = 300                              # a run searches so long for the simplest scenario of each new cause
    [system.torch-fsdp2.axes]
    checkpoint = ["dcp", "full"]
    [[system.torch-fsdp2.leave_out]]            # combinations that this walk leaves out, counted as excluded
    reason = "why, for the reader"
    axes = { offload = "cpu*", program = ["resume", "twice"] }
    when = "owns_nothing"                       # and a predicate of the system's, by name

A file may also hold one `[scenario]` or several `[[scenario]]`, with or without a `[space]`.

The spaces that ship with shardproof (`scenarios/nightly.toml` and the like) name no system. How a system is walked in
one of them lies in the system's own `walk.toml`, in a table with the space's name, `[nightly]`; further walks of the
same space follow a slash, `["nightly/fsdp"]`. What a cured walk is to run on the library as it is, with the reason, is
said like what it leaves out, in `[[nightly.plain]]`. `extends = "nightly"` takes every walk of another space, with the
settings and axes of this one over it; `leave_out = false` then leaves nothing out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cached_property, lru_cache
from importlib.resources.abc import Traversable
from itertools import product
from pathlib import Path
from typing import Any

from shardproof.errors import A_TRAINER, UsageError
from shardproof.protocol.registry import all_systems, system_named
from shardproof.protocol.releases import without_names
from shardproof.protocol.system import System
from shardproof.scenario import AXES, Scenario, value_text
from shardproof.space.axis_values import canonical, meshes
from shardproof.space.defaults import completed
from shardproof.tables import SHIPPED, Table, load_toml, read_scenario_file
from shardproof.versions import TREE, split_cures, with_cures

WALKED_AXES = tuple(axis for axis in AXES if axis not in ("system", "version"))
MAX_STRENGTH = 4
ALL = len(WALKED_AXES)
_SETTINGS = ("cured", "exhaustive", "strength", "three_way", "budget_s", "shrink_s")
_SPACE_KEYS = ("title", "extends", "leave_out", *_SETTINGS)
_WALK_KEYS = ("axes", "leave_out", "plain", "version", *_SETTINGS)


@dataclass(frozen=True)
class LeaveOut:
    """Combinations that a walk leaves out or treats otherwise. axes: axis → shell patterns, one of which its value
    matches. when: a predicate of the system's, by name (`System.predicates`); empty for none."""

    reason: str
    axes: Mapping[str, tuple[str, ...]]
    when: str = ""

    def matches(self, scenario: Scenario, *, any_program: bool = False) -> bool:
        """Whether a scenario is one of them. any_program: whatever its program is."""
        rules = ((axis, rule) for axis, rule in self._matching.items() if not (any_program and axis == "program"))
        if not all(scenario.fact(axis, matches) for axis, matches in rules):
            return False
        return not self.when or system_named(scenario.system).predicates[self.when](scenario)

    @cached_property
    def _matching(self) -> dict[str, Callable[[Any], bool]]:
        """Axis → whether its value matches one of the patterns."""
        return {axis: _matcher(axis, patterns) for axis, patterns in self.axes.items()}


def _matcher(axis: str, patterns: tuple[str, ...]) -> Callable[[Any], bool]:
    return lambda value: any(fnmatchcase(value_text(axis, value), pattern) for pattern in patterns)


@dataclass(frozen=True)
class Walk:
    """How one system's part of a space is walked.

    * axes: axis → canonical values, in order.
    * exhaustive: axes of which every valid combination appears.
    * strength: every valid combination of this many axes appears.
    * three_way: axes of which every valid triple appears.
    * budget_s: seconds the walk may take; None = any.
    * shrink_s: seconds to search for the simplest scenario of each new cause; 0 = not at all.
    * leave_out: what it does not walk, with reasons.
    * plain: of a cured walk, what it runs on the library as it is, with reasons.
    * part: which of several walks of the system in one space; empty for the only or the main one.
    * sample: it is the plain sample of a walk over a cured library (`shardproof.space.walk.plain_sample`).
    """

    system: str
    part: str = ""
    version: str = ""
    axes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    exhaustive: tuple[str, ...] = ()
    strength: int = 2
    three_way: tuple[str, ...] = ()
    budget_s: float | None = None
    shrink_s: float = 0.0
    leave_out: tuple[LeaveOut, ...] = ()
    plain: tuple[LeaveOut, ...] = ()
    sample: bool = False


@dataclass(frozen=True)
class Space:
    """A space file as read. walks: one a system. general: how a system without a table of its own is walked. stated:
    the axes that each scenario of the file, or `--set`, states; canonical texts."""

    name: str
    title: str
    walks: tuple[Walk, ...]
    general: Walk | None
    stated: tuple[Mapping[str, str], ...]

    @cached_property
    def scenarios(self) -> tuple[Scenario, ...]:
        """The scenarios of the file, with defaults for what they leave out (`shardproof.space.defaults`)."""
        return tuple(dict.fromkeys(map(completed, self.stated)))

    def on_systems(self, names: Sequence[str]) -> Space:
        """The space on other systems, each `NAME` or `NAME@VERSION`. With a version, all of a system's walks are on
        that one; without, as the space has them.

        Raises:
            UsageError: an unknown system; or none is named, and the file itself names a working tree.
        """
        if not names:
            self._require_releases()
            return self
        chosen = [split_system(name) for name in names]
        own: dict[str, list[Walk]] = {}
        for walk in self.walks:
            own.setdefault(walk.system, []).append(walk)
        walks = [
            replace(walk, system=system, version=version or walk.version)
            for system, version in chosen
            for walk in own.get(system, [self.general] if self.general else [])
        ]
        stated = [{**axes, "system": name, "version": version} for axes in self.stated for name, version in chosen]
        return replace(self, walks=tuple(walks), stated=tuple(stated))

    def _require_releases(self) -> None:
        """Refuse a working tree that nobody but the file has named: its code would run, and a file can come from
        anywhere."""
        for axes in self.stated:
            version = axes.get("version", "")
            if version.startswith(TREE):
                allowed = "a release; a working tree is named on the command line, since its code runs"
                form = f"--system {axes.get('system', 'NAME')}@{version}"
                raise UsageError.of(f"version in {self.name}", version, allowed, form)

    def with_axes(self, values: Mapping[str, Sequence[str]], given_by: str = "--set") -> Space:
        """The space with some axes replaced by, or widened to, the given values; given_by: how errors call them.

        Raises:
            UsageError: an unknown axis or value.
        """
        systems = {walk.system for walk in self.walks} | {axes.get("system", Scenario().system) for axes in self.stated}
        checked = {axis: _values(axis, texts, given_by, sorted(systems)) for axis, texts in values.items()}
        walks = tuple(replace(walk, axes={**walk.axes, **checked}) for walk in self.walks)
        choices = [dict(zip(checked, choice, strict=True)) for choice in product(*checked.values())]
        stated = tuple({**axes, **choice} for axes in self.stated for choice in choices)
        return replace(self, walks=walks, stated=stated)

    def at_strength(self, strength: int) -> Space:
        return replace(self, walks=tuple(replace(walk, strength=strength) for walk in self.walks))


def load_space(name: str) -> Space:
    """Read the space `name`: a file, or the name of one that ships with shardproof (`smoke`).

    Raises:
        UsageError: no such file, malformed TOML, an unknown key, axis or value.
    """
    whole, _, part = name.partition("/")
    if part and "/" not in part and whole in space_names():
        return _one_part(load_space(whole), part)
    text, origin = _text(name)
    document = Table(load_toml(text, origin), origin)
    document.only(("schema", "title", "space", "axes", "system", "scenario"))
    if "space" not in document and "scenario" not in document:
        raise UsageError.of(
            origin, sorted(document.content), "a table [space] or [scenario]", '[scenario]\nmodel = "dense"'
        )
    if "space" not in document:
        document.only(("schema", "title", "scenario"))
        return Space(name, document.text("title"), (), None, _stated(document))
    general, walks = _walks(document, name)
    return Space(name, document.table("space").text("title"), walks, general, _stated(document))


def _one_part(space: Space, part: str) -> Space:
    """The walks of a space that are called `part` by the systems that have one: `nightly/fsdp`."""
    walks = tuple(walk for walk in space.walks if walk.part == part)
    if not walks:
        parts = sorted({f"{space.name}/{walk.part}" for walk in space.walks if walk.part})
        raise UsageError.of("scenario name", f"{space.name}/{part}", parts, f"shardproof run {space.name}")
    return replace(space, name=f"{space.name}/{part}", walks=walks, stated=())


def space_names() -> list[str]:
    """Names of the scenario files that ship with shardproof and with plugins, regressions included."""
    spaces = [_stem(file) for file in _toml_files(SHIPPED)]
    kept = [
        f"regressions/{system.name}-{_stem(file)}"
        for system in all_systems()
        for file in _toml_files(system.folder.joinpath("regressions"))
    ]
    return sorted([*spaces, *kept])


def _toml_files(folder: Traversable) -> list[Traversable]:
    return [file for file in folder.iterdir() if file.name.endswith(".toml")] if folder.is_dir() else []


def _stem(file: Traversable) -> str:
    return file.name.removesuffix(".toml")


def regression_file(system: System, name: str) -> Traversable:
    """The file of a regression of a system, by what follows `regressions/<system>-`."""
    return system.folder.joinpath("regressions", f"{name}.toml")


def split_system(text: str) -> tuple[str, str]:
    """`NAME[@VERSION]` in its two parts; the version is empty where none is given, and a release where it is `oldest`.

    Raises:
        UsageError: no such system.
    """
    name, _, version = text.partition("@")
    return name, without_names(system_named(name), version)


def parse_settings(settings: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """`--set AXIS=V[,V]…` options as axis → values; a repeated axis adds values.

    A comma separates values, but for `faults`, where it joins the faults of one scenario: repeat the option there.

    Raises:
        UsageError: not of that form, or an unknown axis.
    """
    chosen: dict[str, tuple[str, ...]] = {}
    for setting in settings:
        axis, equals, text = setting.partition("=")
        if not equals or not (text or axis in ("faults", "options")):
            raise UsageError.of("--set", setting, "AXIS=VALUE[,VALUE]…", "--set dtype=bf16,fp32")
        if axis not in WALKED_AXES:
            form = "--set dtype=bf16 (systems: --system NAME)"
            error = UsageError.of("--set axis", axis, WALKED_AXES, form)
            raise error if axis in AXES else error.led_to(A_TRAINER)
        chosen[axis] = (*chosen.get(axis, ()), *([text] if axis == "faults" else text.split(",")))
    return chosen


def parse_strength(text: str) -> int:
    """`--strength`: a number of axes; `all` is their whole number.

    Raises:
        UsageError: neither.
    """
    return _strength(int(text) if re.fullmatch("[0-9]{1,9}", text) else text, "--strength")


def _choices() -> list[str]:
    """The names for an error message; regressions, of which there are many, as one."""
    return [*(name for name in space_names() if "/" not in name), "regressions/NAME (`shardproof list` has them)"]


def _text(name: str) -> tuple[str, str]:
    """The file's text, and how to call it in errors."""
    path = Path(name)
    if path.suffix == ".py":
        raise UsageError.of("scenario file", name, "a file of TOML", "shardproof run my-bug.toml").led_to(A_TRAINER)
    if names_a_file(name):
        try:
            return read_scenario_file(path, name), name
        except OSError as error:
            choices = f"a readable TOML file, or one of: {', '.join(_choices())}"
            raise UsageError.of(f"scenario file ({error.strerror})", name, choices, "shardproof run smoke") from None
        except UnicodeDecodeError:
            raise UsageError.of("scenario file", name, "a text file in UTF-8", "shardproof run smoke") from None
    packaged = _packaged(name)
    if packaged is None and (
        kept := [each for each in space_names() if "/" in each and each.endswith((f"/{name}", f"-{name}"))]
    ):
        raise UsageError.of("scenario name", name, kept, f"shardproof run {kept[0]}")
    if packaged is None or not packaged.is_file():
        raise UsageError.of("scenario name", name, (*_choices(), "FILE.toml"), "shardproof run smoke", space_names())
    return packaged.read_text("utf-8"), f"scenarios/{name}.toml"


def names_a_file(name: str) -> bool:
    """Whether a word of a command line names a scenario file: it ends in `.toml`, or there is such a file. A name that
    is too long for a file is none."""
    try:
        return Path(name).suffix == ".toml" or Path(name).is_file()
    except (OSError, ValueError):
        return False


def _packaged(name: str) -> Traversable | None:
    """The file that a name stands for, where it is one of `space_names`."""
    if name not in space_names():
        return None
    kept = name.removeprefix("regressions/")
    if kept == name:
        return SHIPPED.joinpath(f"{name}.toml")
    owner = max((s for s in all_systems() if kept.startswith(f"{s.name}-")), key=lambda s: len(s.name))
    return regression_file(owner, kept.removeprefix(f"{owner.name}-"))


def _walks(document: Table, name: str) -> tuple[Walk, tuple[Walk, ...]]:
    """How a system without a table of its own is walked, and the walks of a space."""
    space = document.table("space").only(_SPACE_KEYS)
    over = Table({**{key: space.content[key] for key in _SETTINGS if key in space}, "axes": _axes_of(document)},
                 space.where)  # fmt: skip
    extended = load_space(space.text("extends")).walks if "extends" in space else ()
    general = _settled(Walk(""), over)
    base = {(walk.system, walk.part): _settled(walk, over) for walk in extended}
    for system, part, table in _tables_of(document, name):
        walk = base.get((system, part), replace(general, system=system, part=part))
        base[system, part] = _settled(walk, table.only(_WALK_KEYS))
    walks = list(base.values())
    if not space.flag("leave_out", absent=True):
        walks = [replace(walk, leave_out=()) for walk in walks]
    if not walks:
        raise UsageError.of(
            f"{document.where}: systems", "none", "a table [system.NAME] for each", "[system.torch-fsdp2]"
        )
    return general, tuple(walks)


def _axes_of(document: Table) -> Mapping[str, Any]:
    return document.table("axes").content


def _tables_of(document: Table, name: str) -> Iterator[tuple[str, str, Table]]:
    """(system, part, table) of each walk: those in the file itself, and in the systems' own files those of a space that
    ships with shardproof."""
    for system in document.table("system").content:
        split_system(system)
        yield system, "", Table(document.content["system"][system], f"{document.where}: [system.{system}]")
    if name not in space_names():
        return
    for found in all_systems():
        for key, table in walk_tables(found).items():
            space, _, part = key.partition("/")
            if space == name:
                yield found.name, part, table


def walk_tables(system: System) -> dict[str, Table]:
    """The tables of a system's `walk.toml`, by name; none where it has no such file."""
    file = system.folder.joinpath("walk.toml")
    if not file.is_file():
        return {}
    origin = f"{system.name}/walk.toml"
    document = _parsed(file.read_text("utf-8"), origin)
    return {key: Table(table, f"{origin}: [{key}]") for key, table in document.items() if key != "schema"}


@lru_cache(maxsize=32)
def _parsed(text: str, origin: str) -> Mapping[str, Any]:
    """A document, parsed once however many spaces and the estimate of costs look into it."""
    return load_toml(text, origin)


def _version_of(walk: Walk, table: Table) -> str:
    """The release that a walk saves with, cured or not, as its table has it or the walk before."""
    release, wanted = split_cures(walk.version)
    cured = table.flag("cured", absent=wanted is not None)
    return with_cures(table.text("version") if "version" in table else release, "" if cured else None)


def _settled(walk: Walk, table: Table) -> Walk:
    """`walk` with the settings of a table; its axes are added to those already there."""
    axes = dict(walk.axes)
    for axis, texts in table.table("axes").content.items():
        if axis not in WALKED_AXES:
            raise UsageError.of(f"{table.where}: axis", axis, WALKED_AXES, 'dtype = ["fp32", "bf16"]')
        axes[axis] = _values(axis, texts, table.where, [walk.system] if walk.system else [])
    return replace(
        walk,
        axes=axes,
        version=_version_of(walk, table),
        exhaustive=_axis_names(table, "exhaustive", walk.exhaustive),
        strength=_strength(table.content["strength"], f"{table.where}: strength")
        if "strength" in table
        else walk.strength,
        three_way=_axis_names(table, "three_way", walk.three_way),
        budget_s=table.positive("budget_s") if "budget_s" in table else walk.budget_s,
        shrink_s=table.positive("shrink_s", or_zero=True) if "shrink_s" in table else walk.shrink_s,
        leave_out=(*walk.leave_out, *map(_left_out, table.tables("leave_out"))),
        plain=(*walk.plain, *map(_left_out, table.tables("plain"))),
    )


def _left_out(table: Table) -> LeaveOut:
    table.only(("reason", "axes", "when"), needed=("reason",))
    patterns = table.table("axes")
    for axis in patterns.content:
        if axis not in WALKED_AXES:
            raise UsageError.of(f"{table.where}: axis", axis, WALKED_AXES, 'axes = { program = "resume" }')
    if not patterns.content and "when" not in table:
        raise UsageError.of(table.where, dict(table.content), "axes, or a predicate", 'axes = { program = "resume" }')
    return LeaveOut(table.text("reason"), {axis: patterns.texts(axis) for axis in patterns.content}, table.text("when"))


def _values(axis: str, texts: object, where: str, systems: Sequence[str]) -> tuple[str, ...]:
    """The checked, canonical values of an axis, for these systems."""
    if isinstance(texts, str) or not isinstance(texts, Sequence) or not texts:
        raise UsageError.of(f"{where}: values of {axis}", texts, "a list of one or more values", f'{axis} = ["…"]')
    found: list[str] = []
    for text in map(_plain, texts):
        if axis == "mesh" and text.startswith("world<="):
            bound = text.removeprefix("world<=")
            if not re.fullmatch("[0-9]{1,9}", bound) or not 1 <= int(bound) <= 64:
                raise UsageError.of(f"{where}: mesh", text, "world<=N with N from 1 to 64", "world<=8")
            found += map(str, meshes(int(bound)))
            continue
        try:
            found.append(canonical(axis, text, systems))
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


def _stated(document: Table) -> tuple[Mapping[str, str], ...]:
    """The axes of each scenario of a file, checked one by one."""
    found = []
    for table in document.tables("scenario"):
        unknown = next((axis for axis in table.content if axis not in AXES), None)
        if unknown is not None:
            raise table.wrong("axis", unknown, AXES, 'dtype = "bf16"')
        for axis, value in table.content.items():
            if isinstance(value, (list, Mapping)):
                raise table.wrong(axis, value, "a text", f'{axis} = "{Scenario().axis_text(axis) or "…"}"')
        try:
            system = system_named(_plain(table.content.get("system", Scenario().system))).name
            axes = {axis: canonical(axis, _plain(value), [system]) for axis, value in table.content.items()}
        except UsageError as error:
            raise UsageError(f"{table.where}: {error}") from None
        found.append(axes)
    return tuple(found)


def _strength(value: object, where: str) -> int:
    if value == "all":
        return ALL
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_STRENGTH:
        raise UsageError.of(where, value, ("all", *range(1, MAX_STRENGTH + 1)), "2")
    return value


def _axis_names(table: Table, key: str, absent: tuple[str, ...]) -> tuple[str, ...]:
    names = table.texts(key, absent)
    for name in names:
        if name not in WALKED_AXES:
            raise table.wrong(key, name, WALKED_AXES, f'{key} = ["dtype", "mesh"]')
    return names
