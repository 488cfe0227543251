"""Which statement called what ran, and what decided whether a statement ran."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
from line_cases import ran, written
from shardproof.trainer.lines.nested import handed_over, heads_of
from shardproof.trainer.lines.setters import handed_apart

SOURCE = """
def loss(logits, beta):
    if beta > 1:
        return logits
    for part in (1, 2):
        beta = beta * part
    total = logits * beta
    return total

def plain(logits, heat):
    return loss(logits / heat, 0.5)

def fused(logits, heat):
    for _ in range(1):
        pass
    return loss(logits, 0.5)

def train(logits, way):
    result = plain(logits, 2.0) if way == "plain" else fused(logits, 4.0)
    return result
"""


@pytest.fixture
def mine(tmp_path: Path) -> ModuleType:
    return written(tmp_path, SOURCE)


def test_a_head_decides_about_what_it_holds_or_jumps_over(mine: ModuleType) -> None:
    heads = {
        line: [each.line for each in found]
        for (_, line), found in heads_of(ran(partial(mine.train, 3.0, "fused"))).items()
    }
    assert heads[6] == [5, 3, 19]
    assert heads[7] == [3, 19]
    assert heads[16] == [19]
    assert heads[20] == []


def test_an_argument_that_is_handed_over_otherwise_is_told(mine: ModuleType) -> None:
    rows = [ran(partial(mine.train, 3.0, way)) for way in ("plain", "fused")]
    callers = [handed_over(row, ("mine.py", 7), "logits") for row in rows]
    assert [each and each.line for each in callers] == [11, 16]
    assert handed_over(rows[0], ("mine.py", 7), "beta") is None
    assert handed_over(rows[0], ("mine.py", 20), "result") is None
    told = handed_apart([each for each in callers if each], "logits", ("with way=plain", "with way=fused"))
    assert told == (
        " `logits` is an argument there: it is handed over by mine.py:11 (`return loss(logits / heat, 0.5)`) with "
        "way=plain, which reads `heat` = 2.0, and by mine.py:16 (`return loss(logits, 0.5)`) with way=fused."
    )
