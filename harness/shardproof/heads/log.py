"""Reads the git log of a library's clone between a release and a head, and lists the commits that may have repaired a
known defect.

Upstreams squash a pull request into one commit and put its number behind the subject: `… (#5077)`. So an entry of
`issues.toml` that names pull request 5077 can be found in the log in a second, without the network. An entry that names
an issue is found where a commit says that it closes it. One that names neither is found by the lines that its cure
takes out, or else by the file that it blames.

*Does not verify*: that a commit which is found repaired the defect. Running its regression does, and
`shardproof bisect` names the one commit.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath

from shardproof.errors import UsageError
from shardproof.issues.cures import Cure
from shardproof.issues.findings import Finding
from shardproof.protocol.releases import Package
from shardproof.versions import is_version
from shardproof.world.overlay import clone_variable, commit_of, git, holds

MOST_TOLD = 3
"""So many commits are told of one defect; a list of forty says nothing."""

_CLOSES = r"(?:close[sd]?|fix(?:e[sd])?|resolve[sd]?)[:\s]+(?:{repository})?#{number}\b"
_ADDRESS = r"github\.com/{repository}/(?:issues|pull)/{number}\b"
_LEAST_TELLING = 12
"""A line with fewer characters stands in many places, and finds commits that have nothing to do with it."""


@dataclass(frozen=True)
class Commit:
    """id: in full. day: ISO 8601. subject, body: of its message."""

    id: str
    day: str
    subject: str
    body: str = ""

    @property
    def line(self) -> str:
        """As a reader is told of it."""
        return f"{self.id[:10]} {self.day} {self.subject}"

    def names(self, number: int, repository: str) -> bool:
        """Whether its subject has the number of an issue or a pull request, or its body says that it closes it."""
        if re.search(rf"#{number}\b", self.subject):
            return True
        known = {"repository": re.escape(repository), "number": number}
        return bool(
            re.search(_CLOSES.format(**known), self.body, re.IGNORECASE)
            or re.search(_ADDRESS.format(**known), self.body)
        )


@dataclass(frozen=True)
class Landed:
    """A commit that may have repaired a defect, and how it was found: `names #5077`."""

    commit: Commit
    why: str


@dataclass(frozen=True)
class Log:
    """The commits of a package's clone that a head has and a base has not.

    * revision: the head's, in full. base: a revision; empty for everything that the head has.
    * since: a day, before which nothing counts; empty for none.
    """

    package: Package
    revision: str
    base: str = ""
    since: str = ""

    @cached_property
    def commits(self) -> tuple[Commit, ...]:
        """The commits of the log, newest first."""
        return self._read()

    def naming(self, numbers: Iterable[int]) -> list[tuple[int, Commit]]:
        """The commits that name one of these numbers of the package's repository, in the order of the numbers."""
        repository = self.package.repository
        return [(number, c) for number in numbers for c in self.commits if c.names(number, repository)]

    def explaining(self, finding: Finding, cure: Cure | None) -> tuple[Landed, ...]:
        """The commits that may have repaired a defect: those that name a number of its entry; else those that changed
        the lines which its cure takes out; else those that touched the file which it blames."""
        named = [Landed(c, f"names #{number}") for number, c in self.naming(numbers_of(finding, self.package))]
        if named or not self.base:
            return tuple(named[:MOST_TOLD])
        changed = [Landed(c, "changed the lines that the cure changes") for c in self._changing(cure)] if cure else []
        if changed:
            return tuple(changed[:MOST_TOLD])
        file = blamed_file(finding)
        touched = self._touching([file]) if file else ()
        return tuple(Landed(c, f"one of {len(touched)} that touched {file}") for c in touched[:MOST_TOLD])

    def _changing(self, cure: Cure) -> list[Commit]:
        """The commits after which a line that the cure takes out stands in its file more or less often."""
        found: dict[str, Commit] = {}
        for file, hunks in cure.files.items():
            taken_out = [line[1:].strip() for hunk in hunks for line in hunk.lines if line[0] == "-"]
            for line in dict.fromkeys(line for line in taken_out if len(line) >= _LEAST_TELLING):
                found.update({c.id: c for c in self._read(f"-S{line}", files=[file])})
        return sorted(found.values(), key=lambda commit: commit.day, reverse=True)

    def _touching(self, files: Sequence[str]) -> tuple[Commit, ...]:
        return self._read(files=files)

    def _read(self, *options: str, files: Sequence[str] = ()) -> tuple[Commit, ...]:
        between = f"{self.base}..{self.revision}" if self.base else self.revision
        since = [f"--since={self.since}"] if self.since else []
        places = [str(PurePosixPath(self._root) / file) for file in files]
        said = git(
            self.package, "log", "--no-merges", "--format=%x1e%H%x1f%cs%x1f%s%x1f%b", *since, *options, between, "--",
            *places,
        )  # fmt: skip
        parts = (record.split("\x1f") for record in said.split("\x1e")[1:])
        return tuple(Commit(found[0], found[1], found[2], found[3].strip()) for found in parts)

    @cached_property
    def _root(self) -> str:
        """The folder of the repository in which the library's tree lies, of those that the package declares."""
        return next((root for root in self.package.roots if _has_tree(self.package, self.revision, root)), ".")


