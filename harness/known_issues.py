"""Known issues: defects of a library that a nightly has already found, so that it tells known from new.

*Verifies*: a result is known only if the system, the verdict, the kind of the failed operation, every axis
pattern and **all** of its evidence agree with one entry. One tensor role more, another exception, or
another operation makes it new, so that an entry cannot swallow a second defect.
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

    [issue.match]
    verdict = "mismatch"
    op = "load"                              # kind of the failed operation
    evidence = ["exp_avg dtype", "exp_avg_sq dtype"]       # `ROLE KIND`, all that may differ there
    axes = { offload = "cpu*", dtype = ["bf16", "mixed"] } # optional; shell patterns

For a `crash` the evidence is one `TYPE: first line of the message`, e.g. `RuntimeError: size of tensor*`,
with numbers written as N. Patterns are shell patterns (`*`, `?`, `[abc]`). A `hang` has no evidence but must
name at least one axis.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.errors import UsageError
from harness.program import KINDS
from harness.scenario import AXES, load_toml, parse_axis
from harness.verdict import Verdict

if TYPE_CHECKING:
    from harness.result import Result

_TEXTS = ("id", "what", "system", "library_line", "since", "upstream", "scenario")
_MATCHABLE = (Verdict.MISMATCH, Verdict.CRASH, Verdict.HANG, Verdict.NONDETERMINISTIC)
_FORM = (
    '[[issue]]\nid = "torch-fsdp2-1842" …\n'
    '[issue.match]\nverdict = "mismatch"\nop = "load"\nevidence = ["exp_avg bits"]'
)


@dataclass(frozen=True)
class Pattern:
    """What a result must look like. evidence: shell patterns, of which every one of the result's must match one.

    axes: axis → shell patterns of its canonical text, one of which must match.
    """

    verdict: Verdict
    op: str
    evidence: tuple[str, ...]
    axes: Mapping[str, tuple[str, ...]]

    def matches(self, result: Result) -> bool:
        """Whether the result shows this and nothing else."""
        if result.verdict is not self.verdict or result.failed_op is None or result.failed_op.name != self.op:
            return False
        values = result.scenario.axis_values()
        if not all(_any_match(values[axis], patterns) for axis, patterns in self.axes.items()):
            return False
        if self.verdict is Verdict.HANG:
            return True
        return bool(result.evidence) and all(_any_match(item, self.evidence) for item in result.evidence)


@dataclass(frozen=True)
class KnownIssue:
    """One entry of the file; see the module's text for the fields."""

    id: str
    what: str
    system: str
    library_line: str
    since: str
    upstream: str
    scenario: str
    match: Pattern


@dataclass(frozen=True)
class KnownIssues:
    """All entries of a file, in its order."""

    issues: tuple[KnownIssue, ...] = ()

    def match(self, result: Result) -> str | None:
        """The id of the first entry that a result shows; None if it is new."""
        if not result.verdict.is_failure:
            return None
        return next((i.id for i in self.issues if i.system == result.system and i.match.matches(result)), None)

    def __contains__(self, issue_id: object) -> bool:
        return any(issue.id == issue_id for issue in self.issues)

    def __getitem__(self, issue_id: str) -> KnownIssue:
        return next(issue for issue in self.issues if issue.id == issue_id)


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
    _exact_keys(where, entry, required=(*_TEXTS, "match"))
    for key in _TEXTS:
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
    return KnownIssue(**{key: entry[key] for key in _TEXTS}, match=_pattern(f"{where}: match", entry["match"]))


def _pattern(where: str, table: Mapping[str, Any]) -> Pattern:
    _exact_keys(where, table, required=("verdict", "op"), optional=("evidence", "axes"))
    allowed = [verdict.value for verdict in _MATCHABLE]
    if table["verdict"] not in allowed:
        raise UsageError.of(f"{where}.verdict", table["verdict"], allowed, 'verdict = "mismatch"')
    if table["op"] not in KINDS:
        raise UsageError.of(f"{where}.op", table["op"], KINDS, 'op = "load"')
    verdict = Verdict(table["verdict"])
    evidence = _texts(f"{where}.evidence", table.get("evidence", []))
    axes = _axes(f"{where}.axes", table.get("axes", {}))
    if verdict is Verdict.HANG and (evidence or not axes):
        raise UsageError.of(where, dict(table), "for a hang: axes, and no evidence", 'axes = { offload = "cpu" }')
    if verdict is not Verdict.HANG and not any(pattern.strip("*?") for pattern in evidence):
        raise UsageError.of(f"{where}.evidence", list(evidence), "patterns that say something", '["exp_avg bits"]')
    return Pattern(verdict, table["op"], evidence, axes)


def _axes(where: str, table: Any) -> dict[str, tuple[str, ...]]:
    if not isinstance(table, dict):
        raise UsageError.of(where, table, "a table of axis = pattern", 'axes = { offload = "cpu" }')
    axes = {}
    for axis, value in table.items():
        if axis not in AXES:
            raise UsageError.of(where, axis, AXES, 'axes = { offload = "cpu" }')
        axes[axis] = _texts(f"{where}.{axis}", [value] if isinstance(value, str) else value)
        for text in axes[axis]:
            if not set(text) & set("*?["):
                _check_value(f"{where}.{axis}", axis, text)
    return axes


def _check_value(where: str, axis: str, text: str) -> None:
    try:
        parse_axis(axis, text)
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from None


def _texts(where: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(item, str) and item for item in value):
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
