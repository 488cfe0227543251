"""Attribution: whether a failure is a known defect, and nothing else.

An entry of a system's `issues.toml` describes how a defect looks: which roles differ, at which operation, on which
axes. Another defect can look the same. Measured: one bit flipped on disk had the face of PyTorch issue 161368. So a
failure that has the face of known defects runs once more with just those cured (`shardproof.issues.cures`):

* It passes: known, by cure. It is not run a third time.
* It fails, with the face of other known defects: those lie behind the first. It runs again with them cured too.
* It fails in any other way: what it shows now may be a known defect that hides behind the first and has no face of its
  own (an entry with `behind`). So it runs once more with everything cured. If it passes, it is known.
* More defects than `MOST_ROUNDS` lie behind each other: it runs once more with everything cured, too.
* It still fails: that failure is new. It is a result of its own, on the cured library, so that it can be
  explained and replayed; the first one is known for its part.

On a head, a library that no table of releases has, a face alone is not believed before the entry's own scenario has
been asked (`shardproof.laboratory.witness`); and what fails there like an entry that has no face, because others hide
it, is known by that scenario.

A defect that has no cure, or none that applies, but was repaired in a later release is taken away by running that
release, with all that is cured there: what passes there is known, and what fails there in a way that no entry has is
new. Any other defect can only be told by its face. Results say so, and summaries count them.

*Does not verify*: that the defects found are all needed. Where two entries have one face, the first is cured first, and
is named even if the second alone would have done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from shardproof.issues.known_issues import KnownIssue, KnownIssues
from shardproof.laboratory.misfits import on_head
from shardproof.laboratory.witness import Witness, contradicted, hidden
from shardproof.protocol.registry import system_named
from shardproof.result import BY_CURE, BY_FACE, BY_RELEASE, IN_PART, Result
from shardproof.scenario import Scenario
from shardproof.verdict import Verdict
from shardproof.versions import before, with_cures

MOST_ROUNDS = 5
"""How many times a failure is run with one more defect cured."""


def attributed(
    first: Result,
    known: KnownIssues,
    examine: Callable[[Scenario], Result],
    confirm: Callable[[Result], Result] = lambda result: result,
    witness: Witness | None = None,
) -> tuple[Result, ...]:
    """A result with the known issues that it is due to; after it, what fails behind them.

    A known failure costs one run more, and not two: that it passes without the defect confirms what no repetition
    could. All that stays a failure for other reasons is confirmed.

    Args:
        first: of one run, which nothing has confirmed.
        examine: runs a scenario once; called only for a failure that has the face of a known issue with a cure.
        confirm: runs the scenario of a result again and gives the result a verdict that this repeats, or
            `nondeterministic`.
        witness: what an entry's own scenario shows; asked on heads.
    """
    if not first.verdict.is_failure:
        return (first,)
    ask = witness if on_head(system_named(first.system), first.version) else None
    found, last = _matched(known, first), first
    if not found:
        first = confirm(first)
        below = hidden(known.hidden, first, ask) if ask and first.verdict.is_failure else []
        return (_named(first, below, BY_FACE) if below else first,)
    for _ in range(MOST_ROUNDS):
        wanted = _curable(found, first, last)
        if not wanted or wanted <= set(last.cured):
            return _where_repaired(first, last, found, known, examine, confirm, ask)
        last = examine(_with_cures(first.scenario, wanted))
        if last.verdict is Verdict.PASS and {issue.cure for issue in found} <= set(last.cured):
            return (_named(first, found, BY_CURE),)
        if last.verdict in (Verdict.PASS, Verdict.UNKNOWN, Verdict.UNSUPPORTED):
            return (_by_face(confirm(first), found, known, ask),)
        more = _matched(known, last)
        if not more:
            break
        found += [issue for issue in more if issue not in found]
    last = confirm(last)  # what comes and goes may pass by chance, with any cures
    once_more = last.verdict is not Verdict.NONDETERMINISTIC
    if once_more and examine(_with_cures(first.scenario, ())).verdict is Verdict.PASS:
        return (_named(first, found, BY_CURE),)
    first, behind = confirm(first), "+".join(issue.id for issue in found)
    if first.verdict is Verdict.NONDETERMINISTIC:
        return (first,)
    return (_named(first, found, IN_PART), replace(last, behind=behind))


def _where_repaired(
    first: Result,
    last: Result,
    found: list[KnownIssue],
    known: KnownIssues,
    examine: Callable[[Scenario], Result],
    confirm: Callable[[Result], Result],
    ask: Witness | None,
) -> tuple[Result, ...]:
    """A failure whose defects cannot all be cured here, after a look at the release that repaired them."""
    release = _repaired(first, last, found)
    if not release:
        return (_by_face(confirm(first), found, known, ask),)
    last = examine(replace(first.scenario, version=with_cures(release, "")))
    if last.verdict is Verdict.PASS:
        return (_named(first, found, BY_RELEASE),)
    confirmed, last = confirm(first), confirm(last)
    new = last.verdict.is_failure and last.verdict is not Verdict.NONDETERMINISTIC and not _matched(known, last)
    if not new or confirmed.verdict is Verdict.NONDETERMINISTIC:
        return (_by_face(confirmed, found, known, ask),)
    return (_named(confirmed, found, IN_PART), replace(last, behind="+".join(issue.id for issue in found)))


def _repaired(first: Result, last: Result, found: Iterable[KnownIssue]) -> str:
    """The release that has repaired all of the defects that cannot be cured; empty where one is not repaired, or was
    before the release that ran."""
    releases = {issue.repaired for issue in found if not issue.cure or issue.cure in last.not_cured}
    release = releases.pop() if len(releases) == 1 else ""
    return release if release and before(first.version, release) else ""


def _by_face(confirmed: Result, found: list[KnownIssue], known: KnownIssues, ask: Witness | None) -> Result:
    """A failure that only its face can tell. One that comes and goes is never known.

    Args:
        ask: what an entry's own scenario shows, on a head. An entry that it speaks against does not count.
    """
    why = ""
    while found and confirmed.verdict is not Verdict.NONDETERMINISTIC:
        doubt = contradicted(found, confirmed, ask) if ask else None
        if doubt is None:
            return _named(confirmed, found, BY_FACE)
        why, known = why or doubt.why, known.without(doubt.issue)
        found = _matched(known, confirmed)
    return replace(confirmed, reason=confirmed.reason or why)


def _matched(known: KnownIssues, result: Result) -> list[KnownIssue]:
    return known.entries_named(known.match(result) or "")


def _curable(found: Iterable[KnownIssue], first: Result, last: Result) -> set[str]:
    """The cures that the next run has: those of the first result, and of every issue found so far."""
    return {*first.cured, *(issue.cure for issue in found if issue.cure and issue.cure not in last.not_cured)}


def _with_cures(scenario: Scenario, wanted: Iterable[str]) -> Scenario:
    """The scenario on its release with the wanted cures applied; an empty list means every cure of the system."""
    return replace(scenario, version=with_cures(scenario.release, ",".join(sorted(wanted))))


def _named(result: Result, found: Iterable[KnownIssue], known_by: str) -> Result:
    return replace(result, known_issue="+".join(issue.id for issue in found), known_by=known_by)
