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

from packaging.requirements import Requirement
from packaging.version import InvalidVersion, Version

from harness.errors import UsageError
from harness.scenario import load_toml

SOURCES = ("path:", "git:")
FORMS = "a release, path:DIR (a working tree), git:REV (a commit of a clone), or nothing for the newest"
_PACKAGE_KEYS = ("imports", "tree", "roots", "importer", "beside", "release")
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
    `module:function` of ours that imports it, where it cannot be imported by itself."""

    name: str
    imports: str
    tree: str
    roots: tuple[str, ...]
    beside: tuple[str, ...]
    releases: tuple[Release, ...]
    importer: str = ""

    @property
    def newest(self) -> Release:
        return self.releases[-1]

    def closest(self, version: str) -> Release:
        """What a tree between releases needs beside it, as far as it is declared: the newest declared release that is
        not newer, the oldest one before all of them; nothing that is known of a release for a tree that says none."""
        if not version:
            return Release("", beside=self.beside)
        own = Version(version)
        return next((r for r in reversed(self.releases) if Version(r.version) <= own), self.releases[0])

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
        UsageError: malformed TOML, a key that is unknown or missing, releases out of order.
    """
    tables = {name: table for name, table in load_toml(text, origin).items() if name != "schema"}
    return {name: _package(name, table, f"{origin}: [{name}]") for name, table in tables.items()}


def _package(name: str, table: Mapping[str, Any], where: str) -> Package:
    _require_keys(where, table, _PACKAGE_KEYS, ("imports", "tree", "release"))
    beside = tuple(table.get("beside", ()))
    releases = tuple(_release(entry, beside, f"{where} release") for entry in table["release"])
    order = [Version(release.version) for release in releases]
    if order != sorted(set(order)):
        raise UsageError.of(f"{where} releases", [r.version for r in releases], "each once, oldest first", "sort them")
    roots, importer = tuple(table.get("roots", (".",))), table.get("importer", "")
    return Package(name, table["imports"], table["tree"], roots, beside, releases, importer)


def _release(entry: Mapping[str, Any], beside: tuple[str, ...], where: str) -> Release:
    _require_keys(where, entry, _RELEASE_KEYS, ("version",))
    return Release(
        entry["version"], tuple(entry.get("supports", ())), entry.get("torch", ""), tuple(entry.get("beside", beside))
    )


def _require_keys(where: str, table: Mapping[str, Any], allowed: Sequence[str], needed: Sequence[str]) -> None:
    for key in table:
        if key not in allowed:
            raise UsageError.of(f"{where}: key", key, allowed, f"{allowed[0]} = …")
    for key in needed:
        if key not in table:
            raise UsageError.of(f"{where}: keys", sorted(table), f"all of {', '.join(needed)}", f"{key} = …")
