"""A count that grows by more in some steps than in others, as one that an evaluation moves on, too, with the lines that
set it in these steps alone.

*Verifies*: that the count grew so. *Does not verify*: that it should grow by the same number in each step.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

from shardproof.trainer.lines.nested import within
from shardproof.trainer.lines.statements import ENDS, Moment, last_word, unpacked
from shardproof.trainer.values.plain import Numbers

_COUNTS = re.compile(r"(\w*_)?(count(er)?|steps?|updates?|iterations?|iters?)", re.IGNORECASE)

LEAST_STEPS = 3
MOST_GROWN = 8
"""Steps of which a sentence tells by how much a count grew."""


def uneven(numbers: Sequence[Numbers], steps: Sequence[Moment]) -> str:
    """A note on a count, by its name, that grows in each step, and by more in some; empty where there is none.

    Args:
        numbers: after the build and after each step. steps: the steps.
    """
    for name in sorted(numbers[0]) if len(steps) >= LEAST_STEPS and len(numbers) == len(steps) + 1 else ():
        texts = [each.get(name, "") for each in numbers]
        if not _COUNTS.fullmatch(last_word(name)) or not all(text.isdecimal() for text in texts):
            continue
        grown = [int(after) - int(before) for before, after in pairwise(texts)]
        if min(grown) > 0 and len({*grown}) > 1:
            first = f"steps {steps[0].op.iteration} to {steps[0].op.iteration + min(len(grown), MOST_GROWN) - 1}"
            told = f"{name} grows by {', '.join(map(str, grown[:MOST_GROWN]))} in {first}"
            return f"{told}, by more in some than in others{_alone(name, grown, steps)}"
    return ""


def _alone(name: str, grown: Sequence[int], steps: Sequence[Moment]) -> str:
    """Which lines set a count in a step in which it grows by more, and not in one in which it does not, with a colon in
    front; empty where none is known."""
    less, more = grown.index(min(grown)), grown.index(max(grown))
    rows = [_setting(name, steps[at]) for at in (less, more)]
    lines = [*(rows[1] - rows[0])]
    return f": in step {steps[more].op.iteration} {' and '.join(lines[:2])} sets it, too" if lines else ""


def _setting(name: str, moment: Moment) -> Counter[str]:
    """How often each line set a value of that name on the first rank, told with who called."""
    if not moment.ran:
        return Counter()
    data = moment.ran[min(moment.ran)]
    row, found = unpacked(data), Counter[str]()
    for at, where in zip(range(len(row)), within(data), strict=False):
        sets = row[at].kind == ENDS and any(last_word(told.path) == last_word(name) for told in row[at].values)
        if sets and row[at].file:
            by = f", called by {row[where.caller].shown()}," if where.caller >= 0 else ""
            found[f"{row[at].shown()}{by}"] += 1
    return found
