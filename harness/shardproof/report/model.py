"""What every report shows: a run's results with their counts, clusters and history, before any rendering.

A *cluster* is the failures of one cause (`shardproof.report.causes`) that stand alike to the known issues, on whatever
releases. A reader looks at its simplest member.
"""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from itertools import pairwise
from pathlib import PurePath

from shardproof.issues.cure_check import CureCheck
from shardproof.issues.known_issues import KnownIssues
from shardproof.report.causes import cause_of, named
from shardproof.report.conditions import Condition, condition_of
from shardproof.report.head_results import Head, heads_of
from shardproof.report.history import History, history_of
from shardproof.result import BY_FACE, Result, describe
from shardproof.scenario import Scenario
from shardproof.store import Run, Store
from shardproof.store_history import Past
from shardproof.verdict import SEVERITY, ExitStatus, Standing, Verdict, exit_status
from shardproof.versions import CURED

HIDDEN = "hidden: "
"""What a line of `Result.state` begins with that tells of state which cannot be read."""

URGENCY = (Verdict.UNKNOWN, Verdict.MISMATCH, Verdict.CRASH, Verdict.HANG, Verdict.NONDETERMINISTIC)
"""The order in which a reader looks at causes: first what puts all verdicts in doubt, then what is silent, then what
is loud."""


LOOKED_AT = (Standing.UNKNOWN, Standing.NEW, Standing.KNOWN)
"""The standings whose causes are counted."""


class Change(Enum):
    """How a verdict relates to the latest conclusive one of the same scenario.

    The values are those of the JSON. A reader is told of the run before and not of what is known: a known issue can be
    seen for the first time, and beside its name "new" would read as a contradiction.
    """

    NEW = "new"
    RECURRING = "recurring"
    FIXED = "fixed"
    NONE = ""

    @property
    def shown(self) -> str:
        """As reports for people say it."""
        return {Change.NEW: "first seen", Change.RECURRING: "seen before"}.get(self, self.value)


@dataclass(frozen=True)
class Cluster:
    """Failures of one cause, the simplest first.

    id: eight hex digits that name the cause in every run. mechanism: the best explanation's, empty if there is none.
    signature: of the simplest member.
    """

    id: str
    mechanism: str
    signature: str
    known_issue: str | None
    members: tuple[Result, ...]

    @property
    def simplest(self) -> Result:
        return self.members[0]

    @property
    def releases(self) -> str:
        """The releases that show it, such as `0.16.1 and 0.15.3`, where there are several, that of the simplest member
        first; empty for one."""
        found = list(dict.fromkeys(member.version for member in self.members))
        return f"{', '.join(found[:-1])} and {found[-1]}" if len(found) > 1 else ""


@dataclass(frozen=True)
class Row:
    """One line of the verdict table: a system at one release."""

    system: str
    version: str
    counts: Mapping[Verdict, int]
    duration_s: float

    @property
    def total(self) -> int:
        return sum(self.counts.values())


