"""Which releases of a library under test there are, and what each needs beside it: `scenarios/systems.toml` as data.

A version, as a user writes it after `NAME@`, is a release (`0.16.1`), a working tree (`path:DIR`), a commit of a clone
(`git:REV`), or empty for the newest declared release.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import InvalidVersion, Version

from harness.errors import UsageError
from harness.scenario import load_toml

SOURCES = ("path:", "git:")
FORMS = "a release, path:DIR (a working tree), git:REV (a commit of a clone), or nothing for the newest"
_PACKAGE_KEYS = ("imports", "tree", "roots", "importer", "beside", "release", "commits")
_DECLARED: dict[str, Package] = {}
_RELEASE_KEYS = ("version", "supports", "torch", "beside")


@dataclass(frozen=True)
class Release:
    """version: as on the package index. supports: what upstream's metadata asks of packages that stay as they are.
    torch: the torch release upstream tested with, such as `2.9`; empty where upstream does not say. beside: packages
    installed with it, pinned."""

    version: str
    supports: tuple[str, ...] = ()
    torch: str = ""
    beside: tuple[str, ...] = ()

    def outside(self, installed: Mapping[str, str]) -> tuple[str, ...]:
        """Packages with which upstream never supported this release, and why.

        Args:
            installed: name → release, in the interpreter; what is installed beside the library comes before it.
        """
        pinned = dict(requirement.split("==", 1) for requirement in self.beside if "==" in requirement)
        installed = {**installed, **pinned}
        found = []
        for requirement in map(Requirement, self.supports):
            there = installed.get(requirement.name)
            if there and not requirement.specifier.contains(there, prereleases=True):
                found.append(f"{requirement.name} {there}: upstream asks for {requirement.specifier}")
        there = installed.get("torch")
        if self.torch and there and Version(there).release[:2] > Version(self.torch).release[:2]:
            found.append(f"torch {there}: upstream tested with {self.torch}")
        return tuple(found)


@dataclass(frozen=True)
class Package:
    """A distribution under test. imports: its module. tree: the importable package's folder in a source tree, below one
    of `roots`. beside: as of a release that is not declared. releases: declared, oldest first. importer:
    `module:function` of ours that imports it, where it cannot be imported by itself. commits: what trees from a version
    on need, where that version is on no package index; oldest first."""

    name: str
    imports: str
    tree: str
    roots: tuple[str, ...]
    beside: tuple[str, ...]
    releases: tuple[Release, ...]
    importer: str = ""
    commits: tuple[Release, ...] = ()

    @property
    def newest(self) -> Release:
        return self.releases[-1]

    def closest(self, version: str) -> Release:
        """What a tree between releases needs beside it, as far as it is declared: the newest declared release that is
        not newer, the oldest one before all of them; nothing that is known of a release for a tree that says none."""
        if not version:
            return Release("", beside=self.beside)
        own = Version(version)
        known = sorted((*self.releases, *self.commits), key=lambda release: Version(release.version))
        return next((r for r in reversed(known) if Version(r.version) <= own), known[0])

    def release(self, version: str) -> Release:
        """The release of that version, declared or not; the newest for an empty one.

        Raises:
            UsageError: it is no version.
        """
        if not version:
            return self.newest
        try:
            wanted = Version(version)
        except InvalidVersion:
            declared = ", ".join(release.version for release in self.releases)
            raise UsageError.of(
                f"version of {self.name}", version, f"{FORMS}; declared releases: {declared}",
                f"{self.name}@{self.newest.version}",
            ) from None  # fmt: skip
        known = next((release for release in self.releases if Version(release.version) == wanted), None)
        return known or Release(version, beside=self.beside)


def is_version(text: str) -> bool:
    """Whether a text is a version as PEP 440 writes it."""
    try:
        Version(text)
    except InvalidVersion:
        return False
    return True


def package(name: str) -> Package:
    """The declared package of that name.

    Raises:
        UsageError: there is none.
    """
    declared = {**_shipped(), **_DECLARED}
    if name not in declared:
        raise UsageError.of("package", name, declared, f"a table [{name}] in scenarios/systems.toml")
    return declared[name]


def declare(packages: Mapping[str, Package]) -> None:
    """Make further packages known, for the systems of a plugin."""
    _DECLARED.update(packages)


@cache
def _shipped() -> Mapping[str, Package]:
    return parse(resources.files("scenarios").joinpath("systems.toml").read_text("utf-8"), "scenarios/systems.toml")


def parse(text: str, origin: str) -> dict[str, Package]:
    """Read a declaration of packages.

    Raises:
        UsageError: malformed TOML, a key that is unknown or missing, a value of another type, no version or no
            requirement, releases out of order.
    """
    tables = {name: table for name, table in load_toml(text, origin).items() if name != "schema"}
    return {name: _package(name, table, f"{origin}: [{name}]") for name, table in tables.items()}


def _package(name: str, table: object, where: str) -> Package:
    known = _Table(table, where, _PACKAGE_KEYS, ("imports", "tree", "release"))
    beside = known.pinned("beside", ())
    entries = known.content["release"]
    if not isinstance(entries, list) or not entries:
        raise UsageError.of(f"{where}: release", entries, "one table a release", f"[[{name}.release]]")
    releases = tuple(_release(entry, beside, f"{where} release {number}") for number, entry in enumerate(entries, 1))
    order = [Version(release.version) for release in releases]
    if order != sorted(set(order)):
        raise UsageError.of(f"{where} releases", [r.version for r in releases], "each once, oldest first", "sort them")
    roots, importer = known.texts("roots", (".",)), known.text("importer")
    commits = tuple(_release(entry, beside, f"{where} commits") for entry in known.tables("commits"))
    return Package(name, known.text("imports"), known.text("tree"), roots, beside, releases, importer, commits)


def _release(entry: object, beside: tuple[str, ...], where: str) -> Release:
    known = _Table(entry, where, _RELEASE_KEYS, ("version",))
    version, torch = known.text("version"), known.text("torch")
    for key, given in (("version", version), ("torch", torch)):
        if (given or key == "version") and not is_version(given):
            raise UsageError.of(f"{where}: {key}", given, "a version by PEP 440", f'{key} = "1.2.3"')
    return Release(version, known.pinned("supports", ()), torch, known.pinned("beside", beside))


class _Table:
    """A table of the file, read with its types checked; all errors are `UsageError` and name `where`."""

    def __init__(self, content: object, where: str, allowed: Sequence[str], needed: Sequence[str]) -> None:
        if not isinstance(content, dict):
            raise UsageError.of(where, content, f"a table with {', '.join(needed)}", f"[{where.partition('[')[2]}")
        self.content: dict[str, Any] = content
        self.where = where
        _require_keys(where, content, allowed, needed)

    def text(self, key: str) -> str:
        found = self.content.get(key, "")
        if not isinstance(found, str):
            raise UsageError.of(f"{self.where}: {key}", found, "a text", f'{key} = "…"')
        return found

    def texts(self, key: str, absent: tuple[str, ...]) -> tuple[str, ...]:
        found = self.content.get(key, list(absent))
        if not isinstance(found, list) or not all(isinstance(item, str) for item in found):
            raise UsageError.of(f"{self.where}: {key}", found, "a list of texts", f'{key} = ["…"]')
        return tuple(found)

    def tables(self, key: str) -> list[object]:
        found = self.content.get(key, [])
        if not isinstance(found, list):
            raise UsageError.of(f"{self.where}: {key}", found, "a list of tables", f"[[{key}]]")
        return found

    def pinned(self, key: str, absent: tuple[str, ...]) -> tuple[str, ...]:
        """Requirements as pip writes them."""
        found = self.texts(key, absent)
        for item in found:
            try:
                Requirement(item)
            except InvalidRequirement:
                raise UsageError.of(f"{self.where}: {key}", item, "a requirement", "einops==0.8.1") from None
        return found


def _require_keys(where: str, table: Mapping[str, Any], allowed: Sequence[str], needed: Sequence[str]) -> None:
    for key in table:
        if key not in allowed:
            raise UsageError.of(f"{where}: key", key, allowed, f"{allowed[0]} = …")
    for key in needed:
        if key not in table:
            raise UsageError.of(f"{where}: keys", sorted(table), f"all of {', '.join(needed)}", f"{key} = …")
