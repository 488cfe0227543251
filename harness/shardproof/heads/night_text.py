"""The texts of a night on a head, in Markdown: its summary, and an issue for each cause of failure.

The file of an issue is `issues/ID.md`. Its first line is the title, and ends with the name of the cause in brackets, by
which a forge's client finds the issue that it opened on an earlier night:

    # A load leaves exp_avg of other ranks in place [shardproof 1a2b3c4d]
"""

from __future__ import annotations

import shlex
from pathlib import Path

from shardproof.heads.night import ISSUES, SUMMARY, TONIGHT, WALK, Night, Seen, files_of
from shardproof.report.files import SUMMARY as WALKED
from shardproof.report.summary import escaped
from shardproof.report.text import inert

COMPARED = "The run compares every tensor of state bit for bit with an unsharded run of the same inputs."
CURES = "Known defects are taken away in memory first (`+cured`), so that this is not one of them."
_SHOWN_FILES = 20


def write_night(found: Night, commits: int, out: Path) -> Path:
    """Write the summary of a night and the texts of its causes; the path of the summary.

    Args:
        commits: how many there are between the two of the night.
    """
    folder = out / ISSUES
    folder.mkdir(exist_ok=True)
    written = []
    for seen in files_of(found):
        file = folder / f"{seen.cause}.md"
        file.write_text(issue(seen, found.system, found.cured), "utf-8")
        written.append(f"{ISSUES}/{file.name}")
    (out / TONIGHT).write_text("".join(f"{name}\n" for name in written), "utf-8")
    summary = out / SUMMARY
    walked = out / WALK / WALKED
    ran = walked.read_text("utf-8") if found.report is not None and walked.is_file() else ""
    summary.write_text("\n".join([*_lines(found, commits), "", ran]), "utf-8")
    return summary


def issue(seen: Seen, system: str, cured: str = "") -> str:
    """The text of an issue: a title, and what somebody needs who has never heard of shardproof.

    Args:
        cured: what stands behind a commit; empty for a system without cures.
    """
    lines = [f"# {escaped(seen.title)} [shardproof {seen.cause}]", "", f"Status: {_status(seen)}", ""]
    if seen.effect:
        lines += [escaped(seen.effect), ""]
    lines += ["What is seen:", "", *_code(seen.signature)]
    if seen.bad:
        lines += ["The first commit that has it, and the last that has not:", ""]
        lines += _code(f"first bad  {seen.bad.removeprefix('git:')}  {seen.subject}")[:-1]
        lines += _code(f"last good  {seen.good.removeprefix('git:')}")
    if seen.note:
        lines += [f"{escaped(seen.note[:1].upper() + seen.note[1:])}.", ""]
    version = seen.bad or f"git:{seen.on[:12]}"
    again = ["shardproof", "run", "scenario.toml", "--system", f"{system}@{version}{cured}", "--clone", f"{system}=DIR"]
    lines += ["To see it, with DIR a clone of the library and this scenario in `scenario.toml`:", ""]
    lines += [*_code(shlex.join(again)), *_code(seen.toml)]
    return "\n".join([*lines, COMPARED, *([CURES] if cured else []), ""])


def _status(seen: Seen) -> str:
    if seen.gone:
        return f"gone on {seen.gone[:12]}; it was last seen on {seen.on[:12]}."
    return f"seen on {seen.on[:12]}; first seen on {seen.since[:12]}."


def _code(text: str) -> list[str]:
    """Text from outside as a block of code, which nothing in it can end."""
    return [*(f"    {line}" for line in inert(text, colour=False).splitlines()), ""]


def _lines(found: Night, commits: int) -> list[str]:
    between = f"{found.last[:12]} to {found.now[:12]}, {commits} commit{'s' * (commits != 1)}" if found.last else ""
    lines = [f"### shardproof night of {found.system}: {between or f'the first one, on {found.now[:12]}'}", ""]
    if found.last and not found.changed:
        return [*lines, "No commit of the night changes the library's tree: nothing was run."]
    if found.touched:
        lines += [f"Of {len(found.changed)} changed files, something of ours names {len(found.touched)}:", ""]
        lines += [f"* {escaped(name)}" for name in found.touched[:_SHOWN_FILES]]
        if len(found.touched) > _SHOWN_FILES:
            lines.append(f"* and {len(found.touched) - _SHOWN_FILES} more")
        lines += ["", f"The port ended with status {found.port}: {_PORT.get(found.port or 0, 'see its output')}.", ""]
    elif found.last:
        lines += [
            f"Nothing of ours names one of the {len(found.changed)} changed files, so that nothing was ported.",
            "",
        ]
    if found.report is None:
        return [*lines, f"The walk could not begin: it ended with status {found.status_of_walk}."]
    for title, causes in (("came", found.appeared), ("is still there", found.still), ("went", found.disappeared)):
        lines += [f"**{len(causes)} {'cause' if len(causes) == 1 else 'causes'} {_VERB[title][len(causes) != 1]}**", ""]
        lines += [f"* {escaped(seen.title)} ({seen.cause}){_with(seen)}" for seen in causes]
        lines += [""] * bool(causes)
    return lines


_VERB = {"came": ("came", "came"), "is still there": ("is still there", "are still there"), "went": ("went", "went")}
_PORT = {0: "everything of ours fits, and nothing new fails", 1: "something new fails", 3: "something does not fit"}


def _with(seen: Seen) -> str:
    if seen.bad and not seen.gone:
        return f", with {escaped(seen.bad.removeprefix('git:'))}: {escaped(seen.subject)}"
    return f": {escaped(seen.note)}" if seen.note and not seen.gone else ""