@dataclass(frozen=True)
class Report:
    """A run as its reports see it.

    missing: planned scenarios without a verdict. before: scenario id → its verdict in an earlier run.
    issues: what the results' `known_issue` refer to, and which findings a GPU has confirmed. history: what came and
    went in the runs of the folder. checks: of cures that do not apply to a head. folder: where the run lies now, if
    that may be elsewhere than where its command put it.
    """

    run: Run
    results: tuple[Result, ...]
    missing: tuple[Scenario, ...] = ()
    before: Mapping[str, Past] = field(default_factory=dict)
    issues: KnownIssues = field(default_factory=KnownIssues)
    history: History = field(default_factory=History)
    checks: tuple[CureCheck, ...] = ()
    folder: str = ""

    @classmethod
    def from_store(cls, store: Store, run_id: str, issues: KnownIssues | None = None) -> Report:
        """The report of a stored run.

        Raises:
            UsageError: there is no such run.
        """
        run = store.run(run_id)
        results, missing = tuple(store.results(run_id)), tuple(store.unfinished(run_id))
        history = history_of(store, run_id)
        checks = tuple(store.cure_checks(run_id))
        return cls(run, results, missing, store.before(run_id), issues or KnownIssues(), history, checks)

    @cached_property
    def counts(self) -> dict[Verdict, int]:
        """Number of results by verdict, worst last; every verdict has an entry."""
        found = Counter(result.verdict for result in self.results)
        return {verdict: found[verdict] for verdict in SEVERITY}

    @cached_property
    def standings(self) -> dict[Standing, int]:
        """Number of results by what they mean to a reader; every standing has an entry."""
        found = Counter(result.counts_as for result in self.results)
        return {standing: found[standing] for standing in Standing}

    @cached_property
    def causes(self) -> dict[Standing, int]:
        """How many clusters, which are the headings of a report, are of which standing. Every standing that a reader
        has to look at has an entry."""
        found = Counter(cluster.simplest.counts_as for cluster in self._clusters)
        return {standing: found[standing] for standing in LOOKED_AT}

    @property
    def by_cause(self) -> str:
        """The causes in one line, `1 new, 2 known; against earlier runs: 1 first seen, 2 still there, 1 fixed`: the
        same in every report. Empty where there is nothing to count: at most one failure, and no earlier run."""
        if len(self.failures) < 2 and not self.before:
            return ""
        now = ", ".join(f"{n} {standing.value}" for standing, n in self.causes.items() if n)
        then = self.history.tonight_in_words if self.before else ""
        return "; ".join(filter(None, (now, then and f"against earlier runs: {then}")))

    @property
    def in_words(self) -> str:
        """The standings in one line: `12 pass, 1 new, 2 known`."""
        counts = ", ".join(f"{n} {standing.value}" for standing, n in self.standings.items() if n) or "no results"
        return counts + self.shrunk_in_words

    @property
    def shrunk_in_words(self) -> str:
        """How many of the results were planned, and how many are smaller scenarios that were found while shrinking;
        empty where nothing was shrunk."""
        found = sum(1 for result in self.results if result.shrunk_from)
        planned = len(self.results) - found
        return f" ({planned} planned, and {found} smaller found while shrinking)" if found else ""

    @cached_property
    def place(self) -> str:
        """What a command about a result of this run has after its id: nothing, or ` --out DIR` where the run's folder
        is none of those below `reports/`, which are looked through without it."""
        return in_folder(self.folder) if self.folder else place_of(self.run.command)

    @cached_property
    def again(self) -> str:
        """What a command that runs a result of this run again needs besides: nothing, or ` --plugin FILE.py` of a
        trainer, whose system no command knows without its file, and the options of the run in `RUNS_AGAIN`."""
        return again_of(self.run.command)

    @property
    def resembling(self) -> dict[str, int]:
        """Ids of known issues → how many new failures have just their face. In a walk something else hides behind it; a
        scenario file is not compared with what is known."""
        return dict(Counter(ids for result in self.results if (ids := self.resembled(result))))

    def resembled(self, result: Result) -> str:
        """Ids of the known issues whose face a new failure has; empty for none."""
        is_new = result.counts_as is Standing.NEW and not result.behind
        return (self.issues.match(result) if is_new else None) or ""

    @property
    def known(self) -> int:
        """How many failures are due to known issues."""
        return self.standings[Standing.KNOWN]

    @property
    def status(self) -> ExitStatus:
        """The exit status that the results come to."""
        if self.missing:
            return ExitStatus.HARNESS
        found = exit_status(self.counts, self.known)
        lost = found is ExitStatus.OK and any(head.lost.too_much for head in self.heads)
        return ExitStatus.HARNESS if lost else found

    @property
    def in_spite(self) -> str:
        """Why a run that has failures in its table ends with status 0; empty for any other."""
        if self.status is not ExitStatus.OK or not self.known:
            return ""
        one = self.known == 1
        return (
            f"Exit status 0 in spite of {self.known} failure{'' if one else 's'}:"
            f" {'it is a defect' if one else 'each is a defect'} that is known, and nothing new failed."
        )

    @property
    def by_face(self) -> int:
        """How many of these are known by their face only: no run with the defect cured says that it is all."""
        return sum(1 for r in self.failures if r.known_by == BY_FACE)

    @property
    def cured(self) -> tuple[tuple[str, str], ...]:
        """(system and release, which defects were cured and which could not be), of the releases that ran cured."""
        return self.cured_in_lines()

    def cured_in_lines(self, most: int | None = None) -> tuple[tuple[str, str], ...]:
        """The same, with a number in the place of more defects than `most`."""
        found = {(f"{r.system} {r.version}", cures_line(r, most)) for r in self.results if r.cured or r.not_cured}
        return tuple(sorted(found))

    @property
    def cured_in_words(self) -> str:
        """How many known defects of which release were cured, so that nobody takes a cured library for the released
        one; empty where none was."""
        defects = {(r.system, defect) for r in self.results for defect in r.cured}
        releases = {f"{r.system} {r.version.removesuffix(CURED)}" for r in self.results if r.cured}
        of = next(iter(releases)) if len(releases) == 1 else f"{len(releases)} releases"
        return f"{len(defects)} known defect{'s' * (len(defects) > 1)} of {of} cured" if defects else ""

    @cached_property
    def heads(self) -> tuple[Head, ...]:
        """What the run came to on libraries that are no declared release."""
        return heads_of(self.results, self.checks)

    @cached_property
    def failures(self) -> tuple[Result, ...]:
        """Correctness failures and `unknown`: everything a reader has to look at."""
        return tuple(r for r in self.results if r.verdict.is_failure or r.verdict is Verdict.UNKNOWN)

    @property
    def emulated(self) -> tuple[str, ...]:
        """The emulated parts, such as `device=cuda (the CPU)`, that were used in any scenario of the run."""
        return tuple(sorted({item for result in self.results for item in result.emulated}))

    @property
    def choices(self) -> tuple[tuple[str, str], ...]:
        """What some result could choose between the real and the emulated, and which it chose."""
        return tuple(sorted({item for result in self.results for item in result.chosen.items()}))

    @property
    def not_exercised(self) -> tuple[str, ...]:
        """Everything that some scenario asks for and that the world here cannot put to the test."""
        return tuple(sorted({item for result in self.results for item in result.not_exercised}))

    @property
    def outside_support(self) -> tuple[tuple[str, str], ...]:
        """Releases that ran with something that upstream never supported them with: (system and release, what)."""
        found = {(f"{r.system} {r.version}", "; ".join(r.outside_support)) for r in self.results if r.outside_support}
        return tuple(sorted(found))

    @property
    def devices(self) -> tuple[str, ...]:
        """The devices that results came from, if not the CPU alone."""
        found = sorted({r.device for r in self.results if r.verdict is not Verdict.UNSUPPORTED})
        return () if found in ([], ["cpu"]) else tuple(found)

    def emulated_only(self, result: Result) -> bool:
        """Whether a failure was seen under emulation and not yet on a GPU."""
        return self.issues.emulated_only(result)

    def change(self, result: Result) -> Change:
        """New, recurring or fixed. A failure with another signature than last time is new."""
        past = self.before.get(result.id)
        failed_before = past is not None and past.verdict.is_failure
        if result.verdict is Verdict.PASS:
            return Change.FIXED if failed_before else Change.NONE
        if not result.verdict.is_failure:
            return Change.NONE
        same = failed_before and past is not None and past.signature == result.signature
        return Change.RECURRING if same else Change.NEW

    def changes(self, results: Iterable[Result] | None = None) -> dict[Change, int]:
        """Number of new, recurring and fixed among `results` (default: all)."""
        found = Counter(self.change(r) for r in (self.results if results is None else results))
        return {change: found[change] for change in (Change.NEW, Change.RECURRING, Change.FIXED)}

    def changes_of(self, cluster: Cluster) -> dict[Change, int]:
        """Those of a cluster's members, where there was a run before to compare with."""
        return self.changes(cluster.members) if self.before else {}

    def table(self) -> list[Row]:
        """Verdict counts by system and release, in the order in which they ran."""
        grouped: dict[tuple[str, str], list[Result]] = {}
        for result in self.results:
            grouped.setdefault((result.system, result.version), []).append(result)
        return [
            Row(system, version, Counter(r.verdict for r in members), sum(r.duration_s for r in members))
            for (system, version), members in grouped.items()
        ]

    def clusters(self) -> list[Cluster]:
        """Failures by cause: new before known, then by verdict as in `URGENCY`, large before small."""
        return list(self._clusters)

    @cached_property
    def _clusters(self) -> list[Cluster]:
        grouped: dict[tuple[str, str], list[Result]] = {}
        for result in self.failures:
            grouped.setdefault((cause_of(result), result.standing), []).append(result)
        ids = _cause_ids(grouped)
        clusters = [_cluster(ids[cause], members) for cause, members in grouped.items()]
        return sorted(clusters, key=_importance)

    def condition_of(self, cluster: Cluster) -> Condition | None:
        """Under which conditions a cause shows, among what ran of its system at the releases that show it; None where
        too few ran."""
        releases = {(member.system, member.version) for member in cluster.members}
        ran = (r for r in self.results if (r.system, r.version) in releases)
        passing = [result.scenario for result in ran if result.verdict is Verdict.PASS]
        return condition_of([member.scenario for member in cluster.members], passing)

    def unsupported(self) -> list[tuple[str, str, int]]:
        """(system, reason, number of scenarios) of what a system refuses, most frequent first."""
        found = Counter((r.system, r.reason) for r in self.results if r.verdict is Verdict.UNSUPPORTED)
        return [(system, reason, n) for (system, reason), n in found.most_common()]

    def hidden_state(self) -> list[tuple[str, str, int]]:
        """(trainer, what of its state cannot be read, number of cells), most frequent first. No verdict says anything
        about it, so that a reader has to know of it where all passes, too."""
        lines = ((r.system, line) for r in self.results for line in r.state if line.startswith(HIDDEN))
        return [(system, line.removeprefix(HIDDEN), n) for (system, line), n in Counter(lines).most_common()]

    def left_by_arms(self) -> list[tuple[str, str, int]]:
        """(trainer, arm and what it did not compare, number of cells), most frequent first."""
        found = (
            (result.system, f"{arm.name}: {told}")
            for result in self.results for arm in result.arms for told in arm.left_out
        )  # fmt: skip
        return [(system, told, n) for (system, told), n in Counter(found).most_common()]

    def normalisations(self) -> list[tuple[str, str, int]]:
        """(system, what was equivalent and why, number of scenarios), most frequent first; a line for each reason."""
        found: Counter[tuple[str, str]] = Counter()
        what: dict[tuple[str, str], set[str]] = {}
        for result in self.results:
            for difference in result.normalisations:
                described = describe(difference).removesuffix(f" {difference.kind}")
                what.setdefault((result.system, difference.detail), set()).add(described)
            found.update({(result.system, difference.detail) for difference in result.normalisations})
        return [(one[0], f"{', '.join(sorted(what[one]))}: {one[1]}", n) for one, n in found.most_common()]


