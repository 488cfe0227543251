"""What a trainer with `fit` has when it has returned, against the run without a break: no update shows what it does
behind its last one, such as loading the best model.

*Verifies*: parameters and buffers that both have under one name. *Does not verify*: what is not
the same in a second run of the same, or what one of the two has alone.
"""

from __future__ import annotations

from shardproof.diff import Difference
from shardproof.trainer.arms import ALIKE, TWICE, Session
from shardproof.trainer.described import BITS, ROUNDING_BF16
from shardproof.trainer.judge.judging import Judging
from shardproof.trainer.lines.lines_of_ways import of_two_ways
from shardproof.trainer.values.notes import END_NOT_SEEN
from shardproof.trainer.values.rounding import At, beyond_rounding, computes_in_half
from shardproof.trainer.values.telling import most_telling, paragraphs
from shardproof.trainer.values.wording import shown


def with_the_end(
    judging: Judging, session: Session, found: list[Difference], sentence: str, ways: tuple[str, str]
) -> tuple[list[Difference], str]:
    """The differences of a session and their sentence or, where nothing differs until the last update, those of the
    moment when `fit` has returned.

    Args:
        ways: what a sentence says of the run without a break and of this one, such as `in the resumed one`.
    """
    ends = [judging.ends.get(each.ops[0].index) for each in (judging.whole, session)]
    whole, own = ends
    if found or whole is None or own is None:
        return found, sentence
    twice = judging.named(TWICE)
    again = judging.ends.get(twice.ops[0].index) if twice else None
    one, other = _in_common(whole.values, own.values, again.values if again else {})
    between, looked_at = judging.between, judging.looked_at
    apart = judging.compare(one, other, session.ops[0].index)
    promise = judging.trainer.alike.get(session.of, BITS) if session.kind == ALIKE else BITS
    if promise != BITS:
        half = promise == ROUNDING_BF16 or computes_in_half(one)
        apart = beyond_rounding(apart, judging.at(judging.whole.first("step")), one, other, half=half).wrong
    judging.between, judging.looked_at = None if apart else between, looked_at
    if not apart:
        return found, sentence
    lines = judging.explained(lambda: of_two_ways(whole.ran, own.ran, ways, "behind the last update"))
    return apart, paragraphs(_told(apart, ways), lines)


def end_not_seen(judging: Judging, session: Session) -> list[str]:
    """A note, where a `fit` came to its end in both sessions and in one of them nothing could be looked at then."""
    both = [each.ops[0].index for each in (judging.whole, session)]
    return [END_NOT_SEEN] if judging.trainer.fits and not all(op in judging.ends for op in both) else []


def _in_common(one: At, other: At, again: At) -> tuple[At, At]:
    """Of the ends of two sessions what can be compared. again: the end of a second run of the one."""
    names = [name for name, value in one.items() if again.get(name, value) == value and name in other]
    return {name: one[name] for name in names}, {name: other[name] for name in names}


def _told(found: list[Difference], ways: tuple[str, str]) -> str:
    one = most_telling(found)
    what = "value of its modules differs" if len(found) == 1 else "values of its modules differ"
    values = f"{shown(one.expected_first)} {ways[0]}, and {shown(one.observed_first)} {ways[1]}"
    return (
        f"After the last update all that is compared is equal, and when `fit` has returned {len(found)} {what}: "
        f"{one.key.role} of {one.key.fqn} is {values} in its first element that differs. Look at what `fit` does "
        "behind its last update, such as loading the best model or putting averages in."
    )
