"""Known issues: defects of a library that a nightly has already found, so that it tells known from new.

*Verifies*: a result is known only if **every** piece of its evidence is that of some entry, of the same system,
operation and axes, and nothing differs later than the entries say. One tensor role more, another exception, or
another operation makes it new, so that an entry cannot swallow a second defect; a scenario that shows two known
defects is known under both.
*Does not verify*: that the entry's mechanism is the one at work; two defects with the same face look the same.

The file (`scenarios/known_issues.toml`):

    schema = 1

    [[issue]]
    id = "torch-fsdp2-1842"                  # also names the scenario in regressions/
    what = "one sentence: what goes wrong, for whom"
    system = "torch-fsdp2"
    library_line = "torch/distributed/checkpoint/state_dict.py:612 (2.13.0), _load_optim_state_dict"
    since = "2.4.0"                          # first release known to have it
    upstream = "https://github.com/..."      # "" if it has not been filed
    scenario = "regressions/torch-fsdp2-1842.toml"
    confirmed_on_gpu = "H200, torch 2.13.0+cu130"          # optional: the run of docs/gpu.md that showed it on a GPU

    [issue.match]
    op = "load"                              # kind of the operation that shows it; a list if there are several
    evidence = ["exp_avg dtype", "exp_avg_sq dtype"]       # `ROLE KIND`, all that may differ there
    aftermath = ["exp_avg bits", "param bits"]             # optional: what may differ at later operations
    axes = { offload = "cpu*", dtype = ["bf16", "mixed"] } # optional; shell patterns

For a crash the evidence is `TYPE: first line of the message at FILE, FUNCTION`, e.g. `RuntimeError: size of
tensor*`, with numbers written as N; for a hang `deadline: *`. Patterns are shell patterns (`*`, `?`, `[abc]`).
What does not reproduce (`nondeterministic`) is never known.

A failure that was seen with something emulated is shown as `emulated only`, until every entry that it matches says on
which GPU it was seen without.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.errors import UsageError
from harness.program import KINDS
from harness.scenario import AXES, Scenario, load_toml, parse_axis
from harness.verdict import Verdict

if TYPE_CHECKING:
    from harness.result import Evidence, Result

_TEXTS = ("id", "what", "system", "library_line", "since", "upstream", "scenario")
_FORM = '[[issue]]\nid = "torch-fsdp2-1842" …\n[issue.match]\nop = "load"\nevidence = ["exp_avg bits"]'


@dataclass(frozen=True)
class Pattern:
    """What evidence must look like.

    ops: kinds of operation. evidence: shell patterns, one of which must match. axes: axis → shell patterns of its
    canonical text, one of which must match. aftermath: shell patterns of
    what may differ at later operations.
    """

    ops: tuple[str, ...]
    evidence: tuple[str, ...]
    axes: Mapping[str, tuple[str, ...]]
    aftermath: tuple[str, ...] = ()

    def applies(self, scenario: Scenario) -> bool:
        """Whether the scenario lies in the pattern's axes."""
        values = scenario.axis_values()
        return all(_any_match(values[axis], patterns) for axis, patterns in self.axes.items())

    def covers(self, item: Evidence) -> bool:
        """Whether this is what the pattern describes."""
        return item.op in self.ops and _any_match(item.text, self.evidence)


@dataclass(frozen=True)
class KnownIssue:
    """One entry of the file; see the module's text for the fields. confirmed_on_gpu: empty until a GPU has shown it."""

    id: str
    what: str
    system: str
    library_line: str
    since: str
    upstream: str
    scenario: str
    match: Pattern
    confirmed_on_gpu: str = ""


@dataclass(frozen=True)
class KnownIssues:
    """All entries of a file, in its order."""

    issues: tuple[KnownIssue, ...] = ()

    def match(self, result: Result) -> str | None:
        """The ids of the entries that together cover all evidence, joined by `+`; None if anything is new."""
        if not result.verdict.is_failure or result.verdict is Verdict.NONDETERMINISTIC or not result.evidence:
            return None
        able = [i for i in self.issues if i.system == result.system and i.match.applies(result.scenario)]
        found = [next((i for i in able if i.match.covers(item)), None) for item in result.evidence]
        followed = tuple(pattern for issue in found if issue for pattern in issue.match.aftermath)
        if None in found or not all(_any_match(text, followed) for text in result.aftermath):
            return None
        return "+".join(dict.fromkeys(issue.id for issue in found if issue))

    def emulated_only(self, result: Result) -> bool:
        """Whether a failure was seen with something emulated, and no GPU has confirmed it yet. Derived from what the
        result says of itself; an entry changes it by `confirmed_on_gpu` alone."""
        if not (result.verdict.is_failure and result.emulated) or result.scenario.faults:
            return False
        found = self.of(result.known_issue or self.match(result) or "")
        return not (found and all(issue.confirmed_on_gpu for issue in found))

    def of(self, known: str) -> list[KnownIssue]:
        """The entries that `match` named."""
        return [issue for issue in self.issues if issue.id in known.split("+")]


