"""Filters the library files changed by a commit down to files that a cure, an entry of `issues.toml` or a driver refers
to.

A cure patches a file, an entry of `issues.toml` blames one, and a driver imports one and calls what is in it. Where
last night's commits change none of these, all of ours fits tonight as it did, and there is nothing to port.

*Does not verify*: that ours fits where nothing that it names was touched. What a named function calls may have changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path, PurePosixPath

from shardproof.issues.cures import cures_of
from shardproof.issues.known_issues import known_issues_of
from shardproof.protocol.releases import Package
from shardproof.protocol.system import System
from shardproof.world.overlay import git

_MECHANISMS = "shardproof.mechanisms"
"""What several systems share; their drivers call libraries too."""


def changed_files(package: Package, last: str, now: str) -> list[str]:
    """The files of the library's tree that differ between two commits, each as below `site-packages`."""
    found = set[str]()
    for root in package.roots:
        place = PurePosixPath(root)
        listed = git(package, "diff", "--name-only", "--no-renames", last, now, "--", str(place / package.tree))
        found |= {str(PurePosixPath(name).relative_to(place)) for name in listed.splitlines()}
    return sorted(found)


def touched(system: System, package: Package, last: str, now: str) -> list[str]:
    """Those of the files that something of ours names, by path or as a module."""
    named = "\n".join(_texts(system))
    return [name for name in changed_files(package, last, now) if name in named or _module(name) in named]


def _module(name: str) -> str:
    parts = PurePosixPath(name).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _texts(system: System) -> Iterator[str]:
    for cure in cures_of(system):
        yield from cure.files
        for form in cure.others:
            yield from form
    yield from (issue.library_line for issue in known_issues_of(system, hidden=True))
    for module in (system.home, _MECHANISMS):
        spec = find_spec(module)
        folders = list(spec.submodule_search_locations or ()) if spec else []
        files = [path for folder in folders for path in sorted(Path(folder).rglob("*.py"))]
        if spec and not folders and spec.origin:
            files = [Path(spec.origin)]
        yield from (path.read_text("utf-8") for path in files)
