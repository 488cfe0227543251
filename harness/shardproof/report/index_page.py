"""The main page of a report, as its template draws it: what is new, what it does to training, where, and the command;
then what is known, a line each; then everything, to explore.

*Verifies* nothing. *Does not verify*: that a headline is right about a defect; it says what the explanation says.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from shardproof.issues.upstream_links import address_of, short
from shardproof.report.cause_wording import Wording, wording_of
from shardproof.report.columns import STANDINGS, columns_of
from shardproof.report.heads_text import DescribedHead, describe_heads
from shardproof.report.model import Change, Cluster, Report
from shardproof.report.repaired import Repaired, repaired
from shardproof.result import Result
from shardproof.verdict import Standing, Verdict

PAGES = 500
"""Up to so many failures each has a page of its own."""

PAGES_A_CAUSE = 50
"""How many members of a cause have one where there are more failures, the simplest first."""


@dataclass(frozen=True)
class Link:
    """A public place. title: what it is, in full."""

    text: str
    address: str
    title: str


@dataclass(frozen=True)
class Cause:
    """One cause of failures, in words.

    * condition: what all members have and as little as can be of what passes, with the counts; empty where too few ran.
    * seen: how many members were seen before, and how many not; empty without an earlier run.
    * upstream: where the known defects are public. compare: public bugs with the same mechanism.
    * paged: members with a page of their own. more: how many have none.
    * emulated_only: it was seen under emulation, and not yet on a GPU.
    * resembled: ids of the known issues that its simplest member, which is new, looks like; empty for none.
    """

    cluster: Cluster
    wording: Wording
    condition: str
    seen: str
    upstream: tuple[Link, ...]
    compare: tuple[Link, ...]
    paged: tuple[Result, ...]
    more: int
    emulated_only: bool
    resembled: str

    @property
    def simplest(self) -> Result:
        return self.cluster.simplest


@dataclass(frozen=True)
class Known:
    """Causes that are known under the same entries, of one system: one line of the page. ids: of the entries, joined
    by `+`."""

    ids: str
    causes: tuple[Cause, ...]

    @property
    def count(self) -> int:
        """How many scenarios show them."""
        return sum(len(cause.cluster.members) for cause in self.causes)

    @property
    def verdicts(self) -> tuple[Verdict, ...]:
        """The verdicts of a known issue's failures, such as `mismatch` and `crash`."""
        return tuple(dict.fromkeys(cause.simplest.verdict for cause in self.causes))


@dataclass(frozen=True)
class Share:
    """One standing and how many results have it; x, width: its part of a bar of 1000."""

    standing: Standing
    count: int
    x: float
    width: float


@dataclass(frozen=True)
class IndexPage:
    """The page.

    * sentence: the run in one sentence. look: the standing whose colour it has. because: why it ends as it does.
    * cured: how many known defects were cured: it is not the released library then that passes.
    * unjudged, new: causes. known: a line for each set of known defects. repaired: entries that no longer fail.
    * heads: what is said of each.
    * several: there are results of more than one system. columns: the results as JSON.
    """

    sentence: str
    cured: str
    look: str
    because: str
    shares: tuple[Share, ...]
    unjudged: tuple[Cause, ...]
    new: tuple[Cause, ...]
    known: tuple[Known, ...]
    repaired: tuple[Repaired, ...]
    heads: tuple[DescribedHead, ...]
    several: bool
    columns: str
    command: str


def index_page(report: Report) -> IndexPage:
    """What the main page of a run says."""
    clusters = report.clusters()
    causes = [_cause(cluster, report) for cluster in clusters]
    unjudged = [c for c in causes if c.simplest.verdict is Verdict.UNKNOWN]
    failing = [c for c in causes if c.simplest.verdict is not Verdict.UNKNOWN]
    new = [c for c in failing if c.cluster.known_issue is None]
    sentence, look = _sentence(report, len(new))
    several = len({result.system for result in report.results}) > 1
    columns = columns_of(
        report,
        {member.id: cluster.id for cluster in clusters for member in cluster.members},
        {cause.cluster.id: cause.wording.headline for cause in causes},
        {member.id for cause in causes for member in cause.paged},
    )
    return IndexPage(
        sentence, report.cured_in_words, look, _because(report), _shares(report), tuple(unjudged), tuple(new),
        _lines(failing), repaired(report), describe_heads(report), several, columns,
        shlex.join(["shardproof", *report.run.command]),
    )  # fmt: skip


