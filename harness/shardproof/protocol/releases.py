"""Which releases of a library under test there are, and what each needs beside it: each system's `releases.toml` as
data.

    schema = 1
    package = "megatron-core"        # the distribution
    imports = "megatron.core"        # the module that must import
    tree = "megatron/core"           # the importable package's folder in a source tree …
    roots = ["src", "."]             # … below one of these
    repository = "NVIDIA/Megatron-LM"    # on GitHub, where issues and pull requests have their numbers
    version_file = "version.txt"     # where a source tree keeps its version, from the repository's root; else it is
                                     # read from `package_info.py` in `tree`
    importer = "module:function"     # of ours, which imports it where it cannot be imported by itself
    beside = ["einops==0.8.1"]       # installed with it, and without dependencies of their own

    [[release]]                      # oldest first
    version = "0.16.1"
    beside = ["einops==0.8.1"]       # where this release needs others
    supports = ["torch>=2.6.0"]      # what upstream's metadata asks of packages that stay as they are
    torch = "2.10"                   # of the image that upstream's CI builds this release on
    users = "Who runs it."           # on the oldest release that users still run, and on no other: who they are, as a
                                     # public pin shows it

    [[commits]]                      # what trees from a version on need, where no release of it is on the package index
    version = "0.18.0"

torch, numpy and whatever else is in the interpreter stay as they are.

A version, as a user writes it after `NAME@`, is a release (`0.16.1`), a working tree (`path:DIR`), a commit of a clone
(`git:REV`), `oldest` for the oldest declared release that users still run, or empty for the newest declared one. Cures
may follow it (`0.16.1+cured`, see `shardproof.issues.cures`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import InvalidVersion, Version

from shardproof.errors import UsageError
from shardproof.protocol.registry import all_systems
from shardproof.protocol.system import System
from shardproof.tables import Table, load_toml, text_of
from shardproof.versions import is_version

FORMS = (
    "a release, path:DIR (a working tree), git:REV (a commit of a clone), oldest (the oldest that users still run), or "
    "nothing for the newest; with +cured or +cured:ID,ID behind it"
)
_PACKAGE_KEYS = (
    "schema", "package", "repository", "imports", "tree", "roots", "version_file", "importer", "beside", "release",
    "commits",
)  # fmt: skip
_RELEASE_KEYS = ("version", "supports", "torch", "beside", "users")

OLDEST = "oldest"


@dataclass(frozen=True)
class Release:
    """version: as on the package index. supports: what upstream's metadata asks of packages that stay as they are.
    torch: the torch release upstream tested with, such as `2.9`; empty where upstream does not say. beside: packages
    installed with it, pinned. users: who still runs it, of the oldest release that anybody does."""

    version: str
    supports: tuple[str, ...] = ()
    torch: str = ""
    beside: tuple[str, ...] = ()
    users: str = ""

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
    on need, where that version is on no package index; oldest first. version_file: the file that says a source tree's
    version, from the repository's root; empty where `package_info.py` in `tree` does, or nothing. repository: OWNER and
    name on GitHub; empty where it has none."""

    name: str
    imports: str
    tree: str
    roots: tuple[str, ...]
    beside: tuple[str, ...]
    releases: tuple[Release, ...]
    importer: str = ""
    commits: tuple[Release, ...] = ()
    version_file: str = ""
    repository: str = ""

    @property
    def newest(self) -> Release:
        return self.releases[-1]

    @property
    def oldest(self) -> Release:
        """The oldest release that users still run, as far as the declaration says."""
        return next((release for release in self.releases if release.users), self.releases[0])

    def closest(self, version: str) -> Release:
        """What a tree between releases needs beside it, as far as it is declared: the newest declared release that is
        not newer, the oldest one before all of them; nothing that is known of a release for a tree that says none."""
        if not version:
            return Release("", beside=self.beside)
        own = Version(Version(version).base_version)
        known = sorted((*self.releases, *self.commits), key=lambda release: Version(release.version))
        return next((r for r in reversed(known) if Version(r.version) <= own), known[0])

    def declares(self, version: str) -> bool:
        """Whether a version is one of the declared releases: walked before, as far as we are concerned."""
        return any(release.version == version for release in self.releases)

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


def package(name: str) -> Package:
    """The declared package of that name.

    Raises:
        UsageError: there is none, or its file is malformed.
    """
    for system in all_systems():
        if system.under_test == name:
            return package_of(system)
    raise UsageError.of("package", name, sorted({s.under_test for s in all_systems()} - {""}), "megatron-core")


def without_names(system: System, version: str) -> str:
    """A version as a user writes it, with the release in the place of `oldest`; the cures behind it stay."""
    release, plus, cures = version.partition("+")
    if release != OLDEST or not system.under_test:
        return version
    return f"{package_of(system).oldest.version}{plus}{cures}"


@cache
def package_of(system: System) -> Package:
    """The package of a system that has one, from its `releases.toml`; without one, as a system of a plugin may be, from
    that of another system of the same library.

    Raises:
        UsageError: no such file, or a malformed one.
    """
    if (declared := system.own_package) is not None:
        found: Package = declared
        return found
    file = system.folder.joinpath("releases.toml")
    origin = f"{system.name}/releases.toml"
    if not file.is_file():
        others = (each for each in all_systems() if each is not system and each.under_test == system.under_test)
        if lender := next((each for each in others if each.folder.joinpath("releases.toml").is_file()), None):
            return package_of(lender)
        raise UsageError.of(f"releases of {system.name}", "no file", f"a file {origin} beside its walks", origin)
    return parse(text_of(file, origin), origin)


def parse(text: str, origin: str) -> Package:
    """Read a declaration.

    Raises:
        UsageError: malformed TOML, a key that is unknown or missing, a value of another type, no version or no
            requirement, releases out of order, `users` at more than one.
    """
    known = Table(load_toml(text, origin), origin)
    known.only(_PACKAGE_KEYS, needed=("package", "imports", "tree", "release"))
    beside = _pinned(known, "beside", ())
    releases = tuple(_release(entry, beside) for entry in known.tables("release"))
    if not releases:
        raise known.wrong("release", [], "one table a release", "[[release]]")
    order = [Version(release.version) for release in releases]
    if order != sorted(set(order)):
        raise UsageError.of(f"{origin} releases", [r.version for r in releases], "each once, oldest first", "sort them")
    if len(used := [release.version for release in releases if release.users]) > 1:
        raise UsageError.of(f"{origin} users", used, "one release: the oldest that users still run", used[0])
    commits = tuple(_release(entry, beside) for entry in known.tables("commits"))
    return Package(
        known.text("package"), known.text("imports"), known.text("tree"), known.texts("roots", (".",)), beside,
        releases, known.text("importer"), commits, known.text("version_file"),
        known.text("repository"),
    )  # fmt: skip


def _release(known: Table, beside: tuple[str, ...]) -> Release:
    known.only(_RELEASE_KEYS, needed=("version",))
    version, torch = known.text("version"), known.text("torch")
    for key, given in (("version", version), ("torch", torch)):
        if (given or key == "version") and not is_version(given):
            raise known.wrong(key, given, "a version by PEP 440", f'{key} = "1.2.3"')
    users = known.text("users")
    return Release(version, _pinned(known, "supports", ()), torch, _pinned(known, "beside", beside), users)


def _pinned(known: Table, key: str, absent: tuple[str, ...]) -> tuple[str, ...]:
    """Requirements as pip writes them."""
    found = known.texts(key, absent)
    for item in found:
        try:
            Requirement(item)
        except InvalidRequirement:
            raise known.wrong(key, item, "a requirement", "einops==0.8.1") from None
    return found
