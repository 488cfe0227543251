"""The terminal output and JSON of `shardproof port`: first our own misfits, then repaired defects, then new
failures."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from shardproof.errors import printable
from shardproof.heads.port import Misfit, New, Port, Repair
from shardproof.result import Result

FITS, REPAIRED, NEW = "What of ours no longer fits", "What is repaired", "What is new"
"""The headings, in the order in which to mend what stands below them."""

_SHOWN_NAMES = 4


def render(found: Port, options: str = "") -> str:
    """The whole of it, ending in the line that says what to do next. options: what a command needs that runs a result
    again."""
    return "\n".join(printable(line) for line in _lines(found, options)) + "\n"


def headline(found: Port) -> str:
    """What was looked at, and against which release."""
    asked = found.asked
    called = f" (calls itself {found.called})" if found.called else ""
    return f"{asked.system.name} {asked.version}{called} against {asked.base}"


def counted(found: Port) -> str:
    """How much was run, and how long it took."""
    told = ", ".join(f"{number} {what}" for what, number in found.tried.items()) or "nothing was run"
    minutes, seconds = divmod(round(found.duration_s), 60)
    still = f"; {found.still_there} regressions still fail as their entries say" if found.still_there else ""
    return f"{told} in {minutes} min {seconds:02d} s{still}"


def misfit_line(misfit: Misfit, options: str = "") -> str:
    """One reason: what, where in the tree, where in our code, and how many results it hides. options: see `render`."""
    place = f" at {misfit.place}" if misfit.place else ""
    called = f", called in {misfit.called}" if misfit.called else ""
    hides = (
        f" ({_several(len(misfit.results), 'result')}; {misfit.results[0].replay}{options})" if misfit.results else ""
    )
    return f"{misfit.what}{place}{called}{hides}"


def repair_lines(repair: Repair, *, logged: bool) -> Iterator[str]:
    """An entry, and below it the commits that may have repaired it."""
    passing = _some(repair.passing)
    part = f"; in part: {_some(repair.failing)} still fails" if repair.failing else ""
    yield f"{repair.name}: {passing} {'pass' if len(repair.passing) > 1 else 'passes'}{part}"
    for landed in repair.commits:
        yield f"  {landed.commit.line}  ({landed.why})"
    if not repair.commits and repair.finding:
        yield "  no commit of the log names it" if logged else "  no commit: no clone with the tag of that release"


def new_lines(new: New, options: str = "") -> Iterator[str]:
    """A failure, how often it was seen, and how to see it again. options: see `render`."""
    names = f"; regressions: {_some(new.names)}" if new.names else ""
    why = f"; {new.why}" if new.why else ""
    yield f"{new.signature} ({_several(len(new.results), 'result')}{names}{why})"
    yield f"  {new.results[0].replay}{options}"


def document(found: Port) -> dict[str, Any]:
    """The same in JSON types."""
    return {
        "system": found.asked.system.name, "version": found.asked.version, "called": found.called,
        "base": found.asked.base, "quick": found.asked.quick, "interrupted": found.interrupted,
        "duration_s": found.duration_s, "tried": dict(found.tried), "planned": found.planned,
        "still_there": found.still_there, "hidden": found.hidden,
        "misfits": [
            {"kind": m.kind, "what": m.what, "place": m.place, "called": m.called, "results": _ids(m.results)}
            for m in found.misfits
        ],
        "read_only": [{"what": c.what, "place": c.place, "called": c.called} for c in found.read_only],
        "repaired": [
            {
                "entry": repair.finding.id if repair.finding else "", "passing": list(repair.passing),
                "failing": list(repair.failing),
                "commits": [
                    {"commit": c.commit.id, "day": c.commit.day, "subject": c.commit.subject, "why": c.why}
                    for c in repair.commits
                ],
            }
            for repair in found.repaired
        ],
        "new": [
            {"signature": n.signature, "results": _ids(n.results), "regressions": list(n.names), "why": n.why}
            for n in found.new
        ],
        "next": found.verdict,
    }  # fmt: skip


def _lines(found: Port, options: str) -> Iterator[str]:
    yield headline(found)
    yield counted(found)
    yield from ["", f"1. {FITS}: {len(found.misfits) or 'nothing: everything fits'}"]
    yield from (f"   {misfit_line(misfit, options)}" for misfit in found.misfits)
    if found.read_only:
        yield "   read in the tree only; nothing ran into it:"
        yield from (f"   {each.what} at {each.place}, called in {each.called}" for each in found.read_only)
    yield from ["", f"2. {REPAIRED}: {len(found.repaired) or 'nothing'}"]
    for repair in found.repaired:
        yield from (f"   {line}" for line in repair_lines(repair, logged=found.logged))
    yield from ["", f"3. {NEW}: {len(found.new) or 'nothing'}"]
    for new in found.new:
        yield from (f"   {line}" for line in new_lines(new, options))
    yield from ["", found.verdict]


def _ids(results: tuple[Result, ...]) -> list[str]:
    return [result.id for result in results]


def _several(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _some(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - _SHOWN_NAMES} more" if len(names) > _SHOWN_NAMES else ""
    return ", ".join(names[:_SHOWN_NAMES]) + more
