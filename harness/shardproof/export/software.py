"""The packages that took part in a run of a script, with their releases, and whether upstream supports them together.

A reader of an issue wants to run the script with the same packages. Their releases come from the metadata that pip left
beside them. The library itself is installed without what its metadata ask for, except for what it needs to be imported
here, so what is absent is said as well: a maintainer may otherwise look for the cause there.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import Distribution, distributions
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement

from shardproof.protocol.registry import system_named
from shardproof.protocol.system import System
from shardproof.result import Result
from shardproof.world.interpreter import normalised

ALWAYS = ("torch", "numpy")


@dataclass(frozen=True)
class Software:
    """* python: the interpreter's release.
    * versions: name → release, the library's first, of what the script imports.
    * required: the same, of what else the library's metadata ask for.
    * absent: what they ask for and is not installed.
    * outside: what upstream does not support of this, and why."""

    python: str
    versions: Mapping[str, str]
    required: Mapping[str, str] = field(default_factory=dict)
    absent: tuple[str, ...] = ()
    outside: tuple[str, ...] = ()

    def text(self) -> str:
        """A list in Markdown, with a sentence on the support of the combination."""
        lines = [f"* {name} {release}" for name, release in self.versions.items()]
        lines.append(f"* Python {self.python} on Linux")
        if self.required:
            others = ", ".join(f"{name} {release}" for name, release in self.required.items())
            lines.append(f"* and of what {self.library} requires: {others}")
        if self.absent:
            lines.append(f"* not installed, though {self.library} requires it: {', '.join(self.absent)}")
        support = self._support()
        return "\n".join(lines) + (f"\n\n{support}" if support else "")

    @property
    def library(self) -> str:
        return next(iter(self.versions), "the library")

    def _support(self) -> str:
        """Whether upstream supports the combination; empty where nothing is known of that."""
        if self.outside:
            return f"Upstream does not vouch for this combination: {'; '.join(self.outside)}."
        if self.required or self.absent:
            return f"The installed releases are within what the metadata of {self.library} ask for."
        return ""


def software_of(
    system: System,
    result: Result,
    python: str,
    installed: Mapping[str, str],
    places: Sequence[Path],
    scripts: Iterable[str],
) -> Software:
    """What a script of a result and the modules beside it import, and its library requires.

    Args:
        python: the interpreter's release. installed: normalised name → release of what the interpreter has. places:
            folders with packages, in the order of the path. scripts: the texts of the script and of those modules.
    """
    there = dict(_metadata(places))
    releases = {**installed, **{name: str(found.version) for name, found in there.items()}}
    first = system.distributions[0] if system.distributions else system.name
    under = [name for other in system.stands_on for name in system_named(other).distributions]
    wanted = [*system.distributions[1:], *under, *ALWAYS, *_of_modules(set().union(*map(_imported, scripts)), there)]
    versions = {first: result.version}
    for name in wanted:
        if normalised(name) in releases and normalised(name) not in map(normalised, versions):
            versions[name] = releases[normalised(name)]
    asked = list(_requirements(there.get(normalised(first))))
    mine = {normalised(name) for name in versions}
    required = {one.name: releases[normalised(one.name)] for one in asked if normalised(one.name) in releases}
    return Software(
        python,
        versions,
        {name: release for name, release in required.items() if normalised(name) not in mine},
        tuple(dict.fromkeys(one.name for one in asked if normalised(one.name) not in releases)),
        tuple(_outside(result.outside_support, asked, releases)),
    )


def _metadata(places: Iterable[Path]) -> Iterator[tuple[str, Distribution]]:
    """Normalised name → distribution; of two, the one that is first on the path."""
    for place in reversed(list(places)):
        for found in distributions(path=[str(place)]):
            if name := found.metadata["Name"]:
                yield normalised(name), found


def _imported(script: str) -> set[str]:
    """The packages that a script imports, but for those of Python itself."""
    nodes = list(ast.walk(ast.parse(script)))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    return {name.partition(".")[0] for name in names} - set(sys.stdlib_module_names)


def _of_modules(modules: set[str], there: Mapping[str, Distribution]) -> list[str]:
    """The distributions with these modules, by their names on the package index."""
    return sorted(str(found.metadata["Name"]) for found in there.values() if modules & _tops(found))


def _tops(found: Distribution) -> set[str]:
    """The importable names of a distribution."""
    if said := found.read_text("top_level.txt"):
        return set(said.split())
    return {file.parts[0].removesuffix(".py") for file in found.files or () if file.suffix == ".py"}


def _requirements(library: Distribution | None) -> Iterator[Requirement]:
    """What a library's metadata ask for, without what only its extras do."""
    for text in (library.requires if library else None) or ():
        try:
            asked = Requirement(text)
        except InvalidRequirement:
            continue
        if asked.marker is None or asked.marker.evaluate({"extra": ""}):
            yield asked


def _outside(known: Sequence[str], asked: Sequence[Requirement], releases: Mapping[str, str]) -> Iterator[str]:
    """What is not supported: as the run itself found, then by the metadata, each package once."""
    yield from known
    told = {normalised(line.partition(" ")[0]) for line in known}
    for one in asked:
        name = normalised(one.name)
        there = releases.get(name)
        if there and name not in told and not one.specifier.contains(there, prereleases=True):
            yield f"{one.name} {there}: upstream asks for {one.specifier}"
