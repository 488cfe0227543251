"""Exports a failure into a folder: the script, the issue text, and a check that the script reproduces the failure.

The steps are those of `shardproof export`: make the case of a result, ask its system for a draft, write, and run what
was written. What does not show the failure is never left behind without a word.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from shardproof.errors import UsageError
from shardproof.export.case import RAISES, NoExportError, case_of
from shardproof.export.description import describe_failure, needed_params, require_in_front
from shardproof.export.issue import Written, render_issue
from shardproof.export.newest import Newest, not_asked
from shardproof.export.script import SCRIPT, Draft, render
from shardproof.export.software import software_of
from shardproof.export.trial import ScriptOutcome, run
from shardproof.issues import cures
from shardproof.program import changes
from shardproof.protocol.registry import all_systems, system_named
from shardproof.protocol.releases import package_of
from shardproof.protocol.system import System
from shardproof.result import Result
from shardproof.world.commands import OverlayError
from shardproof.world.interpreter import Interpreter, interpreter
from shardproof.world.overlay import build
from shardproof.world.torches import with_torch

ISSUE = "issue.md"

UNTRIED = "This change is proposed; the script was not run with it for this issue:"
ALONE = "With this change the script ends with status 0:"
BEHIND = "With this change another known defect shows; with that repaired too the script ends with status 0:"
"""What an issue says of a cure: it was not tried, it is enough, or another defect comes behind it."""


@dataclass(frozen=True)
class Exported:
    """What came of an export. plain: how the script ended. cured: how it ended with the cure; None where it was not run
    so, or there is no cure. together: how it ended with all cures of the library, where it does not pass with its own
    alone, since another defect comes behind it. others: how it ended with all cures but its own, where it must still
    fail; None as for `cured`. repaired: how it ended on the release that repaired the defect; None where there is none,
    or it cannot be installed. lacks_cure: it was to be run with the cure, and there is none."""

    written: Written
    folder: Path
    plain: ScriptOutcome
    cured: ScriptOutcome | None
    together: ScriptOutcome | None
    others: ScriptOutcome | None
    repaired: ScriptOutcome | None
    lacks_cure: bool = False

    @property
    def wrong(self) -> bool:
        """Whether the script fails with all cures too, or on the release that repaired the defect."""
        ended = (self.together or self.cured, self.repaired)
        return any(outcome is not None and not outcome.passes for outcome in ended)

    def text(self) -> str:
        """What was written and how it ended, for the terminal."""
        lines = [
            f"{self.folder / name}" for name in (SCRIPT, ISSUE, *self.written.draft.shims, *self.written.draft.beside)
        ]
        lines.append(f"in a clean interpreter: {self.plain.ending}")
        if self.lacks_cure:
            lines.append("with the cure: it was not run, since this defect has none")
        if self.cured is not None:
            unless = "IT DOES NOT PASS" if self.wrong else "another defect comes behind it"
            how = "it passes" if self.cured.passes else unless
            lines.append(f"with the cure {self.written.description.cure}: {how}; {self.cured.ending}")
        if self.together is not None:
            how = "it passes" if self.together.passes else "IT DOES NOT PASS"
            lines.append(f"with all cures of {self.written.case.scenario.system}: {how}; {self.together.ending}")
        if self.others is not None:
            how = "it still fails" if self.others.shows else "IT DOES NOT SAY"
            lines.append(f"with all cures but {self.written.description.cure}: {how}; {self.others.ending}")
        if self.repaired is not None:
            how = "it passes" if self.repaired.passes else "IT DOES NOT PASS"
            lines.append(f"on {self.written.description.repaired}, which repaired it: {how}; {self.repaired.ending}")
        return "\n".join(lines) + "\n"


def written(result: Result, known: str | None, *, whole: bool = False) -> Written:
    """The script of a result.

    Args:
        known: ids of the known issues that it matches, joined by `+`. whole: see `case_of`.

    Raises:
        NoExportError: no script can be written.
    """
    system = system_named(result.system)
    if system.export is None:
        able = ", ".join(one.name for one in all_systems() if one.export_entry)
        raise NoExportError.because(result, f"{system.name} has no scripts yet; those that have: {able}")
    require_in_front(result.scenario)
    if changes(result.scenario):
        raise NoExportError.because(
            result, "no script says how ranks with a model, options or release of their own load"
        )
    case = case_of(result, whole=whole, needs=needed_params(result.scenario, known))
    draft: Draft = system.export(case)
    told = describe_failure(case, known, draft.title, draft.what)
    return Written(draft.case or case, draft, told, render(draft, case, told.opening))


MARK = ".shardproof-export"
"""An empty file in every folder that an export wrote: it may be written again."""


def require_own(folder: Path) -> None:
    """Check that nothing in a folder would be written over but an earlier export.

    Raises:
        UsageError: it is a file, or holds something else.
    """
    try:
        free = not folder.exists() or (folder / MARK).is_file() or not any(folder.iterdir())
    except OSError:
        free = False
    if not free:
        allowed = "a new folder, an empty one, or one that `shardproof export` wrote"
        raise UsageError.of("--folder", str(folder), allowed, "--folder exports/for-upstream")


def export(
    result: Result, known: str | None, folder: Path, python: str | None, *, cured: bool, newest: Newest | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Exported:  # fmt: skip
    """Write a script and the text of an issue into a folder, and run the script: as it is, with the cure where `cured`
    asks for that, and on the release that repaired the defect.

    A script has only what the failure seems to need. Where that does not show it, one of everything is written.

    Args:
        newest: what was found on the newest release or commit; None where nobody asked.
        say: is told what begins, in a line.

    Raises:
        UsageError: the folder holds something that is not ours.
        NoExportError: no script can be written, or what was written does not show the failure.
    """
    ranks, system = interpreter(python), system_named(result.system)
    paths = library_paths(system, result, ranks)
    require_own(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MARK).touch()
    say("running the script as it is")
    made, plain = _shown(result, known, folder, ranks, paths)
    cured_alone = cured and bool(made.description.cure)
    if cured_alone:
        say("running the script with a cure")
    own = _cured(system, made, folder, ranks, paths, made.description.cure) if cured_alone else None
    together = _cured(system, made, folder, ranks, paths, "") if own is not None and not own.passes else None
    others = _others_cured(system, made, folder, ranks, paths) if own is not None else None
    if others is not None and others.passes:
        of = f"{system.name} {result.version}"
        reason = f"the script shows another defect: with all cures of {of} but {made.description.cure} it passes"
        raise NoExportError.because(result, f"{reason}; it was kept as {_set_aside(folder)}")
    if made.description.repaired:
        say(f"running the script on {made.description.repaired}, which repaired the defect")
    found = Exported(
        made, folder, plain, own, together, others, _repaired(result, known, made, ranks), cured and own is None
    )
    passes = made.description.repaired if found.repaired is not None and found.repaired.passes else ""
    how = UNTRIED if own is None else BEHIND if together is not None and together.passes else ALONE
    places = (*paths, Path(ranks.site))
    software = software_of(
        system, result, ranks.python, ranks.installed, places, [made.script, *made.draft.shims.values()]
    )
    told = made.description
    asked = newest or not_asked(result, told.releases, told.on_main)
    text = render_issue(made, plain.said, software, asked, passes, how)
    (folder / ISSUE).write_text(text, "utf-8")
    return found


def _shown(
    result: Result, known: str | None, folder: Path, ranks: Interpreter, paths: tuple[Path, ...]
) -> tuple[Written, ScriptOutcome]:
    """The shortest script that shows a failure, in its folder, and how it ended."""
    made = written(result, known)
    plain = _run(made, folder, ranks.path, paths)
    if not _shows(made, plain):
        other = written(result, known, whole=True)
        if other.script != made.script:
            made, plain = other, _run(other, folder, ranks.path, paths)
    if _shows(made, plain):
        return made, plain
    reason = f"the script that was written does not show it ({plain.ending}); it was kept as {_set_aside(folder)}"
    raise NoExportError.because(result, reason)


def _set_aside(folder: Path) -> Path:
    """Rename the script in a folder, which is not to be sent, and say what it is called now."""
    aside = folder / f"failed-{SCRIPT}"
    (folder / SCRIPT).replace(aside)
    return aside


def _run(made: Written, folder: Path, python: str, paths: tuple[Path, ...]) -> ScriptOutcome:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / SCRIPT).write_text(made.script, "utf-8")
    for name, text in {**made.draft.shims, **made.draft.beside}.items():
        (folder / name).write_text(text, "utf-8")
    return run(folder / SCRIPT, python, paths)


def _shows(made: Written, plain: ScriptOutcome) -> bool:
    error = made.case.result.error
    return plain.shows and plain.raises(error.message if made.case.focus.kind == RAISES and error else "")


def _repaired(result: Result, known: str | None, made: Written, ranks: Interpreter) -> ScriptOutcome | None:
    """The script on the release that repaired the defect, in the calls of that release where these are others."""
    release, system = made.description.repaired, system_named(result.system)
    if not release:
        return None
    try:
        if system.package:
            python, paths = ranks.path, build(package_of(system), release, ranks).paths
        else:
            other = with_torch(release, ranks)
            python, paths = other.path, (Path(other.site),)
    except (UsageError, OverlayError):  # no such release on the package index, or none for this interpreter
        return None
    there = written(replace(result, version=release), known, whole=made.case.whole)
    with tempfile.TemporaryDirectory(prefix="shardproof-export-") as folder:
        return _run(there, Path(folder), python, paths)


def library_paths(system: System, result: Result, ranks: Interpreter) -> tuple[Path, ...]:
    """Where the library of a result lies: its release's folders, or those of the interpreter."""
    if not system.package:
        return (Path(ranks.site),)
    return build(package_of(system), result.scenario.release, ranks).paths


