"""The course of a rank: what it was in when, and how it ended. Of ranks that failed only.

The supervisor makes it of the marks on its board (`shardproof.world.process.Board`), a result stores it, and a report
draws it. It is what tells a rank that failed from those that only waited for it.
"""

from __future__ import annotations

from dataclasses import dataclass

MOST_MARKS = 36
"""Marks of a rank that are kept, the latest ones: three an operation."""

MOST_SAID = 160
"""Characters of what a rank raised that are kept."""

Mark = tuple[int, str, float]
"""Operation (-1 before the first), stage (one of `shardproof.world.job.STAGES`), and seconds since the ranks were
forked."""


@dataclass(frozen=True)
class RankCourse:
    """What became of a rank of a session that failed.

    * marks: when it entered which stage of which operation, at most `MOST_MARKS`.
    * end: `raised`, `died`, `killed` beside a rank that had failed, `stuck` at the deadline, or `done`.
    * what: the type of what it raised and the first line of its message, or the signal or exit status by which it
      died; empty for the others.
    * end_s: seconds from the fork to its end. first: whether it was the first to fail.
    """

    rank: int
    marks: tuple[Mark, ...]
    end: str
    end_s: float
    what: str = ""
    first: bool = False
