"""The part of a failure's page that speaks in the library's terms: the program as library calls, what is known of the
defect, and the text of an issue.

The calls are those of the script that `shardproof export` writes. Where no script can be written the page says why.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardproof.errors import UsageError
from shardproof.export.case import case_of
from shardproof.export.description import FailureDescription, describe_known_issues
from shardproof.export.issue import render_draft
from shardproof.export.script import Draft, lines_of
from shardproof.program import Op, expand, is_arms
from shardproof.protocol.registry import system_named
from shardproof.result import Result


@dataclass(frozen=True)
class Step:
    """One operation of the program, as we write it and as the library's user does. calls: empty where a script does
    without it, or where there is none."""

    op: Op
    calls: str


@dataclass(frozen=True)
class Filing:
    """* description: what is known of the defect; None where nothing is.
    * steps: the operations up to the one that failed. reason: why they have no calls; empty where they have.
    * issue: the text of an issue, in Markdown; empty where there is no failure to report.
    """

    description: FailureDescription | None
    steps: tuple[Step, ...]
    reason: str
    issue: str

    @property
    def calls(self) -> str:
        """The library calls of the whole program as text, operation after operation."""
        return "\n".join(step.calls for step in self.steps if step.calls)


def filing_of(result: Result, known: str | None) -> Filing:
    """What there is to say of a failure.

    Args:
        known: ids of the known issues that it matches, joined by `+`; None for none.
    """
    told = _describe_known(result, known)
    calls: dict[int, str] = {}
    reason = ""
    try:
        if is_arms(result.scenario.program):
            raise UsageError("the calls of a trainer stand in its own file")
        system = system_named(result.system)
        if system.export is None:
            reason = f"{result.system} has no scripts yet"
        else:
            case = case_of(result)
            draft: Draft = system.export(case)
            calls = {op.index: "\n".join(lines_of(op, draft)) for op in case.ops}
    except UsageError as limit:
        reason = str(limit)
    except KeyError as absent:  # something a library made up: it has a name that no parameter of the model has
        reason = f"the model has no parameter {absent}"
    except Exception as error:  # a page is more than its script, and a report more than one page
        reason = f"an error of shardproof's own, while it wrote the calls down: {type(error).__name__}: {error}"
    steps = tuple(Step(op, calls.get(op.index, "")) for op in _program(result))
    filing = Filing(told, steps, reason, "")
    if not result.verdict.is_failure:
        return filing
    return Filing(told, steps, reason, render_draft(result, told, filing.calls))


def _describe_known(result: Result, known: str | None) -> FailureDescription | None:
    try:
        return describe_known_issues(system_named(result.system), known)
    except UsageError:  # a system of a plugin that is not there now
        return None


def _program(result: Result) -> tuple[Op, ...]:
    """The operations of a scenario up to the first failing operation, or the whole program if no operation failed."""
    try:
        ops = expand(result.scenario)
    except UsageError:
        return ()
    return ops[: result.failed_op.index + 1] if result.failed_op else ops