def _cured(
    system: System, made: Written, folder: Path, ranks: Interpreter, paths: tuple[Path, ...], wanted: str
) -> ScriptOutcome:
    """The script on a copy of the library with the defect cured.

    Args:
        wanted: the cure's id; empty for all cures.
    """
    found, places = _copy(system, ranks, paths, wanted)
    if made.description.cure not in found.applied:
        return ScriptOutcome(
            -1, "", f"the cure {made.description.cure} does not apply: {found.left[made.description.cure]}"
        )
    return run(folder / SCRIPT, ranks.path, places, found.sources)


def _others_cured(
    system: System, made: Written, folder: Path, ranks: Interpreter, paths: tuple[Path, ...]
) -> ScriptOutcome:
    """The script on a copy of the library with every defect cured but its own."""
    (own,) = cures.cures_asked_for(system, made.description.cure)
    found, places = _copy(system, ranks, paths, own.all_but_this)
    return run(folder / SCRIPT, ranks.path, places, found.sources)


def _copy(
    system: System, ranks: Interpreter, paths: tuple[Path, ...], wanted: str
) -> tuple[cures.Cured, tuple[Path, ...]]:
    """What the cures that are wanted come to on a library, and where its files lie."""
    places = (*paths, Path(ranks.site))  # a cure may be that of a library that this one stands on

    def source(name: str) -> str | None:
        file = next((path / name for path in places if (path / name).is_file()), None)
        return file.read_text("utf-8") if file else None

    return cures.apply(cures.cures_asked_for(system, wanted), source), places
