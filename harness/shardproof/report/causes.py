"""Gives each cause of failures a name that stays the same on every night and every release.

Failures have one cause where the system, the verdict and the operation are the same and one mechanism explains them;
where no rule knows a mechanism, where their signatures are the same. The commit and the release are no part of it, nor
is whether the defect is known by now. Nor is the file in which an error was raised: libraries move functions from file
to file between releases, and the message and the function stay. What reports count "by cause" are these names: the run,
the history of its folder and both pages count the same ones.
"""

from __future__ import annotations

import hashlib
import json
import re

from shardproof.result import Result


def cause_of(result: Result) -> str:
    """The name of a failure's cause, eight hex digits."""
    op = result.failed_op.name if result.failed_op else None
    mechanism = result.explanations[0].mechanism if result.explanations else None
    return name_of(result.system, result.verdict.value, op, mechanism, result.signature)


def name_of(system: str, verdict: str, op: str | None, mechanism: str | None, signature: str) -> str:
    """The same, of the parts of a result as a history has them. op: the operation that failed; mechanism: of the best
    explanation, where there is one."""
    return named(system, verdict, op, mechanism or _RAISED_IN.sub(" in ", signature))


_RAISED_IN = re.compile(r" at [^\s,]+\.pyx?, ")
"""What stands in a signature between an error's message and the function that raised it."""


def named(*parts: str | None) -> str:
    """Eight hex digits for what tells a cause from others: of a cause itself, its system, verdict, operation, and
    mechanism or signature."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:8]
