"""What a failure page says to the library's maintainers: the calls that lead there, and what is known of the defect.

The calls are those of the script that `shardproof export` writes. Where no script can be written the page says why.
"""

from __future__ import annotations

from dataclasses import dataclass

from harness.errors import UsageError
from harness.export.case import case_of
from harness.export.issue import Told, told_about
from harness.export.script import Draft, body_lines
from harness.program import expand
from harness.result import Result
from harness.systems.registry import system_named


@dataclass(frozen=True)
class Filing:
    """* told: what is known of the defect; None where nothing is.
    * calls: the library's calls, in order. reason: why there are none; empty where there are.
    * program: the operations up to the one that failed.
    """

    told: Told | None
    calls: str
    reason: str
    program: tuple[str, ...]


def filing_of(result: Result, known: str | None) -> Filing:
    """What the page of a failure says to the library's maintainers.

    Args:
        known: ids of the known issues that it matches, joined by `+`; None for none.
    """
    calls, reason = "", ""
    try:
        system = system_named(result.system)
        if system.export is None:
            reason = f"{result.system} has no scripts yet"
        else:
            case = case_of(result)
            draft: Draft = system.export(case)
            calls = "\n".join(body_lines(case, draft))
        told = told_about(system, known)
    except UsageError as limit:
        reason, told = str(limit), _told(result, known)
    return Filing(told, calls, reason, _program(result))


def _told(result: Result, known: str | None) -> Told | None:
    try:
        return told_about(system_named(result.system), known)
    except UsageError:  # a system of a plugin that is not there now
        return None


def _program(result: Result) -> tuple[str, ...]:
    try:
        ops = expand(result.scenario)
    except UsageError:
        return ()
    last = result.failed_op.index if result.failed_op else len(ops) - 1
    return tuple(op.kind.replace("_", " ") for op in ops[: last + 1])
