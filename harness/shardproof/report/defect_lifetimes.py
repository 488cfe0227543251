"""Determines from results on several releases when a defect appeared and disappeared, and whether `issues.toml`
agrees.

A sweep gives a regression a verdict on each release. Two neighbours of which one passes and the other fails say that
the defect came, or went, with the later one. The entry of the defect says so too, in `since`, `fixed` and `releases`,
and somebody wrote that by hand from other runs. This module puts the two side by side.

`since` and `fixed` are texts for a reader. `shardproof.issues.known_issues.bound_of` says what a program can take from
them; one that says more than that is shown, and not compared.

*Verifies*: on each plain release of the row, that what was seen is what the entry says of it. A failure shows the
defect if any of its evidence is what the entry's patterns describe; one that looks different is told, and contradicts
nothing.
*Does not verify*: working trees, commits and cured releases, whose place among the releases is not known, or which are
not what the entry speaks of; entries that wait `behind` another defect; and which side of a contradiction is right.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from packaging.version import Version

from shardproof.issues.findings import Finding
from shardproof.issues.known_issues import Bound, KnownIssue, bound_of
from shardproof.result import Result
from shardproof.verdict import Verdict
from shardproof.versions import is_version, split_cures


@dataclass(frozen=True)
class Entry:
    """What is known of a regression. issue: how its failure is recognised; None for one that waits behind another."""

    finding: Finding
    issue: KnownIssue | None

    @property
    def since(self) -> Bound | None:
        """The first release known to have it; None where the text cannot be compared."""
        return _comparable(self.finding.since)

    @property
    def fixed(self) -> Bound | None:
        """The first release without it; None where there is none, or where the text cannot be compared."""
        return _comparable(self.finding.fixed)

    @property
    def comparable(self) -> bool:
        """Whether a program can compare it with a sweep."""
        return self.issue is not None and self.since is not None and (not self.finding.fixed or self.fixed is not None)


def _comparable(text: str) -> Bound | None:
    bound = bound_of(text)
    return bound if bound and bound.comparable else None


def conclusive(result: Result) -> bool | None:
    """Whether a result is a failure; None where it says nothing about the library."""
    if result.verdict in (Verdict.UNSUPPORTED, Verdict.UNKNOWN):
        return None
    return result.verdict.is_failure


def plain(results: Mapping[str, Result]) -> dict[Version, Result]:
    """The results on plain releases, in the order of the releases."""
    named = {asked for asked in results if is_version(asked) and split_cures(asked)[1] is None}
    found = {Version(asked): result for asked, result in results.items() if asked in named}
    return dict(sorted(found.items()))


def describe_lifetime(results: Mapping[str, Result], declared: Sequence[str]) -> str:
    """What a row says by itself: `came with 0.15.0, went with 0.16.1`.

    Args:
        results: version as it was asked for → result.
        declared: the releases that there are, so that it can be said where one between two was not tried.
    """
    tried = {version: conclusive(result) for version, result in plain(results).items()}
    said = [(version, failing) for version, failing in tried.items() if failing is not None]
    if not said:
        return "no release says anything"
    turns = [
        _turn(before, after, failing, tried, declared)
        for (before, was), (after, failing) in pairwise(said)
        if was != failing
    ]
    if turns:
        return ", ".join(turns)
    where = f"on {said[0][0]}" if len(said) == 1 else f"on all {len(said)} releases that say anything"
    return f"{'fails' if said[0][1] else 'passes'} {where}"


def _turn(
    before: Version, after: Version, failing: bool, tried: Mapping[Version, bool | None], declared: Sequence[str]
) -> str:
    """A phrase for a change of verdict between two releases, such as `came with 0.15.0`; with a note if untried
    releases lie between. `tried` maps releases to verdicts."""
    verb = "came" if failing else "went"
    between = [v for v in {*map(Version, declared), *tried} if before < v < after]
    return f"{verb} after {before}, with {after} at the latest" if between else f"{verb} with {after}"


def contradictions(results: Mapping[str, Result], entry: Entry) -> tuple[str, ...]:
    """Where what was seen is not what `issues.toml` says: a sentence for each thing that it says, in the order of the
    releases on which it is contradicted."""
    if entry.issue is None:
        return ()
    found: dict[tuple[str, str], list[str]] = {}
    for version, result in plain(results).items():
        for seen, said in _against(version, result, entry):
            found.setdefault((seen, said), []).append(str(version))
    return tuple(f"{seen} on {', '.join(on)}, but issues.toml {said}" for (seen, said), on in found.items())


def _against(version: Version, result: Result, entry: Entry) -> Iterator[tuple[str, str]]:
    """Contradictions between the verdict on one release and the `since` and `fixed` keys of an entry in
    `issues.toml`."""
    failing, since, fixed = conclusive(result), entry.since, entry.fixed
    if failing is None:
        return
    if failing and _shows(result, entry):
        if since and since.exact and version < since.version:
            yield "fails", f"says since {entry.finding.since}"
        if fixed and version >= fixed.version:
            yield "fails", f"says fixed in {entry.finding.fixed}"
    if not failing and entry.comparable and since and version >= since.version and _there(version, fixed):
        yield "passes", f"says {_span(entry.finding)}"
    wanted = entry.finding.releases.get(str(version), "").partition(" ")[0]
    if wanted in {verdict.value for verdict in Verdict} and wanted != result.verdict.value:
        yield result.verdict.value, f"lists {wanted} there"


def _there(version: Version, fixed: Bound | None) -> bool:
    """Whether an entry promises that a release, not older than its first, still has the defect."""
    return fixed is None or (fixed.exact and version < fixed.version)


def _span(finding: Finding) -> str:
    return f"since {finding.since}" + (f", fixed in {finding.fixed}" if finding.fixed else ", not fixed")


def _shows(result: Result, entry: Entry) -> bool:
    """Whether a failure has the face of the entry, wherever that entry expects it."""
    return entry.issue is not None and any(entry.issue.match.covers(item) for item in result.evidence)


def others(results: Mapping[str, Result], entry: Entry) -> tuple[str, ...]:
    """The plain releases on which the scenario fails in another way than its entry describes."""
    if entry.issue is None:
        return ()
    return tuple(str(v) for v, result in plain(results).items() if conclusive(result) and not _shows(result, entry))
