"""Verdicts, how several merge into one, and the exit status of a run.

A verdict is about one scenario. `unknown` means that the harness itself failed, or does not fit the library: it never
counts as a pass. A run of which it hides more than `LOST_SHARE` ends with exit status 3, since then nobody can say what
the rest means; below that share the status is what the other verdicts make it, and the summary says what was lost.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum, IntEnum


class Verdict(Enum):
    """What one scenario showed, from best to worst in `SEVERITY` order."""

    PASS = "pass"
    UNSUPPORTED = "unsupported"
    MISMATCH = "mismatch"
    CRASH = "crash"
    HANG = "hang"
    NONDETERMINISTIC = "nondeterministic"
    UNKNOWN = "unknown"

    @property
    def is_failure(self) -> bool:
        """True for a correctness failure of the system under test."""
        return self in FAILURES


class Standing(Enum):
    """What a result means to a reader of a run, in the words that every report uses: on the terminal, in progress
    lines, on the page, in JUnit and in the JSON's `standings`. A verdict says how a scenario failed; its standing says
    whether somebody has to look.

    `known` is a failure that `issues.toml` describes; any other is `new`. A walk exits 1 for new ones only. A scenario
    file gets its plain verdict: nothing counts as known in it, and its failures are new there.
    """

    PASS = "pass"
    NEW = "new"
    KNOWN = "known"
    UNSUPPORTED = "unsupported"
    UNKNOWN = "unknown"


FAILURES = frozenset({Verdict.MISMATCH, Verdict.CRASH, Verdict.HANG, Verdict.NONDETERMINISTIC})

SEVERITY: tuple[Verdict, ...] = tuple(Verdict)


class ExitStatus(IntEnum):
    """The process exit status: the command-line contract others build on."""

    OK = 0
    FAILURE = 1
    USAGE = 2
    HARNESS = 3
    NOTHING_RUN = 4
    INTERRUPTED = 130


def merge(verdicts: Iterable[Verdict]) -> Verdict:
    """The most severe of several verdicts.

    Raises:
        ValueError: `verdicts` is empty; nothing observed is never a pass.
    """
    worst = max(verdicts, key=SEVERITY.index, default=None)
    if worst is None:
        raise ValueError("no verdict to merge: a scenario without any check is not a pass")
    return worst


LOST_SHARE = 0.02
"""How much of what a run executed may be `unknown` before its exit status is that of the harness."""


def exit_status(counts: dict[Verdict, int], known: int = 0) -> ExitStatus:
    """The status of a run.

    Args:
        counts: number of results by verdict.
        known: how many of the failing results are described by the systems' `issues.toml` (walks only).
    """
    executed = sum(n for v, n in counts.items() if v is not Verdict.UNSUPPORTED)
    if counts.get(Verdict.UNKNOWN, 0) > LOST_SHARE * executed:
        return ExitStatus.HARNESS
    if sum(counts.get(v, 0) for v in FAILURES) > known:
        return ExitStatus.FAILURE
    return ExitStatus.OK if executed else ExitStatus.NOTHING_RUN
