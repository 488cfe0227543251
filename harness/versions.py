"""Versions of packages, by PEP 440, where a rule asks about one. The parser is imported for the first version there is:
a plan of unnamed releases needs none.
"""

from __future__ import annotations


def before(version: str, bound: str) -> bool:
    """Whether a scenario's version is a release older than `bound`.

    The newest one, which has no name, a working tree and a commit are not older: what they call themselves is asked
    once they have been imported.
    """
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