def _lines(causes: Sequence[Cause]) -> tuple[Known, ...]:
    """The known ones of some causes, a line for each set of entries; what most scenarios show comes first."""
    found: dict[tuple[str, str], list[Cause]] = {}
    for cause in causes:
        if cause.cluster.known_issue is not None:
            key = (cause.simplest.system, cause.cluster.known_issue)
            found.setdefault(key, []).append(cause)
    lines = [Known(ids, tuple(members)) for (_, ids), members in found.items()]
    return tuple(sorted(lines, key=lambda known: -known.count))


def paged_of(cluster: Cluster, report: Report) -> tuple[Result, ...]:
    """The members of a cause that get a page of their own: all, unless the run has too many failures."""
    return cluster.members if len(report.failures) <= PAGES else cluster.members[:PAGES_A_CAUSE]


def _cause(cluster: Cluster, report: Report) -> Cause:
    simplest = cluster.simplest
    issues = report.issues.entries_named(cluster.known_issue or "")
    bugs = dict.fromkeys(bug for e in simplest.explanations[:1] for bug in e.bug_ids)
    changes = [(n, change) for change, n in report.changes_of(cluster).items() if n]
    paged = paged_of(cluster, report)
    return Cause(
        cluster,
        wording_of(simplest, issues),
        condition.text if (condition := report.condition_of(cluster)) else "",
        ", ".join(_seen(n, change, len(cluster.members)) for n, change in changes),
        tuple(dict.fromkeys(_link(issue.upstream) for issue in issues if issue.upstream)),
        tuple(_link(address_of(bug), bug) for bug in bugs),
        paged,
        len(cluster.members) - len(paged),
        report.emulated_only(simplest),
        report.resembled(simplest),
    )


def _seen(count: int, change: Change, members: int) -> str:
    return change.shown if count == members else f"{count} {change.shown}"


def _link(address: str, bug: str = "") -> Link:
    """A public place; `bug`, its id in our corpus, where it has one."""
    text = short(address) if address else bug
    return Link(text, address, f"{bug}: {address}" if bug and address else address)


def _shares(report: Report) -> tuple[Share, ...]:
    total, x, shares = len(report.results) or 1, 0.0, []
    for standing in STANDINGS:
        count = report.standings[standing]
        width = 1000 * count / total
        shares.append(Share(standing, count, x, width))
        x += width
    return tuple(shares)


def _sentence(report: Report, causes: int) -> tuple[str, str]:
    """The run in one sentence, and the standing whose colour it has."""
    standings = report.standings
    ran = len(report.results) - standings[Standing.UNSUPPORTED]
    new, known = standings[Standing.NEW], standings[Standing.KNOWN]
    if standings[Standing.UNKNOWN]:
        return "Not all could be judged, since the harness failed", "unknown"
    if new:
        return f"{_count(new, 'new failure')} with {_count(causes, 'cause')}", "new"
    if report.missing:
        return f"{_count(len(report.missing), 'planned scenario')} without a verdict", "unknown"
    if not ran:
        return "Nothing was run", "unknown"
    if known:
        return f"Nothing new: {known} of {ran} scenarios fail, with known defects", "known"
    return f"All {ran} scenarios that ran pass" if ran > 1 else "The one scenario that ran passes", "pass"


def _because(report: Report) -> str:
    """Why the run ends as it does, and what a reader does next."""
    standings, status = report.standings, report.status
    told = [report.in_spite]
    if standings[Standing.UNKNOWN]:
        told.append("What shardproof could not judge is no pass: read those first.")
    elif standings[Standing.NEW]:
        more = f" {_count(standings[Standing.KNOWN], 'more')} failed as is known." if standings[Standing.KNOWN] else ""
        told.append(f"Exit status {int(status)}, since something new failed.{more}")
    if lost := [f"{head.system} {head.version}" for head in report.heads if head.lost.too_much]:
        more = f"{' and '.join(lost)}: more than a tenth of what the newest release runs is refused there"
        told.append(f"{more}, so that what passes there is no pass.")
    if report.missing:
        told.append(f"{_count(len(report.missing), 'planned scenario')} did not finish: run the same command again.")
    if report.by_face:
        one = report.by_face == 1
        told.append(
            f"{report.by_face} of the known {'is' if one else 'are'} known by {'its' if one else 'their'} face only:"
            " no cure shows that nothing else is behind."
        )
    return " ".join(filter(None, told))


def _count(number: int, noun: str) -> str:
    plural = "" if number == 1 or noun == "more" else "s"
    return f"{number} {noun}{plural}"
