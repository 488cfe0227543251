"""Where a failure came or went: the last good and the first bad of a chain of releases or commits, or the reverse.

A chain runs from old to new between a good and a bad version; both ends are tried before anything is believed of them.
Versions that say nothing about this failure (not installable, unsupported, unknown, another failure) are passed over,
and named where they leave it open which one it was.

*Verifies*: both ends; that what counts as bad fails with the bad end's signature, unless any failure is to count.
*Does not verify*: that the chain changes once only; a failure that came, went and came again has several answers.
"""

from __future__ import annotations

import math
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import PurePosixPath
from typing import Any

from packaging.version import Version

from shardproof.errors import UsageError
from shardproof.protocol.releases import Package
from shardproof.result import Result
from shardproof.verdict import Verdict
from shardproof.versions import split_cures
from shardproof.wording.lines import brief
from shardproof.world.overlay import commit_of, git

GIT = "git:"


class State(Enum):
    """What a version says about the failure."""

    GOOD = "good"
    BAD = "bad"
    OTHER = "says nothing"


Examine = Callable[[str], Result]
Tried = Callable[[str, Result, State], None]


@dataclass(frozen=True)
class Chain:
    """Versions from old to new, the ends included. note: how it came about, where that is not plain."""

    versions: tuple[str, ...]
    note: str = ""


@dataclass(frozen=True)
class Finding:
    """Where a failure came or went.

    * before, after: neighbours in the chain, but for `skipped`, whose states differ: last good and first bad, or last
      bad and first fixed.
    * signature: of the failure.
    * results: everything that was tried, in that order.
    * interrupted: by Ctrl-C. out_of_time: its budget was spent. Versions between the two were then not tried.
    """

    before: str
    after: str
    state_after: State
    signature: str
    skipped: tuple[str, ...]
    results: dict[str, Result] = field(default_factory=dict)
    note: str = ""
    interrupted: bool = False
    out_of_time: bool = False

    @property
    def words(self) -> tuple[str, str]:
        """What `before` and `after` are called."""
        return ("last good", "first bad") if self.state_after is State.BAD else ("last bad", "first fixed")

    def to_json(self) -> dict[str, Any]:
        """The finding in JSON types; `tried` are results by the command line's contract."""
        before, after = (word.replace(" ", "_") for word in self.words)
        return {
            before: self.before, after: self.after, "signature": self.signature, "skipped": list(self.skipped),
            "note": self.note, "interrupted": self.interrupted, "out_of_time": self.out_of_time,
            "tried": [{"asked": asked, **result.to_json()} for asked, result in self.results.items()],
        }  # fmt: skip


class Bisection:
    """A search in progress.

    Args:
        examine: version → its result. any_failure: whether a failure with another signature counts as the same.
        tried: told of every version that was tried. budget_s: how long it may search. Both ends are tried in any case,
        and what has begun is finished.
    """

    def __init__(
        self, examine: Examine, tried: Tried, *, any_failure: bool = False, budget_s: float | None = None
    ) -> None:
        self._examine, self._tried, self._any_failure = examine, tried, any_failure
        self._until = math.inf if budget_s is None else time.monotonic() + budget_s
        self._signature = ""
        self.results: dict[str, Result] = {}

    def run(self, package: Package, good: str, bad: str) -> Finding:
        """Find where the failure of `bad` came, or where it went if `bad` is the older.

        Raises:
            UsageError: `good` does not pass, `bad` does not fail, or they are not on one chain.
        """
        require_ends(package, good, bad)
        self._require(bad, "--bad", State.BAD)
        self._require(good, "--good", State.GOOD)
        return self._between(self._chain(package, good, bad))

    def _require(self, version: str, option: str, wanted: State) -> None:
        """Try an end.

        Raises:
            UsageError: it is not what it was said to be.
        """
        result = self.results[version] = self._examine(version)
        if wanted is State.BAD:
            self._signature = result.signature
        state = self._judged(result)
        self._tried(version, result, state)
        if state is not wanted:
            allowed = "a version that passes" if wanted is State.GOOD else "a version that fails"
            shown = f"{result.verdict.value} {brief(result)}".rstrip(" :")
            raise UsageError.of(
                option, version, f"{allowed}; this one: {shown}", "shardproof sweep SCENARIO, which tries every release"
            )

    def _chain(self, package: Package, good: str, bad: str) -> Chain:
        """The chain that both ends lie on.

        Of two commits of which neither is the other's ancestor, the chain runs from their merge base to the one whose
        state differs from the merge base's.
        """
        if not good.startswith(GIT):
            return releases_between(package, good, bad)
        commits = {commit_of(package, end.removeprefix(GIT)): end for end in (good, bad)}
        base = git(package, "merge-base", *commits).strip()
        if base in commits:
            first, last = sorted(commits, key=lambda commit: commit != base)
            return Chain((commits[first], *commits_between(package, first, last), commits[last]))
        root = f"{GIT}{base[:12]}"
        state = self._state(root)
        if state is State.OTHER:
            why = brief(self.results[root])
            raise UsageError.of(
                "ends", f"{good}, {bad}", f"ends whose merge base {root} can be tried: {why}", "--good A"
            )
        last = commit_of(package, (bad if state is State.GOOD else good).removeprefix(GIT))
        note = f"neither end is the other's ancestor; their merge base {root} is {state.value}"
        return Chain((root, *commits_between(package, base, last), commits[last]), note)

    def _between(self, found: Chain) -> Finding:
        low, high, passed = 0, len(found.versions) - 1, set[int]()
        interrupted = out_of_time = False
        try:
            while open_ := [n for n in range(low + 1, high) if n not in passed]:
                if out_of_time := time.monotonic() > self._until:
                    break
                middle = min(open_, key=lambda n: (abs(2 * n - low - high), n))
                state = self._state(found.versions[middle])
                if state is self._state(found.versions[low]):
                    low = middle
                elif state is self._state(found.versions[high]):
                    high = middle
                else:
                    passed.add(middle)
        except KeyboardInterrupt:
            interrupted = True
        return Finding(
            found.versions[low], found.versions[high], self._state(found.versions[high]), self._signature,
            found.versions[low + 1 : high], self.results, found.note, interrupted, out_of_time,
        )  # fmt: skip

    def _state(self, version: str) -> State:
        if version in self.results:
            return self._judged(self.results[version])
        result = self._examine(version)
        self.results[version] = result
        state = self._judged(result)
        self._tried(version, result, state)
        return state

    def _judged(self, result: Result) -> State:
        if result.verdict is Verdict.PASS:
            return State.GOOD
        same = self._any_failure or result.signature == self._signature
        return State.BAD if result.verdict.is_failure and same else State.OTHER


