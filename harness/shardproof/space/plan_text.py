"""A plan as plain text: what would run, how much it covers, what was left out and why, how long it takes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from shardproof.space.coverage import Coverage
from shardproof.space.plan import Plan
from shardproof.space.plan_heads import Head
from shardproof.space.preparation import NOTHING, Preparation
from shardproof.space.walk import Walked

WIDTH = 110
SHOWN_VALUES = 40


def render_plan(plan: Plan, heads: Sequence[Head] = (), ready: Preparation = NOTHING) -> str:
    """The plan for a terminal, lines of up to about 110 characters. heads: those among its versions. ready: what has to
    be ready first."""
    seconds = sum(plan.seconds.values()) + sum(ready.seconds.values())
    part = "" if plan.shard[1] == 1 else f" (shard {plan.shard[0]} of {plan.shard[1]})"
    lines = [f"{len(plan.scenarios)} scenarios{part}, about {duration(seconds)} with two at once"]
    lines += [*_ready(ready), *_shrinking(plan)]
    for head in heads:
        lines += _head(head)
    if heads:
        lines += [f"  {line}" for line in COUNTED]
    walks_of = Counter((walked.walk.system, walked.walk.version) for walked in plan.walked)
    for walked in plan.walked:
        alone = walks_of[walked.walk.system, walked.walk.version] == 1
        lines += ["", *_walked(walked, plan.estimate_all_s(walked.supported), alone=alone)]
    lines += ["", "scenarios by axis value", *_counts(plan)]
    if plan.unsupported:
        lines += ["", "unsupported: planned, run as such, never counted as covered"]
        lines += _table((number, f"{system}: {reason}") for (system, reason), number in plan.unsupported.items())
    if plan.excluded:
        lines += ["", "excluded: combinations of axis values that are impossible or repeat a scenario"]
        lines += _table((number, reason) for reason, number in plan.excluded.items())
    return "\n".join(lines) + "\n"


def _ready(ready: Preparation) -> Iterator[str]:
    if releases := ready.installs_s:
        number = f"{len(releases)} releases have" if len(releases) > 1 else "1 release has"
        head = f"  {number} to be installed first, about {duration(sum(releases.values()))} of it: "
        yield from _wrapped(head, list(releases), hanging=4)
    if servers := ready.servers_s:
        number = f"{len(servers)} servers have" if len(servers) > 1 else "1 server has"
        yield f"  {number} to import a library before the first ranks, about {duration(sum(servers.values()))} of it"


def _shrinking(plan: Plan) -> Iterator[str]:
    if limit_s := max(plan.shrink_s.values(), default=0):
        yield f"  not counted: the search for a simpler scenario of each new cause, up to {duration(limit_s)} each"


def duration(seconds: float) -> str:
    """Seconds for a reader: `42 s`, `12 min`, `3 h 20 min`."""
    minutes = round(seconds / 60)
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"


COUNTED = (
    "counted are the sessions of the ranks, as measured on the newest release, with a usual share of repetitions;",
    "not counted: repeating what is new on a head, some seconds to a minute for each new cause",
)
"""What the estimate of a plan with heads holds, and what not."""


def _head(head: Head) -> Iterator[str]:
    gone = sum(head.refused.values())
    lost = f"its version refuses {gone} of {head.planned} scenarios" if gone else "its version refuses none of them"
    yield f"{head.name}: it calls itself {head.called}; {lost}; ready in {duration(head.ready_s)}"
    yield from _table((number, reason) for reason, number in head.refused.items())


def _walked(walked: Walked, seconds: float, *, alone: bool) -> Iterator[str]:
    """The name, size and coverage of a walk. alone: whether its system has no other walk in the plan."""
    walk = walked.walk
    part, plain, _ = walk.part.partition("/")
    name = f"{walk.system}@{walk.version}" if walk.version else walk.system
    name += f", part {part}" if part else "" if alone else ", the main walk"
    name += ", a small sample without cures" * bool(plain)
    budget = f" of {duration(walk.budget_s)}" if walk.budget_s else ""
    yield f"{name}: {len(walked.supported)} of {walked.valid:,} valid scenarios, about {duration(seconds)}{budget}"
    supported, refused, excluded = walked.cells
    if supported + refused:
        yield (
            f"  exhaustive over {' x '.join(walk.exhaustive)}: {supported} combinations"
            f" ({refused} more unsupported, {excluded} excluded)"
        )
    for each in walked.coverages:
        yield f"  {_coverage(each, walk.three_way)}"


def _coverage(each: Coverage, three_way: tuple[str, ...]) -> str:
    partial = set(each.axes) <= set(three_way)
    where = f"over {', '.join(each.axes)}" if partial else f"over all {len(each.axes)} axes"
    share = "complete" if each.complete else f"{100 * each.covered / each.feasible:.0f} %"
    return f"{each.strength}-way coverage {where}: {each.covered:,} of {each.feasible:,} ({share})"


def _counts(plan: Plan) -> Iterator[str]:
    for axis in plan.varied_axes:
        counts = plan.counts(axis)
        shown = [f"{value or 'none'} {number}" for value, number in list(counts.items())[:SHOWN_VALUES]]
        yield from _wrapped(f"  {axis:<22}", shown)
        if len(counts) > SHOWN_VALUES:
            yield f"  {'':<22}and {len(counts) - SHOWN_VALUES} values more"


def _wrapped(head: str, items: list[str], hanging: int | None = None) -> Iterator[str]:
    """Items after a head, separated by commas and continued under themselves, or so many blanks in; items are never
    split."""
    line = head
    for position, item in enumerate(items):
        text = item + ("," if position < len(items) - 1 else "")
        if line.strip() and len(line) + 1 + len(text) > WIDTH and line != head:
            yield line.rstrip()
            line = " " * (len(head) if hanging is None else hanging)
        line += text + " "
    yield line.rstrip()


def _table(rows: Iterable[tuple[int, str]]) -> Iterator[str]:
    for number, reason in sorted(rows, key=lambda row: (-row[0], row[1])):
        yield f"  {number:>7,}  {reason}"
