"""The findings that can be sent as they are: each exported into a folder of its own, and a page that says what was
checked, when and on which release or commit.

Entries of `issues.toml` say `ready = true` of a finding that was judged as its maintainer would. That was on one day.
So nothing is sent without a new look: the script runs on the newest release and with the cure, and where a clone of the
library is given, the scenario runs on its newest commit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from shardproof.export.case import NoExportError
from shardproof.export.job import Exported
from shardproof.export.newest import Newest, not_asked, on_newest
from shardproof.issues.findings import Finding, section_of
from shardproof.protocol.system import System
from shardproof.result import Result
from shardproof.scenario import Scenario


@dataclass(frozen=True)
class Checked:
    """What came of one finding. script: how its script ended, in a line. release: what it ran on. main: what is seen on
    the newest commit. sound: whether it can be sent: the script shows it and passes with the cure, and that commit has
    it still."""

    finding: Finding
    folder: Path
    script: str
    release: str
    main: str
    sound: bool


def ready(systems: Iterable[System]) -> tuple[Finding, ...]:
    """The findings whose entries say that they are ready, in the order of the systems."""
    return tuple(f for system in systems for f in section_of(system).findings if f.novelty.ready)


def check(
    finding: Finding,
    folder: Path,
    scenario: Scenario,
    examined: Callable[[Scenario], Result],
    export: Callable[[Result, str, Path, Newest], Exported],
    *,
    cloned: bool,
) -> Checked:
    """Export one finding, try its script with the cure, and see whether the newest commit of the library fails too.

    Args:
        scenario: the regression of the entry. cloned: whether the caller has a clone of the library.
    """
    result = examined(scenario)
    newest = on_newest(result, examined, cloned=True) if cloned else None
    newest = newest or not_asked(result, finding.releases, finding.on_main)
    try:
        exported = export(result, finding.id, folder, newest)
        script, sound = _ended(exported), not exported.wrong
    except NoExportError as error:
        script, sound = f"none: {str(error).partition(chr(10))[0]}", False
    return Checked(finding, folder, script, f"{result.system} {result.version}", newest.short, sound and newest.there)


def _ended(found: Exported) -> str:
    cured = found.together or found.cured
    how = "" if cured is None else f"; {'passes' if cured.passes else 'DOES NOT PASS'} with the cure"
    return f"shows it{how}"


def page(rows: Sequence[Checked], today: str, folder: Path) -> str:
    """The page, as Markdown. today: the day of the checks, ISO 8601. folder: where the page lies."""
    lines = [
        "# Written by shardproof: the findings to send",
        "",
        f"Checked on {today}. A finding is one folder with a script and the text of an issue. Search upstream once",
        "more before you send one: the last search is as old as its row says.",
        "",
        "| finding | what a user has | script | on | newest commit of the clone | public |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        novelty, own = row.finding.novelty, row.folder.relative_to(folder)
        public = novelty.upstream or f"nothing found on {novelty.searched}"
        name = f"[{row.finding.id}]({own}/issue.md)"
        lines.append(f"| {name} | {novelty.harm} | {row.script} | {row.release} | {row.main} | {public} |")
    return "\n".join(lines) + "\n"