def ends(good: str, bad: str) -> tuple[str, str, str | None]:
    """Both ends without their cures, and the cures, which all versions between them have too.

    Raises:
        UsageError: the ends have different cures.
    """
    (good_release, wanted), (bad_release, other) = split_cures(good), split_cures(bad)
    if wanted != other:
        form = "--good 0.13.0+cured --bad 0.16.1+cured"
        raise UsageError.of("--good, --bad", f"{good}, {bad}", "two versions with the same cures", form)
    return good_release, bad_release, wanted


def require_ends(package: Package, good: str, bad: str) -> None:
    """The two ends are of one kind, exist and differ.

    Raises:
        UsageError: they are not.
    """
    form = "--good 0.13.0 --bad 0.16.1"
    ends = f"{good}, {bad}"
    kinds = {end.startswith(GIT) for end in (good, bad)}
    if len(kinds) > 1 or any(end.startswith("path:") for end in (good, bad)):
        raise UsageError.of("--good, --bad", ends, "two releases, or two commits git:REV", form)
    name = _commit if kinds == {True} else _release
    if name(package, good) == name(package, bad):
        raise UsageError.of("--good, --bad", ends, "two versions that differ", form)


def releases_between(package: Package, one: str, other: str) -> Chain:
    """The declared releases from the older to the newer of two, both included."""
    low, high = sorted((one, other), key=lambda end: Version(_release(package, end)))
    inside = [r.version for r in package.releases if Version(low) < Version(r.version) < Version(high)]
    return Chain((low, *inside, high))


def commits_between(package: Package, older: str, newer: str) -> list[str]:
    """Commits between two, on the first-parent way from the older, that change the library's tree."""
    trees = [str(PurePosixPath(root) / package.tree) for root in package.roots]
    listed = git(package, "rev-list", "--first-parent", "--reverse", f"{older}..{newer}", "--", *trees).split()
    return [f"{GIT}{commit[:12]}" for commit in listed if commit != newer]


def _release(package: Package, version: str) -> str:
    return package.release(version).version


def _commit(package: Package, version: str) -> str:
    return commit_of(package, version.removeprefix(GIT))


def subject(package: Package, version: str) -> str:
    """Date and subject of a commit, for the reader; empty for a release."""
    if not version.startswith(GIT):
        return ""
    try:
        return git(package, "log", "-1", "--format=%cs %s", version.removeprefix(GIT)).strip()
    except subprocess.CalledProcessError:
        return ""


def names(versions: Sequence[str]) -> str:
    """Versions in a line; of many, the first and the last."""
    if len(versions) <= 6:
        return ", ".join(versions)
    return f"{', '.join(versions[:3])}, … ({len(versions) - 6} more), {', '.join(versions[-3:])}"
