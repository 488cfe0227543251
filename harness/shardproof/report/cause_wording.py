"""The wording of a cause on the main page: a headline, the effect on training, and where to look in the library.

    signature: torch-fsdp2 mismatch: save: exp_avg extra, exp_avg_sq extra, step extra
    headline:  Saving created optimizer state: AdamW's step is 1 for 12 parameters that never stepped
    effect:    The first real update is corrected as if it were a later one.
    place:     after operation 1 (save), on ranks 0 and 1

Of a known defect the words are those of its entry in `issues.toml`; of a new one they come from `titles.py` and
`effects.py`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from shardproof.issues.known_issues import KnownIssue
from shardproof.result import Result
from shardproof.wording.effects import effect_of
from shardproof.wording.error_place import place_of
from shardproof.wording.titles import title

CLAUSE = 90
"""Characters from which the headline of a known defect is its first clause alone."""

RANKS = 8
"""How many ranks are listed."""


@dataclass(frozen=True)
class Wording:
    """headline: a sentence without its full stop. effect: sentences; empty where nothing can be said. place: where to
    look, part of a sentence."""

    headline: str
    effect: str
    place: str


def wording_of(result: Result, issues: Sequence[KnownIssue] = ()) -> Wording:
    """A failure in words.

    Args:
        issues: the entries that it is known under.
    """
    if issues:
        return Wording(_known(issues), issues[0].harm, issues[0].library_line)
    return Wording(title(result), effect_of(result), _place(result))


def first_sentence(text: str) -> str:
    """The first sentence of a text, without its full stop."""
    end = re.search(r"\.(?= [A-Z`]|$)", text)
    return text[: end.start()] if end else text


def _known(issues: Sequence[KnownIssue]) -> str:
    """What a known defect is: the first sentence of its entry, less what follows a colon where it is long. An entry
    that only compares itself with another one is told by its effect."""
    first = issues[0]
    told = first_sentence(first.harm if first.what.startswith("The same") and first.harm else first.what)
    clause = re.split(r"[:;] ", told)[0]
    headline = clause if len(told) > CLAUSE and len(clause) >= CLAUSE // 3 else told
    others = len(issues) - 1
    return headline + (f" (and {others} more known defect{'s' * (others > 1)})" if others else "")


def _place(result: Result) -> str:
    """Where a reader looks first."""
    if result.error is not None and not result.differences:
        place = place_of(result.error)
        rank = "" if result.error.rank is None else f"on rank {result.error.rank}"
        return ", ".join(filter(None, [place.full if place else "", rank]))
    if not result.differences:
        return ""
    op = min(d.key.op for d in result.differences)
    ranks = sorted({rank for d in result.differences if d.key.op == op for rank in d.ranks})
    after = f"after operation {op} ({result.kind_of(op) or 'unknown'})"
    return after + (f", on rank{'s' * (len(ranks) > 1)} {_listed(ranks)}" if ranks else "")


def _listed(ranks: Sequence[int]) -> str:
    if len(ranks) > RANKS:
        return f"{', '.join(map(str, ranks[: RANKS - 1]))} and {len(ranks) - RANKS + 1} more"
    return " and ".join(filter(None, [", ".join(map(str, ranks[:-1])), str(ranks[-1])]))
