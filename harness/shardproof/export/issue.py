"""The text of an issue in Markdown, beside a script: what goes wrong in the library's words, and where it seems to lie.

What is known of a defect comes from the system's `issues.toml`; of a failure that nothing describes yet, from the
result itself.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from shardproof.diagnosis.explanation import LIKE
from shardproof.export.body import subject
from shardproof.export.case import FailureCase
from shardproof.export.script import SCRIPT, Draft
from shardproof.investigate.cure_table import scenario_of
from shardproof.issues import cures
from shardproof.issues.findings import Finding, section_of
from shardproof.issues.known_issues import KnownIssues, known_issues_of, repaired_in
from shardproof.protocol.registry import system_named
from shardproof.protocol.system import System
from shardproof.result import Evidence, Result, describe
from shardproof.scenario import Scenario
from shardproof.tables import text_of
from shardproof.wording.lines import difference_lines, headline
from shardproof.wording.titles import title

BRIEF = 90
"""Characters of a sentence that is too short to open a script alone."""

SEEN = 6
"""How many differences the text of an issue shows."""

MESSAGE = 4000
"""Characters of an error that it quotes."""


@dataclass(frozen=True)
class Written:
    """A script as it can be written. description: what is known of the failure."""

    case: FailureCase
    draft: Draft
    description: FailureDescription
    script: str


@dataclass(frozen=True)
class FailureDescription:
    """What is known of a failure. title: one sentence. what: more of them. line: where it seems to lie. upstream: where
    it is public. cure: the id of its cure, and its patch; empty without one. instead: what the cure
    does, where it is no repair (`Cure.instead`). repaired: the release that repaired it.
    trigger, reach: how a run comes to meet it, and what that takes; empty where nobody knows."""

    title: str
    what: str = ""
    line: str = ""
    upstream: str = ""
    harm: str = ""
    cure: str = ""
    patch: str = ""
    instead: str = ""
    repaired: str = ""
    trigger: str = ""
    reach: str = ""

    @property
    def heading(self) -> str:
        """The title of an issue, of at most `BRIEF` characters: that of the defect, or else its harm; where both are
        longer, the beginning of the first."""
        fitting = (text for text in (self.title, self.harm) if 0 < len(text.rstrip(".")) <= BRIEF)
        return next(fitting, textwrap.shorten(self.title, BRIEF, placeholder=" …")).rstrip(".")

    @property
    def opening(self) -> str:
        """The sentence at the head of a script: the title of the defect and, if the title is brief, the harm that the
        defect does."""
        return f"{self.title} {self.harm}" if self.harm and len(self.title) <= BRIEF else self.title


def describe_failure(case: FailureCase, known: str | None, title: str = "", what: str = "") -> FailureDescription:
    """What is known of the failure of a case.

    Args:
        known: ids of the known issues that it matches, joined by `+`; None for none. title, what: what to say of it
            where nothing is known.
    """
    system = system_named(case.scenario.system)
    found = describe_known_issues(system, _shown_first(case, system, known) if known else known)
    names = _cures_shown_by(system, case.scenario)
    if found and names and found.cure not in names:
        found = replace(found, cure=names[0], patch=_patch(system, names[0]), instead=_instead(system, names[0]))
    return found or FailureDescription(title or headline(case.result), what or f"It shows in {subject_of(case)}.")


def _shown_first(case: FailureCase, system: System, known: str) -> str:
    """The ids of known issues with those first of which what the script compares is evidence."""
    shown = case.focus.difference
    if shown is None or "+" not in known:
        return known
    item = Evidence(case.focus.op.kind, describe(shown))
    entries = {issue.id: issue for issue in KnownIssues(known_issues_of(system)).entries_named(known)}
    return "+".join(sorted(known.split("+"), key=lambda name: not entries[name].match.covers(item)))


def _cures_shown_by(system: System, scenario: Scenario) -> list[str]:
    """The cures that name a scenario as one of theirs. An entry has one cure, that of the scenario it names, but some
    of its scenarios need another. For example, the assertion of `megatron-core-4423-odd` goes with `4423-silent`."""
    return [
        cure.id
        for cure in cures.available(system)
        if any(scenario_of(cures.home_of(system, cure.id), name) == scenario for name in cure.shown_by)
    ]


def _patch(system: System, cure: str) -> str:
    """The diff of a cure; empty where there is none."""
    home = cures.home_of(system, cure) if any(cure == one.id for one in cures.available(system)) else system
    file = home.folder.joinpath("cures", f"{cure}.patch")
    return _diff(text_of(file, f"{home.name}/cures/{cure}.patch")) if cure and file.is_file() else ""


def _instead(system: System, cure: str) -> str:
    return next((one.instead for one in cures.available(system) if one.id == cure), "")


def describe_known_issues(system: System, known: str | None) -> FailureDescription | None:
    """What a system's entries say of known issues, joined by `+`; None where there is none."""
    findings = _findings_of(system.name) if known else {}
    found = [findings[name] for name in (known or "").split("+") if name in findings]
    if not found:
        return None
    first = found[0]
    cause = findings.get(first.cause, first)
    cure = first.cure  # that of a cause may not reach this face of it
    return FailureDescription(
        _first_sentence(first.what),
        first.what,
        first.library_line,
        first.novelty.upstream or cause.novelty.upstream,
        first.novelty.harm,
        cure,
        _patch(system, cure),
        _instead(system, cure),
        repaired_in(first.fixed or cause.fixed),
        first.novelty.trigger,
        first.novelty.reach,
    )


