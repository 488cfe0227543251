"""Known issues: defects of a library that a nightly has already found, so that it tells known from new.

*Verifies*: a result is known only if **every** piece of its evidence is that of some entry, of the same system,
operation and axes, and nothing differs later than the entries say. One tensor role more, another exception, or
another operation makes it new, so that an entry cannot swallow a second defect; a scenario that shows two known
defects is known under both.
*Does not verify*: that the entry's mechanism is the one at work; two defects with the same face look the same.

The file (`issues.toml` of a system):

    schema = 1

    [[issue]]
    id = "torch-fsdp2-1842"                  # also names the scenario in regressions/
    what = "one sentence: what goes wrong, for whom"
    library_line = "torch/distributed/checkpoint/state_dict.py:612 (2.13.0), _load_optim_state_dict"
    since = "2.4.0"                          # first release known to have it; forms: `bound_of`
    scenario = "regressions/1842.toml"
    upstream = "https://github.com/..."      # or what was searched; with harm, reach and trigger: `upstream_evidence`
    confirmed_on_gpu = "H200, torch 2.13.0+cu130"          # optional: the run of docs/gpu.md that showed it on a GPU

    [issue.match]
    op = "load"                              # kind of the operation that shows it; a list if there are several
    evidence = ["exp_avg dtype", "exp_avg_sq dtype"]       # `ROLE KIND`, all that may differ there
    aftermath = ["exp_avg bits", "param bits"]             # optional: what may differ at later operations
    params = ["frozen"]                                    # optional: what the parameters are that differ
    values = ["nan"]                                       # optional: what was found where bits differ
    axes = { offload = "cpu*", dtype = ["bf16", "mixed"] } # optional; shell patterns
    when = "owns_nothing"                    # optional; a predicate of the system's, by name

An entry with `behind` names defects that end every scenario before this one can show itself. It has no `match` and
matches nothing; it is kept for the reader. Only on a head where those are cured and its own cure no longer fits does
it show, and then its scenario tells it (`shardproof.laboratory.witness`). The further keys of an entry, which only that
reader needs, are those of harness/shardproof/issues/findings.py.

`params` and `values` (`PARAMS`, `VALUES`) narrow an entry that has no cure, so that only its face can tell it: a bit
that flips in memory has the roles of many defects, but another value in another parameter. For the same reason a
pattern whose kind is `*` is not one of copies that differ between ranks: `replica_conflict` must be named. `needs` is
the piece without which the others are not told by the entry, where a defect and what follows from it differ at once.

For a crash the evidence is `TYPE: first line of the message at FILE, FUNCTION`, e.g. `RuntimeError: size of
tensor*`, with numbers written as N; for a hang `deadline: *`. Patterns are shell patterns (`*`, `?`, `[abc]`).
What does not reproduce (`nondeterministic`) is never known.

A failure that was seen with something emulated is shown as `emulated only`, until every entry that it matches says on
which GPU it was seen without.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import isclose, nan
from typing import TYPE_CHECKING

from packaging.version import Version

from shardproof.errors import UsageError
from shardproof.issues.cures import cure_of
from shardproof.issues.upstream_evidence import NOVELTY_KEYS, Novelty, novelty_of
from shardproof.models import ParamSpec, model_spec
from shardproof.observe.record import LIVE
from shardproof.program import FIT, KINDS, SHOWS_IN, STEPS
from shardproof.protocol.registry import system_named
from shardproof.protocol.releases import package_of
from shardproof.protocol.system import System
from shardproof.result import LATER, Evidence
from shardproof.scenario import AXES, Scenario, parse_axis
from shardproof.tables import Table, load_toml, text_of
from shardproof.verdict import Verdict
from shardproof.versions import before, split_cures

if TYPE_CHECKING:
    from shardproof.diff import Difference
    from shardproof.result import Result

_TEXTS = ("id", "what", "library_line", "since", "scenario")
_STORY = (
    "fixed", "severity", "cause", "behind", "releases", "unscripted", "part", "detail", "title", "promise",
    "expected", "emulation", "on_main", "script_needs",
)  # fmt: skip
ISSUE_KEYS = (*_TEXTS, "match", "confirmed_on_gpu", *NOVELTY_KEYS, *_STORY)
"""Keys of an entry. Those behind `fixed` are for the reader of docs/findings.md:
harness/shardproof/issues/findings.py."""


CONFLICT = "replica_conflict"
WEIGHTS = ("param", "master", "compute_param")

PARAMS: Mapping[str, Callable[[ParamSpec], bool]] = {
    "frozen": lambda spec: spec.trainable == "no",
    "later": lambda spec: spec.trainable == "later",
    "unused": lambda spec: not spec.used,
    "scalar": lambda spec: not spec.shape,
}
"""What a parameter can be that a defect concerns: frozen for good, or until the program unfreezes it, or used by no
forward, or without a dim."""

VALUES: Mapping[str, Callable[[Difference], bool]] = {
    "nan": lambda difference: difference.nan_mismatches == difference.mismatched,
    "zero": lambda difference: _first(difference.observed_first) == 0,
    "rounded": lambda difference: isclose(
        _first(difference.observed_first), _first(difference.expected_first), rel_tol=2.0**-6, abs_tol=2.0**-13
    ),
    "remainder": lambda difference: (
        difference.key.role == "master" and difference.observed_first.partition(" ")[0].lstrip("-").isdecimal()
    ),
}
"""What can be found where bits differ: NaN in every such element; or in the first of them zero, or what it must be but
for a rounding in a narrower dtype, or the low 16 bits of a master, which no rounding brings near to others."""


def _first(shown: str) -> float:
    """The number of an element as a difference shows it, which its bits follow."""
    try:
        return float(shown.partition(" ")[0])
    except ValueError:
        return nan


@dataclass(frozen=True)
class Pattern:
    """What evidence must look like.

    * ops: kinds of operation.
    * evidence: shell patterns, one of which must match.
    * axes: axis → shell patterns of its canonical text, one of which must match.
    * aftermath: shell patterns of what may differ at later operations.
    * when: name of a predicate of the system's; empty for none.
    * params, values: names in `PARAMS` and `VALUES`, one of which must fit each difference; empty for any.
    * needs: shell patterns, one of which must match some piece of the evidence, for the others to be told by this
      entry: what they follow from in one and the same operation. Empty for none.
    """

    ops: tuple[str, ...]
    evidence: tuple[str, ...]
    axes: Mapping[str, tuple[str, ...]]
    aftermath: tuple[str, ...] = ()
    when: str = ""
    params: tuple[str, ...] = ()
    values: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()

    def applies(self, scenario: Scenario, ran: str = "") -> bool:
        """Whether the scenario lies in the pattern's axes.

        Args:
            ran: the release that ran. A working tree or a commit has no release in its name: what it calls itself
                counts.
        """
        values = scenario.axis_values()
        if ran:
            values = {**values, "version": split_cures(ran)[0].partition("+")[0]}
        inside = all(_any_match(values[axis], patterns) for axis, patterns in self.axes.items())
        return inside and (not self.when or system_named(scenario.system).predicates[self.when](scenario))

    def covers(self, item: Evidence) -> bool:
        """Whether this is what the pattern describes. A rank's end without a word is of no operation, so it may be of
        any."""
        placed = item.op in self.ops or (not item.op and item.text.startswith("died: "))
        return placed and _any_match(item.text, self.evidence)

    def has_needed(self, evidence: Iterable[Evidence]) -> bool:
        """Whether the evidence has the piece from which the others that the pattern describes follow."""
        return not self.needs or any(_any_match(item.text, self.needs) for item in evidence)

    def fits(self, difference: Difference | None, scenario: Scenario) -> bool:
        """Whether a difference is of such a parameter, and of such a value. What is no difference is."""
        if difference is None or not (self.params or self.values):
            return True
        spec = next((p.spec for p in model_spec(scenario.model).params if p.fqn == difference.key.fqn), None)
        if spec is not None and self.params and not any(PARAMS[name](spec) for name in self.params):
            return False
        bits = difference.kind == "bits" and self.values
        return not bits or any(VALUES[name](difference) for name in self.values)


@dataclass(frozen=True)
class KnownIssue:
    """One entry of the file; the module's text has the fields.

    upstream: where it is public, or its cause is; empty if nothing was found. confirmed_on_gpu: empty until a GPU has
    shown the defect. harm: what a user has in the end, one sentence. fixed: where it is repaired, as the entry says it.
    """

    id: str
    what: str
    system: str
    library_line: str
    since: str
    upstream: str
    scenario: str
    match: Pattern
    confirmed_on_gpu: str = ""
    harm: str = ""
    fixed: str = ""

    @property
    def repaired(self) -> str:
        """The first release, of those that can be run, in which it is repaired; empty where there is none. Another
        release of torch is another interpreter, and no release of a library to go over to."""
        system, release = system_named(self.system), repaired_in(self.fixed)
        if not release or system.is_torch or not system.under_test:
            return ""
        return next((each.version for each in package_of(system).releases if not before(each.version, release)), "")

    @property
    def cure(self) -> str:
        """The id of the patch that repairs the defect in the entry's scenario; empty if the system has no cure for
        it."""
        return cure_of(system_named(self.system), self.scenario)


@dataclass(frozen=True)
class KnownIssues:
    """The entries of an `issues.toml` in file order. `hidden` are entries with a `behind` key: defects that show only
    once a defect in front of them is cured, so that they never match a result by themselves."""

    issues: tuple[KnownIssue, ...] = ()
    hidden: tuple[KnownIssue, ...] = ()

    def match(self, result: Result) -> str | None:
        """The ids of the entries that together cover all evidence, joined by `+`; None if anything is new."""
        if not result.verdict.is_failure or result.verdict is Verdict.NONDETERMINISTIC or not result.evidence:
            return None
        able = [
            issue
            for issue in self.issues
            if issue.system == result.system
            and issue.match.applies(result.scenario, result.version)
            and issue.match.has_needed(result.evidence)
            and not (result.cured and issue.cure in result.cured)
        ]
        chosen: dict[str, KnownIssue] = {}
        for item in result.evidence:
            facing = [issue for issue in able if issue.match.covers(item)]
            for difference in result.differences_of(item) or (None,):
                found = next((i for i in facing if i.match.fits(difference, result.scenario)), None)
                if found is None:
                    return None
                chosen[found.id] = found
        if not all(_follows(text, chosen.values(), result) for text in result.aftermath):
            return None
        return "+".join(chosen)

    def without(self, issue: KnownIssue) -> KnownIssues:
        """The same entries, with one entry removed."""
        return KnownIssues(tuple(each for each in self.issues if each is not issue), self.hidden)

    def emulated_only(self, result: Result) -> bool:
        """Whether a failure was seen with something emulated, and no GPU has shown it yet.

        The result itself says what was emulated; an entry that it matches can change the answer through
        `confirmed_on_gpu` alone.
        """
        if not (result.verdict.is_failure and result.emulated) or result.scenario.faults:
            return False
        found = self.entries_named(result.known_issue or self.match(result) or "")
        return not (found and all(issue.confirmed_on_gpu for issue in found))

    def entries_named(self, known: str) -> list[KnownIssue]:
        """The entries that `match` named."""
        named = frozenset(filter(None, known.split("+")))
        return [issue for issue in (*self.issues, *self.hidden) if issue.id in named] if named else []


_BOUND = re.compile(r"(?:[A-Za-z_]*_v)?(\d+(?:\.\d+)+(?:rc\d+)?)(?P<rest>.*)", re.DOTALL)
_RUN = re.compile(r"(?:, by pull request \d+)? \((\d[\d.]*) was run\)")
_READ = re.compile(r", by its source; (\d[\d.]*) was run")
_EXACT = re.compile(r"(, by pull request \d+)?")
_OPEN = re.compile(r" or earlier|, older not (tried|reached)| \([\w. ,]+ not run\)")


@dataclass(frozen=True)
class Bound:
    """A release that an entry names in `since` or `fixed`.

    * exact: the text also says that the release before it was different.
    * comparable: the text says nothing more, so that a program can hold it against a run.
    * read: an older release, in whose source the lines stand already, where `version` is the oldest that was run.
    """

    version: Version
    exact: bool
    comparable: bool
    read: str = ""


def bound_of(text: str) -> Bound | None:
    """The release that `since` or `fixed` names; None for a text that does not begin with one.

    These are texts for a reader, and this is the only place where a program reads them:

        since = "0.15.0"                              the first release with it: an older one did not have it
        since = "0.13.0 or earlier"                   nothing is said of older ones
        since = "0.16.1, older not tried"             likewise
        since = "0.15.2, by its source; 0.19.0 was run"       the first with the lines; the release that was run counts
        since = "0.16.1, with 4423 repaired"          a condition that no run sees: not comparable
        fixed = "0.5.0, by pull request 2419"         the first release without it
        fixed = "2.14.1 (2.14.0 was not run)"         an older one may be without it, too
        fixed = "0.19.2, by pull request 8056 (0.19.4 was run)"     likewise; the release that was run counts
        fixed = "0.19.0, with another defect in its place"          no run can see that: not comparable
    """
    found = _BOUND.fullmatch(text)
    if found is None:
        return None
    version, rest = found[1], found["rest"]
    if run := _RUN.fullmatch(rest):
        return Bound(Version(run[1]), exact=False, comparable=True)
    if run := _READ.fullmatch(rest):
        return Bound(Version(run[1]), exact=False, comparable=True, read=version)
    exact = bool(_EXACT.fullmatch(rest))
    return Bound(Version(version), exact, exact or bool(_OPEN.fullmatch(rest)))


def repaired_in(fixed: str) -> str:
    """The release in which an entry says that a defect is repaired; empty where another defect took its place."""
    bound = bound_of(fixed)
    return str(bound.version) if bound and "another defect" not in fixed else ""


def known_issues_of(system: System, *, hidden: bool = False) -> tuple[KnownIssue, ...]:
    """The entries of a system's `issues.toml`, in order; none where it has no such file.

    Args:
        hidden: the entries with `behind`, in the place of all others.

    Raises:
        UsageError: not in UTF-8, malformed, an unknown or missing key, a duplicate id, an unknown value, a scenario
            file that does not exist, or an entry so wide that it would match anything.
    """
    document = document_of(system)
    entries = document.tables("issue")
    whole = [entry.only(ISSUE_KEYS, needed=_TEXTS) for entry in entries]
    told = {entry.text("id"): novelty_of(entry) for entry in whole}
    issues = tuple(_issue(entry, system, told) for entry in entries if ("behind" in entry) is hidden)
    seen: set[str] = set()
    for issue in issues:
        if issue.id in seen:
            raise UsageError.of(f"{document.where}: id", issue.id, "each id once", '"torch-fsdp2-1842-b"')
        seen.add(issue.id)
    return issues


def document_of(system: System) -> Table:
    """The content of a system's `issues.toml`; an empty one where it has no such file.

    Raises:
        UsageError: not in UTF-8, malformed, or an unknown key.
    """
    file = system.folder.joinpath("issues.toml")
    origin = f"{system.name}/issues.toml"
    content = load_toml(text_of(file, origin), origin) if file.is_file() else {}
    return Table(content, origin).only(("schema", "about", "part", "issue"))


def _issue(entry: Table, system: System, told: Mapping[str, Novelty]) -> KnownIssue:
    """The entry. told: what each entry of the file says of its effect, and of where it is public."""
    match = Pattern((), (), {}) if "behind" in entry else _pattern(_with_match(entry).table("match"), system)
    texts = {key: entry.text(key) for key in (*_TEXTS, "confirmed_on_gpu")}
    for key in _TEXTS:
        if not texts[key]:
            raise entry.wrong(key, texts[key], "a text", f'{key} = "…"')
    if not system.folder.joinpath(texts["scenario"]).is_file():
        raise entry.wrong("scenario", texts["scenario"], "a file beside it", '"regressions/1842.toml"')
    own, cause = told[texts["id"]], told.get(entry.text("cause"))
    texts["upstream"] = own.upstream or (cause.upstream if cause else "")
    texts["harm"], texts["fixed"] = own.harm, entry.text("fixed")
    return KnownIssue(system=system.name, match=match, **texts)


def _with_match(entry: Table) -> Table:
    return entry.only(ISSUE_KEYS, needed=("match",))


def _pattern(table: Table, system: System) -> Pattern:
    table.only(("op", "evidence", "axes", "aftermath", "when", "params", "values", "needs"), needed=("op", "evidence"))
    ops = table.texts("op")
    for op in ops:
        if op not in (*KINDS, FIT):
            raise table.wrong("op", op, KINDS, 'op = "load"')
    evidence, aftermath = table.texts("evidence", empty=False), table.texts("aftermath", empty=False)
    for key, patterns in (("evidence", evidence), ("aftermath", aftermath)):
        if (key == "evidence" and not patterns) or not all(pattern.strip("*?") for pattern in patterns):
            raise table.wrong(key, list(patterns), "patterns that say something", '["exp_avg bits"]')
    when = table.text("when")
    if when and when not in system.predicates:
        raise table.wrong("when", when, system.predicates or "none: the system has no predicates", 'when = "…"')
    named = {}
    for key, allowed in (("params", PARAMS), ("values", VALUES)):
        named[key] = table.texts(key, empty=False)
        if wrong := [name for name in named[key] if name not in allowed]:
            raise table.wrong(key, wrong[0], allowed, f'{key} = ["{next(iter(allowed))}"]')
    ops += tuple(other for op in ops for other in SHOWS_IN.get(op, ()) if other not in ops)
    needs = table.texts("needs", empty=False)
    return Pattern(ops, evidence, _axes(table.table("axes")), aftermath, when, **named, needs=needs)


def _axes(table: Table) -> dict[str, tuple[str, ...]]:
    axes = {}
    for axis in table.content:
        if axis not in AXES:
            raise UsageError.of(table.where, axis, AXES, 'axes = { offload = "cpu" }')
        axes[axis] = table.texts(axis, empty=axis == "options")
        for text in axes[axis]:
            if not set(text) & set("*?["):
                _check_value(f"{table.where}: {axis}", axis, text)
    return axes


def _check_value(where: str, axis: str, text: str) -> None:
    try:
        parse_axis(axis, text)
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from None


def _follows(text: str, chosen: Iterable[KnownIssue], result: Result) -> bool:
    """Whether what differs later may follow from the chosen entries: each difference of this text from one of them."""
    able = [issue.match for issue in chosen if _any_match(text, issue.match.aftermath)]
    later = result.differences_of(Evidence(LATER, text)) or (None,)
    return all(
        any(match.fits(difference, result.scenario) and _in_time(match, difference, result) for match in able)
        for difference in later
    )


def _in_time(match: Pattern, difference: Difference | None, result: Result) -> bool:
    """Whether a step lies between a defect of the optimizer's state, told by its face alone, and a weight that differs:
    nothing else carries it there. Forwards see what the step before them left."""
    by_face = bool(match.params or match.values)
    if difference is None or not by_face or difference.key.role not in WEIGHTS or difference.key.where != LIVE:
        return True
    first = min(each.key.op for each in result.differences)
    if any(each.key.op == first and each.key.role in WEIGHTS for each in result.differences):
        return True
    until = difference.key.op - (difference.key.role == "compute_param")
    return any(kind in STEPS for _, kind in result.operations[first + 1 : until + 1])


def _any_match(text: str, patterns: Iterable[str]) -> bool:
    """Whether a text has the form of a pattern. That ranks' copies differ has to be said."""
    said = (pattern for pattern in patterns if not text.endswith(CONFLICT) or pattern.endswith(CONFLICT))
    return any(fnmatchcase(text, pattern) for pattern in said)
