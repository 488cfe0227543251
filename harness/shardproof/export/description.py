"""What is known of a failure, for a script's first line and for the text of an issue.

What is known of a defect comes from the system's `issues.toml`; of a failure that nothing describes yet, from the
result itself.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from shardproof.export.body import name_of, subject
from shardproof.export.case import FailureCase, NoExportError
from shardproof.investigate.cure_table import scenario_of
from shardproof.issues import cures
from shardproof.issues.findings import TITLE_CHARACTERS, Finding, section_of
from shardproof.issues.known_issues import KnownIssues, known_issues_of, repaired_in
from shardproof.issues.on_main import OnMain
from shardproof.laboratory.witness import scenario_of as scenario_of_entry
from shardproof.models import model_spec
from shardproof.protocol.registry import all_systems, system_named
from shardproof.protocol.system import System
from shardproof.result import Evidence, Result, describe
from shardproof.scenario import Scenario
from shardproof.tables import text_of
from shardproof.wording.lines import headline

AS_THE_CAUSE = "The same"
"""How the text of an entry begins that is read behind that of its cause."""


@dataclass(frozen=True)
class FailureDescription:
    """What is known of a failure.

    * title: one sentence. what: more of them.
    * line: where it seems to lie. upstream: where it is public. harm: what a user has in the end.
    * cure: the id of its cure, and its patch; empty without one. instead: what the cure does, where it is no repair
      (`Cure.instead`).
    * repaired: the release that repaired it.
    * short: what to call a failure that nothing describes, where its title is too long for an issue.
    * finding: the entry of `issues.toml`; None where nothing describes the failure. cause: the entry of which that one
      is another face, else the same.
    """

    title: str
    what: str = ""
    line: str = ""
    upstream: str = ""
    harm: str = ""
    cure: str = ""
    patch: str = ""
    instead: str = ""
    repaired: str = ""
    short: str = ""
    finding: Finding | None = None
    cause: Finding | None = None

    def heading(self, prefix: str = "") -> str:
        """The title of an issue, whole and of at most `TITLE_CHARACTERS`: the entry's own, else its first sentence
        where that can stand alone, else its harm.

        Args:
            prefix: what upstream's template begins a title with; it counts.
        """
        room = TITLE_CHARACTERS - len(prefix)
        own = self.finding.title if self.finding else ""
        alone = "" if self.title.startswith(AS_THE_CAUSE) else self.title
        texts = (own, alone, self.harm, _clause(alone, room), self.short)
        fitting = (text.rstrip(".") for text in texts if 0 < len(text.rstrip(".")) <= room)
        return prefix + next(fitting, "A failure without a short title")

    @property
    def releases(self) -> Mapping[str, str]:
        """Release or commit → what the scenario of the entry gave on it."""
        return self.finding.releases if self.finding else {}

    @property
    def on_main(self) -> OnMain | None:
        """What was read of the main branch: the entry's own, or that of its cause where both are of one line."""
        if self.finding is None or self.finding.on_main or self.cause is None:
            return self.finding.on_main if self.finding else None
        return self.cause.on_main if self.cause.library_line == self.finding.library_line else None

    @property
    def opening(self) -> str:
        """The sentence at the head of a script: the title of the defect and, if the title is brief, the harm that the
        defect does."""
        return f"{self.title} {self.harm}" if self.harm and len(self.title) <= TITLE_CHARACTERS else self.title


def _clause(text: str, room: int) -> str:
    """The beginning of a text up to the last end of a clause that there is room for; empty where there is none, or
    where what was left out is marked in it."""
    ends = [at.start() for at in re.finditer(r"[:;,.] ", text[:room])]
    clause = text[: ends[-1]] if ends else ""
    return "" if "…" in clause else clause


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
    return found or describe_unknown(
        case.result, title or headline(case.result), what or f"It shows in {subject_of(case)}."
    )


def describe_unknown(result: Result, title: str, what: str = "") -> FailureDescription:
    """The description of a failure that no entry of `issues.toml` matches, from the result alone."""
    op = name_of(result.failed_op.name) if result.failed_op else result.scenario.program
    short = f"{result.system} {result.version}: {result.verdict.value} at the {op}"
    return FailureDescription(title, what, short=short)


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
    cause = _cause_of(first)
    what = f"{cause.what} {first.what}" if first.what.startswith(AS_THE_CAUSE) and cause is not first else first.what
    cure = first.cure  # that of a cause may not reach this face of it
    return FailureDescription(
        _first_sentence(first.what), what, first.library_line,
        upstream=first.novelty.upstream or cause.novelty.upstream, harm=first.novelty.harm,
        cure=cure, patch=_patch(system, cure), instead=_instead(system, cure),
        repaired=repaired_in(first.fixed or cause.fixed), finding=first, cause=cause,
    )  # fmt: skip


def needed_params(scenario: Scenario, known: str | None) -> tuple[str, ...]:
    """The parameters that a known defect needs in a model, as its entry says; empty where it says nothing, where there
    are several defects, or where the entry speaks of another model."""
    found = _findings_of(scenario.system).get(known or "")
    names = {param.fqn for param in model_spec(scenario.model).params}
    return found.script_needs if found and names.issuperset(found.script_needs) else ()


def require_in_front(scenario: Scenario) -> None:
    """Refuse the scenario of an entry that other defects hide (`behind`). A script runs on a release, where it would
    show what stands in front. A scenario that an entry of its own has as well is that one's.

    Raises:
        NoExportError: it is such a scenario; says which defects hide it.
    """
    system, asked = system_named(scenario.system), replace(scenario, version="")
    hidden, shown = (
        {replace(scenario_of_entry(issue), version=""): issue.id for issue in known_issues_of(system, hidden=behind)}
        for behind in (True, False)
    )
    if asked in hidden and asked not in shown:
        front = " and ".join(_findings_of(system.name)[hidden[asked]].behind)
        raise NoExportError(
            f"no script can be written for {hidden[asked]}: on a release {front} ends the run before it shows, so that "
            f"a script would show that; what shows it: shardproof known {hidden[asked]}"
        )


def _cause_of(finding: Finding) -> Finding:
    """The entry of which one is another face, on whichever system's page it stands; without one, the same."""
    systems = (system.name for system in all_systems() if finding.cause)
    entries = (_findings_of(name).get(finding.cause) for name in systems)
    return next((entry for entry in entries if entry), finding)


@lru_cache(maxsize=64)
def _findings_of(system: str) -> Mapping[str, Finding]:
    """A system's entries by their ids; read once, since a report asks for each of its failures."""
    return {finding.id: finding for finding in section_of(system_named(system)).findings}


def subject_of(case: FailureCase) -> str:
    """The value that the script compares, such as `exp_avg of up.weight`; for a failure without a difference, the
    operation that failed."""
    return subject(case) if case.focus.difference else f"the {name_of(case.focus.op.kind)}"


def _first_sentence(text: str) -> str:
    end = text.find(". ")
    return text if end < 0 else text[: end + 1]


def _diff(patch: str) -> str:
    """The first form of a patch, as `git apply` takes it: without the lines before its first file, which are for the
    harness, and without the forms that it has for other releases."""
    first = re.split(r"^Or:$", patch, maxsplit=1, flags=re.MULTILINE)[0]
    at = first.find("--- ")
    return first[at:] if at >= 0 else first