def place_of(command: Sequence[str]) -> str:
    """What a command about a result of a run has after its id, by the arguments of the run: ` --out DIR`, or nothing
    where the run's folder is one below `reports/`."""
    return in_folder(next(iter(_given(command, "--out")), ""))


def in_folder(folder: str) -> str:
    """The ` --out DIR` that a command needs about a result that lies in a folder; nothing for one below `reports/`."""
    return f" --out {shlex.quote(folder)}" if folder and PurePath(folder).parts[:-1] != ("reports",) else ""


RUNS_AGAIN = ("--plugin", "--clone", "--python", "--max-world")
"""Options of a run without which its scenarios cannot be run again."""


def again_of(command: Sequence[str]) -> str:
    """The options that a command needs which runs a result of a run again, by the arguments of the run."""
    given = [(option, value) for option in RUNS_AGAIN for value in _given(command, option)]
    if command[:1] == ("trainer",):
        given += [("--plugin", word) for word in command[1:] if re.search(r"\.py(:\w*)?$", word)][:1]
    return "".join(f" {option} {shlex.quote(value)}" for option, value in given)


def _given(command: Sequence[str], option: str) -> list[str]:
    """The values that a command line gives to an option, as `--out DIR` or `--out=DIR`."""
    apart = [value for word, value in pairwise(command) if word == option]
    return apart + [word.partition("=")[2] for word in command if word.startswith(f"{option}=")]