def load_known_issues(path: Path) -> KnownIssues:
    """Read the file, strictly; scenario files are looked up beside it.

    Raises:
        UsageError: unreadable, malformed, an unknown or missing key, a duplicate id, an unknown value, a
            scenario file that does not exist, or an entry so wide that it would match anything.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError.of("known issues", str(path), f"a readable TOML file ({error})", "known_issues.toml") from None
    document = load_toml(text, str(path))
    _exact_keys(str(path), document, required=("schema",), optional=("issue",))
    entries = document.get("issue", [])
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise UsageError.of(f"{path}: issue", entries, "tables [[issue]]", _FORM)
    issues = tuple(_issue(f"{path}: issue {n}", entry, path.parent) for n, entry in enumerate(entries, 1))
    seen: set[str] = set()
    for issue in issues:
        if issue.id in seen:
            raise UsageError.of(f"{path}: id", issue.id, "each id once", '"torch-fsdp2-1842-b"')
        seen.add(issue.id)
    return KnownIssues(issues)


def _issue(where: str, entry: Mapping[str, Any], folder: Path) -> KnownIssue:
    _exact_keys(where, entry, required=(*_TEXTS, "match"), optional=("confirmed_on_gpu",))
    for key in (*_TEXTS, *({"confirmed_on_gpu"} & entry.keys())):
        if not isinstance(entry[key], str) or not (entry[key] or key == "upstream"):
            raise UsageError.of(f"{where}: {key}", entry[key], "a text", f'{key} = "…"')
    if entry["upstream"] and not entry["upstream"].startswith("https://"):
        raise UsageError.of(f"{where}: upstream", entry["upstream"], "an https address, or empty", '"https://…"')
    if not (folder / entry["scenario"]).is_file():
        raise UsageError.of(
            f"{where}: scenario", entry["scenario"], f"a file below {folder}", '"regressions/torch-fsdp2-1842.toml"'
        )
    if not isinstance(entry["match"], dict):
        raise UsageError.of(f"{where}: match", entry["match"], "a table [issue.match]", _FORM)
    texts = {key: value for key, value in entry.items() if key != "match"}
    return KnownIssue(**texts, match=_pattern(f"{where}: match", entry["match"]))


def _pattern(where: str, table: Mapping[str, Any]) -> Pattern:
    _exact_keys(where, table, required=("op", "evidence"), optional=("axes", "aftermath"))
    ops = _texts(f"{where}.op", [table["op"]] if isinstance(table["op"], str) else table["op"])
    for op in ops:
        if op not in KINDS:
            raise UsageError.of(f"{where}.op", op, KINDS, 'op = "load"')
    evidence = _texts(f"{where}.evidence", table["evidence"])
    if not evidence or not all(pattern.strip("*?") for pattern in evidence):
        raise UsageError.of(f"{where}.evidence", list(evidence), "patterns that say something", '["exp_avg bits"]')
    aftermath = _texts(f"{where}.aftermath", table.get("aftermath", []))
    if not all(pattern.strip("*?") for pattern in aftermath):
        raise UsageError.of(f"{where}.aftermath", list(aftermath), "patterns that say something", '["param bits"]')
    return Pattern(ops, evidence, _axes(f"{where}.axes", table.get("axes", {})), aftermath)


def _axes(where: str, table: Any) -> dict[str, tuple[str, ...]]:
    if not isinstance(table, dict):
        raise UsageError.of(where, table, "a table of axis = pattern", 'axes = { offload = "cpu" }')
    axes = {}
    for axis, value in table.items():
        if axis not in AXES:
            raise UsageError.of(where, axis, AXES, 'axes = { offload = "cpu" }')
        axes[axis] = _texts(f"{where}.{axis}", [value] if isinstance(value, str) else value, empty=axis == "options")
        for text in axes[axis]:
            if not set(text) & set("*?["):
                _check_value(f"{where}.{axis}", axis, text)
    return axes


def _check_value(where: str, axis: str, text: str) -> None:
    try:
        parse_axis(axis, text)
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from None


def _texts(where: str, value: Any, *, empty: bool = False) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(item, str) and (item or empty) for item in value):
        raise UsageError.of(where, value, "a list of texts", '["exp_avg bits"]')
    return tuple(value)


def _exact_keys(where: str, table: Mapping[str, Any], required: Iterable[str], optional: Iterable[str] = ()) -> None:
    required, allowed = tuple(required), (*required, *optional)
    unknown = [key for key in table if key not in allowed]
    missing = [key for key in required if key not in table]
    if unknown or missing:
        problem = f"unknown {unknown}" if unknown else f"missing {missing}"
        raise UsageError.of(where, problem, allowed, _FORM)


def _any_match(text: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(text, pattern) for pattern in patterns)
