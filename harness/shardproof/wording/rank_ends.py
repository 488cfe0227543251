"""How the ranks of a session that failed ended, in sentences: who was where when it struck.

*Rank 1 raised KeyError in operation 1 (`step`) after 0.21 s. Rank 0 was in operation 1 (`step`) when it was killed
after 1.22 s.* Ranks that ended alike at one place share a part of the sentence.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardproof.observe.courses import RankCourse
from shardproof.observe.stacks import told_ranks
from shardproof.result import Result

_BEFORE = {"start": "the start of the process group", "construct": "the set-up of the system"}
"""Stage → what it is called before the first operation."""
_AFTER = {"observe": "the observation of ", "record": "the record of "}
"""Stage → what stands before the name of an operation that is over."""


def told_ends(result: Result) -> str:
    """Sentences about all ranks, the first that failed in front; empty where the result does not say."""
    alike: dict[tuple[bool, str, str, str], list[RankCourse]] = {}
    for course in sorted(result.courses, key=lambda course: (not course.first, course.end_s)):
        alike.setdefault((course.first, course.end, _type(course), place_of_end(result, course)), []).append(course)
    return " ".join(f"{told[0].upper()}{told[1:]}." for told in (_told(result, c) for c in alike.values()))


def end_of(result: Result, course: RankCourse) -> str:
    """How one rank ended, as the words after its name: `raised KeyError in operation 1 (`step`) after 0.21 s`."""
    return _ended(result, [course])


def place_of_end(result: Result, course: RankCourse) -> str:
    """Where in the program a rank ended, with its preposition: `in operation 1 (`step`)`."""
    op, stage, _ = course.marks[-1] if course.marks else (-1, "start", 0.0)
    if op < 0:
        return f"in {_BEFORE.get(stage, 'front of the first operation')}"
    kind = result.kind_of(op)
    return f"in {_AFTER.get(stage, '')}operation {op}" + (f" (`{kind}`)" if kind else "")


def _told(result: Result, courses: Sequence[RankCourse]) -> str:
    return f"{told_ranks(sorted(course.rank for course in courses))} {_ended(result, courses)}"


def _ended(result: Result, courses: Sequence[RankCourse]) -> str:
    course, several = courses[0], len(courses) > 1
    where, when = place_of_end(result, course), _seconds(courses)
    were, they = ("were", "they were") if several else ("was", "it was")
    match course.end:
        case "raised":
            return f"raised {_type(course)} {where} after {when}"
        case "died":
            return f"ended without a word ({course.what}) {where} after {when}"
        case "killed":
            return f"{were} {where} when {they} killed after {when}"
        case "stuck":
            return f"{were} still {where} when the time was up after {when}"
        case _:
            return f"{were} done after {when}"


def _type(course: RankCourse) -> str:
    return course.what.partition(":")[0]


def _seconds(courses: Sequence[RankCourse]) -> str:
    ends = list(dict.fromkeys(f"{course.end_s:.2f} s" for course in sorted(courses, key=lambda c: c.end_s)))
    return ends[0] if len(ends) == 1 else f"{ends[0]} to {ends[-1]}"