@lru_cache(maxsize=64)
def _findings_of(system: str) -> Mapping[str, Finding]:
    """A system's entries by their ids; read once, since a report asks for each of its failures."""
    return {finding.id: finding for finding in section_of(system_named(system)).findings}


def subject_of(case: FailureCase) -> str:
    """The value that the script compares, such as `exp_avg of up.weight`; for a failure without a difference, the
    operation that failed."""
    return subject(case) if case.focus.difference else f"the {case.focus.op.kind.replace('_', ' ')}"


def _first_sentence(text: str) -> str:
    end = text.find(". ")
    return text if end < 0 else text[: end + 1]


def _diff(patch: str) -> str:
    """The first form of a patch, as `git apply` takes it: without the lines before its first file, which are for the
    harness, and without the forms that it has for other releases."""
    first = re.split(r"^Or:$", patch, maxsplit=1, flags=re.MULTILINE)[0]
    at = first.find("--- ")
    return first[at:] if at >= 0 else first


def render_issue(
    made: Written,
    observed: str,
    versions: Mapping[str, str],
    python: str,
    passes: str = "",
    with_cure: str = "With this change the script ends with status 0:",
) -> str:
    """The text.

    Args:
        observed: what the script printed. versions: what was installed, by name. python: the interpreter's release.
        passes: the release on which the script was run and passes; empty for none. with_cure: what comes of the script
            with the cure, as the sentence above its diff.
    """
    case, draft, told = made.case, made.draft, made.description
    sections = [
        f"# {told.heading}",
        "## Describe the bug",
        told.what or told.title,
        told.harm,
        _when(told),
        "## Steps/Code to reproduce the bug",
        f"`python {SCRIPT}` shows it, with status 1."
        + "".join(f" Without a GPU it needs `{name}` beside it." for name in draft.shims)
        + (f" It needs {' and '.join(f'`{name}`' for name in draft.beside)} beside it." if draft.beside else ""),
        _code(made.script),
        *(_folded(name, text) for name, text in draft.beside.items()),
        "## Expected behavior",
        _promise(case),
        "## Observed behavior",
        observed.strip(),
        "## Versions",
        "\n".join(f"* {name} {release}" for name, release in versions.items()) + f"\n* Python {python} on Linux",
        f"Seen without a GPU: {' and '.join(f'`{name}`' for name in draft.shims)} stood in for it."
        if draft.shims
        else "",
        f"The script passes on {next(iter(versions), case.result.system)} {passes}." if passes else "",
        *_cure(told, with_cure),
        f"Already public: {told.upstream}" if told.upstream else "",
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def render_draft(result: Result, told: FailureDescription | None, calls: str) -> str:
    """The text before a script was run: what is known, the calls, and what our own run saw.

    Args:
        told: what is known of the defect; None where nothing is. calls: the library's; empty where there is no script.
    """
    known = told or FailureDescription(title(result))
    seen = [line for d in result.differences[:SEEN] for line in difference_lines(d)]
    if result.error is not None:
        seen = [f"{result.error.type}: {result.error.message[:MESSAGE]}".strip(), result.error.traceback[-MESSAGE:]]
    hidden = len(result.differences) - SEEN
    sections = [
        f"# {known.heading}",
        "## Describe the bug",
        known.what or known.title,
        known.harm,
        _when(known),
        f"## Steps/Code to reproduce the bug\n\n{_code(calls)}" if calls else "",
        "## Observed behavior",
        _code("\n".join(seen), "text") if seen else result.signature,
        f"and {hidden} more differences" if hidden > 0 and result.error is None else "",
        "## Versions",
        "\n".join(f"* {line}" for line in _releases(result)),
        f"Not the real thing: {', '.join(result.emulated)}." if result.emulated else "",
        *_cure(known, "With this change it does not happen:"),
        f"Already public: {known.upstream}" if known.upstream else "",
        f"`shardproof export {result.id}` writes this with a script that shows it." if calls else "",
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


TAKES = {
    "default": "the defaults are enough",
    "documented flag": "a documented flag is needed",
    "API only": "it takes calls that the library's own training script does not make",
}
"""What it takes to meet a defect, by the word that its entry has for it; for other words there is nothing to say."""


def _when(told: FailureDescription) -> str:
    """How a run comes to meet the defect, in a line."""
    more = f" ({TAKES[told.reach]})" if told.reach in TAKES else ""
    return f"When it comes: {told.trigger.rstrip('.')}{more}." if told.trigger else ""


PROMISES = {
    "build": "A new run starts with the values and settings that it was given.",
    "save": "A save leaves what is training as it is, and writes all of it.",
    "load": "A load restores what was saved, and nothing else.",
    "step": "A step comes to the values that the same optimizer has on whole tensors in one process.",
}
"""How the kind of an operation begins → what every user expects of it."""


def _promise(case: FailureCase) -> str:
    """What was to happen instead."""
    if case.focus.difference is None:
        return f"The {case.focus.op.kind.replace('_', ' ')} ends without an error."
    kind = LIKE.get(case.focus.op.kind, case.focus.op.kind)
    return next((text for name, text in PROMISES.items() if kind.startswith(name)), "The script says what it expects.")


def _releases(result: Result) -> Iterator[str]:
    """The releases that took part in a failing run, a line for each: library, torch, and the second release where a
    checkpoint moved between two."""
    yield f"{result.system} {result.version}"
    if result.loaded_by:
        yield f"{result.system} {result.loaded_by}, which loads"
    yield from (f"{name}: {how}" for name, how in result.chosen.items())


def _cure(told: FailureDescription, with_it: str) -> list[str]:
    if not told.line:
        return []
    text = ["## Where it seems to lie", told.line + "."]
    if told.instead:
        text.append(f"A change takes the failure away and is no proposal for a repair: it {told.instead}")
    elif told.patch:
        text += [with_it, _code(told.patch, "diff")]
    return text


def _folded(name: str, text: str) -> str:
    """A file that a reader opens if he wants to."""
    return f"<details><summary><code>{name}</code></summary>\n\n{_code(text)}\n\n</details>"


def _code(text: str, language: str = "python") -> str:
    return f"```{language}\n{text.rstrip()}\n```"