def log_between(package: Package, version: str, base: str) -> Log | None:
    """The log from a release to a head; None where no clone holds the head.

    Args:
        version: as in `shardproof.protocol.releases`; of a working tree, the clone is that tree. base: the release.
    """
    revision = revision_of(package, version)
    return Log(package, revision, tag_of(package, base)) if revision else None


def revision_of(package: Package, version: str) -> str:
    """The commit that a version stands for; empty where there is no clone, or no tag of that release in it.

    Raises:
        UsageError: `git:REV` names no commit.
    """
    kind, colon, where = version.partition(":")
    if colon and kind == "git":
        return commit_of(package, where)
    if not os.environ.get(clone_variable(package.name)):
        return ""
    return commit_of(package, "HEAD") if colon else tag_of(package, version)


def name_clone_of(package: Package, version: str) -> None:
    """Take a working tree that is a repository for its package's clone, where none was named."""
    kind, _, where = version.partition(":")
    if kind == "path" and (Path(where) / ".git").exists():
        os.environ.setdefault(clone_variable(package.name), str(Path(where)))


def tag_of(package: Package, release: str) -> str:
    """The tag of a release in the clone; empty where none is found.

    Projects that share a repository have tags with a name in front, `core_v0.16.1`: the longest one that ends in the
    release counts, if the library's tree is there.
    """
    if not is_version(release):
        return ""
    try:
        tags = git(package, "tag", "--list", f"*{release}").split()
    except (UsageError, subprocess.CalledProcessError):
        return ""
    fitting = [tag for tag in tags if re.fullmatch(rf"(?:.*[_/-])?v?{re.escape(release)}", tag)]
    with_tree = (tag for tag in fitting if any(_has_tree(package, tag, root) for root in package.roots))
    return max(with_tree, key=len, default="")


def numbers_of(finding: Finding, package: Package) -> tuple[int, ...]:
    """The numbers of the package's repository that an entry names as its own: in its addresses, in what it says of the
    repair, and in its id, where no address is another repository's of that number."""
    addresses = (finding.novelty.upstream, *finding.novelty.also)
    placed = [found for text in addresses if (found := _PLACED.fullmatch(text.rstrip("/")))]
    own = [int(found[2]) for found in placed if package.repository and found[1] == package.repository]
    elsewhere = {int(found[2]) for found in placed if found[1] != package.repository}
    told = [int(number) for number in re.findall(r"pull request (\d+)", finding.fixed)]
    of_id = [int(part) for part in finding.name.split("-") if re.fullmatch(r"\d{3,}", part)]
    return tuple(dict.fromkeys([*own, *(number for number in (*told, *of_id) if number not in elsewhere)]))


_PLACED = re.compile(r"https://github\.com/([^/]+/[^/]+)/(?:issues|pull|discussions)/(\d+)")


def blamed_file(finding: Finding) -> str:
    """The library's file that an entry blames, below `site-packages`; empty where it names none."""
    found = re.match(r"([\w./-]+\.py):\d+", finding.library_line)
    return found[1] if found else ""


def _has_tree(package: Package, revision: str, root: str) -> bool:
    return holds(package, revision, str(PurePosixPath(root) / package.tree))