def cures_line(result: Result, most: int | None = None, where: str = ", which the report names") -> str:
    """What was cured, in a line; of more defects than `most` the number, and after it where their names stand."""
    left = "".join(f"; {name} not: {why}" for name, why in result.not_cured.items())
    if most is not None and len(result.not_cured) > 1:
        left = f"; {len(result.not_cured)} cures do not apply to this release{where}"
    if most is not None and len(result.cured) > most:
        return f"{len(result.cured)} known defects cured{where}{left}"
    return f"{', '.join(result.cured) or 'nothing'} cured{left}"


def _cause_ids(clusters: Iterable[tuple[str, str]]) -> dict[tuple[str, str], str]:
    """(name of a cause, standing) → the cluster's id: the cause's name, so that a link to it holds for another night
    and another release. Where a run has several of one name, such as one known and one new, the others are named by
    their standing, too."""
    found: dict[tuple[str, str], str] = {}
    for cause, standing in sorted(clusters):
        found[cause, standing] = named(cause, standing) if cause in found.values() else cause
    return found


def _cluster(name: str, members: list[Result]) -> Cluster:
    ordered = sorted(members, key=_simplicity)
    simplest = ordered[0]
    mechanism = simplest.explanations[0].mechanism if simplest.explanations else ""
    return Cluster(name, mechanism, simplest.signature, simplest.known_issue, tuple(ordered))


def _simplicity(result: Result) -> tuple[int, int, int, str]:
    """The key that sorts a simple result first: few ranks, then few axes that are not plain, then few options, since
    all axes of a trainer stand in one text of options."""
    scenario = result.scenario
    changed = scenario.axis_values(only_changed=True)
    return scenario.mesh.world, len(changed), str(changed.get("options", "")).count("+"), result.id


def _importance(cluster: Cluster) -> tuple[bool, int, int, str]:
    urgency = URGENCY.index(cluster.simplest.verdict)
    return cluster.known_issue is not None, urgency, -len(cluster.members), cluster.signature
