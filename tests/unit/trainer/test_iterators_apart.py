"""What a resumed run does once more that the run without a break did in an earlier step, as to make an iterator."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
from line_cases import ran, step, written
from shardproof.trainer.lines.lines_apart import apart_in, sentence
from shardproof.trainer.lines.statements import Moment

SOURCE = """
class Source:
    def __init__(self, items):
        self.items = items

    def shard(self, rank):
        return Source(self.items[rank::2])

    def __iter__(self):
        yield from self.items

class Skip:
    def __init__(self, source, count):
        self.source, self.count = source, count

    def shard(self, rank):
        return self

    def __iter__(self):
        for at, item in enumerate(self.source):
            if at >= self.count:
                yield item

def split(source, rank):
    yield from source.shard(rank)

class Mine:
    def __init__(self, source):
        self.iterator, self.lazy, self.start = split(source, 0), None, 0

    def step(self):
        item = next(self.iterator)
        return item

    def lazily(self):
        if self.lazy is None:
            order = list(range(self.start, 8))
            self.lazy = iter(order[::2])
        item = next(self.lazy)
        return item
"""
WAYS = "the whole run", "the resumed one"


def told(tmp_path: Path, method: str, *, start: int = 1) -> str:
    """Where a run that has come to step 1 without a break parts from one that resumes there."""
    mine = written(tmp_path, SOURCE)
    whole, resumed = _of(mine), _of(mine)
    resumed.iterator, resumed.start = mine.split(mine.Skip(mine.Source(range(8)), start), 0), 2 * start
    ops = [step(index) for index in (0, 1)]
    first = [Moment(op, {0: ran(getattr(whole, method))}) for op in ops]
    second = [Moment(ops[1], {0: ran(getattr(resumed, method))})]
    apart = apart_in(first[-1].ran, second[-1].ran)
    return sentence(*apart, WAYS, (first, second)) if apart else ""


def _of(mine: ModuleType) -> object:
    return mine.Mine(mine.Source(range(8)))


def test_an_iterator_that_is_made_anew_is_held_against_the_first(tmp_path: Path) -> None:
    text = told(tmp_path, "step")
    assert text.endswith(
        "An iterator is made anew in the resumed one. Held against what the whole run did from where mine.py:25 "
        "(`yield from source.shard(rank)`) ran last before, in step 0: in the resumed one it goes on with mine.py:17 "
        "(`return self`), and there with mine.py:7 (`return Source(self.items[rank::2])`)."
    )


@pytest.mark.parametrize("start", [1, 2])
def test_what_is_made_when_it_is_needed_is_held_against_the_first(tmp_path: Path, start: int) -> None:
    text = told(tmp_path, "lazily", start=start)
    assert "mine.py:36 (`if self.lazy is None:`)" in text
    assert (
        "ran last before, in step 0: mine.py:37 (`order = list(range(self.start, 8))`) reads `self.start`, which is"
        in text
    )
    assert f"which is {2 * start} in the resumed one and 0 there" in text


def test_nothing_is_held_against_what_does_the_same(tmp_path: Path) -> None:
    assert "Held against" not in told(tmp_path, "lazily", start=0)
