"""The history of a folder's runs on a terminal: a line for each cause, with a character for each night."""

from __future__ import annotations

from collections.abc import Mapping

from shardproof.errors import printable
from shardproof.report.history import CALLED, History, Trace

NOT_RUN, CLEAN, MANY = "-", "·", "+"

_WIDTH = max(map(len, CALLED))
_COLOURS: Mapping[str, str] = {"new": "31", "flaky": "33", "recurring": "31", "fixed": "32", "not run": "2"}


def render_history(history: History, folder: str, page: str, colour: bool = False) -> str:
    """The history as text, ending in a newline.

    Args:
        folder, page: of the runs, and where the HTML page is.
        colour: use ANSI colours.
    """
    first, last = history.nights[0].started, history.nights[-1].started
    count = len(history.nights)
    lines = [f"history of {folder}: {count} run{'s' * (count != 1)}, {first} to {last} UTC", history.in_words]
    if history.tonight_in_words:
        lines.append(f"the last night, by cause: {history.tonight_in_words}")
    lines.append("")
    if history.traces:
        width = max(len("nights"), count)
        lines.append(f"{'state':<{_WIDTH}}  {'nights':<{width}}  signature")
        lines += [_line(trace, width, colour) for trace in history.traces]
        told = f"nights, oldest first: scenarios that showed it, {MANY} for ten or more, {CLEAN} for none"
        lines += ["", f"{told}, {NOT_RUN} where none of them ran"]
    lines.append(f"page: {page}")
    return "\n".join(lines) + "\n"


def _line(trace: Trace, width: int, colour: bool) -> str:
    known = f"  (known: {trace.known})" if trace.known else ""
    state = f"{trace.called:<{_WIDTH}}"
    if colour:
        state = f"\x1b[{'2' if trace.known else _COLOURS[trace.state]}m{state}\x1b[0m"
    return f"{state}  {''.join(map(_night, trace.shown)):<{width}}  {printable(trace.signature)}{printable(known)}"


def _night(count: int | None) -> str:
    if count is None:
        return NOT_RUN
    return MANY if count > 9 else str(count) if count else CLEAN
