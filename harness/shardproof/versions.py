"""Versions of packages, by PEP 440, where a rule asks about one. The parser is imported for the first version there is:
a plan of unnamed releases needs none.

Behind the version of a library under test may stand which of its known defects are cured: `0.16.1+cured`, see
`shardproof.issues.cures`.
"""

from __future__ import annotations

import re

CURED = "+cured"
TREE = "path:"
"""What stands before the folder of a working tree, in the place of a release."""
SOURCES = (TREE, "git:")
"""What a version begins with that is no release: a working tree, or a commit of a clone."""
TREE_VERSION = "SHARDPROOF_TREE_VERSION"
"""The environment variable in which the ranks of a tree find the version that its project's own file says: a library
that reads this file from the current folder would not find it."""
_VERSION = re.compile(r"(?P<release>.*?)\+cured(?::(?P<wanted>[^:]*))?", re.DOTALL)


def before(version: str, bound: str) -> bool:
    """Whether a scenario's version is a release older than `bound`.

    The newest one, which has no name, a working tree and a commit are not older: what they call themselves is asked
    once it is known. What leads to a release, such as `2.20.0.dev0` or `0.18.0rc1`, counts as that release: a tree that
    calls itself so may have any part of it. Which parts it has is asked of its source (`shardproof.protocol.features`).
    """
    version, _ = split_cures(version)
    if not is_version(version):
        return False
    from packaging.version import Version

    return Version(Version(version).base_version) < Version(bound)


def is_version(text: str) -> bool:
    """Whether a text is a version as PEP 440 writes it."""
    if not text:
        return False
    from packaging.version import InvalidVersion, Version

    try:
        Version(text)
    except InvalidVersion:
        return False
    return True


def split_cures(version: str) -> tuple[str, str | None]:
    """A version without its cures, and what follows `+cured:`; an empty text for all cures, None for none."""
    found = _VERSION.fullmatch(version)
    return (found["release"], found["wanted"] or "") if found else (version, None)


def with_cures(release: str, wanted: str | None) -> str:
    """A version with its cures: what `split_cures` takes apart."""
    return release if wanted is None else f"{release}{CURED}{':' if wanted else ''}{wanted}"
