"""The figures of the page: the geometry says what the data says."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import report_samples as samples
from shardproof.diff import RUNS, Difference, diff
from shardproof.observe.courses import RankCourse
from shardproof.observe.logical import Key, Value
from shardproof.program import PROGRAMS, expand
from shardproof.report.figures import courses, timeline, timings, ulp_bars
from shardproof.result import FailedOp

UP = Key(8, "live", "param", "up.weight")  # shape (16, 7) in the model `dense`


def differing_at(*at: int, elements: int = 112) -> Difference:
    expected = np.zeros(elements, np.float32)
    observed = expected.copy()
    observed[list(at)] = 1
    shape = (16, 7) if elements == 112 else (elements,)
    values = (Value("fp32", shape, side.tobytes()) for side in (expected, observed))
    (found,) = diff({UP: next(values)}, {UP: next(values)})
    return found


def test_runs_are_the_deviating_elements() -> None:
    assert differing_at(0).runs == ((0, 1),)
    assert differing_at(3, 4, 5, 9, 110, 111).runs == ((3, 3), (9, 1), (110, 2))
    assert differing_at(*range(112)).runs == ((0, 112),)
    assert len(differing_at(*range(0, 1000, 2), elements=1000).runs) == RUNS


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_operation_has_its_place_in_the_timeline(program: str) -> None:
    result = replace(samples.crash(), scenario=samples.scenario(program=program, mesh="1x2x1", load="grow"))
    figure = timeline(result)
    assert figure is not None
    assert [box.op for box in figure.boxes] == list(expand(result.scenario))
    assert len({box.x for box in figure.boxes}) == len(figure.boxes)
    assert [box.op.index for box in figure.boxes if box.state == "failed"] == [3]
    for span in figure.sessions:
        assert span.x + span.width <= figure.width


def test_the_course_of_each_rank_is_a_row_and_order_is_kept() -> None:
    figure = courses(samples.struck())
    assert figure is not None
    assert [row.course.rank for row in figure.rows] == list(range(6))
    raised, first, killed, *_ = figure.rows
    assert [(bar.kind, bar.text) for bar in first.bars] == [
        ("before", "start: 0.010 s to 0.020 s"), ("before", "set-up: 0.020 s to 0.050 s"),
        ("op", "0 build: 0.050 s to 0.060 s"), ("ours", "state after 0 build: 0.060 s to 0.080 s"),
        ("op", "1 step: 0.080 s to 0.200 s"), ("ours", "state after 1 step: 0.200 s to 0.210 s"),
    ]  # fmt: skip
    for row in figure.rows:
        for before, after in pairwise(row.bars):
            assert before.x + before.width == pytest.approx(after.x)
    assert first.bars[-1].x + first.bars[-1].width == pytest.approx(figure.struck)
    assert figure.struck < raised.bars[-1].x + raised.bars[-1].width < 100
    assert killed.bars[-1].x + killed.bars[-1].width == pytest.approx(100)
    assert min(bar.width for row in figure.rows for bar in row.bars) > 1, "milliseconds can be seen beside seconds"
    assert not figure.cut
    labels = [bar.label for bar in first.bars]
    assert labels == ["start", "set-up", "0 build", "", "1 step", ""], "the page draws those that fit"


def test_no_course_at_all_and_one_without_marks_have_their_figure() -> None:
    assert courses(samples.crash()) is None
    figure = courses(replace(samples.crash(), courses=(RankCourse(0, (), "died", 0.0, "exit 1", first=True),)))
    assert figure is not None
    assert figure.rows[0].bars == ()
    late = RankCourse(0, ((9, "op", 3.0),), "stuck", 20.0)
    assert courses(replace(samples.crash(), courses=(late,))).cut  # type: ignore[union-attr]


def test_states_of_operations() -> None:
    figure = timeline(replace(samples.mismatch(), failed_op=FailedOp(7, "build")))
    assert figure is not None
    assert [box.state for box in figure.boxes] == ["ok"] * 7 + ["failed", "differs", "after"]
    assert "failed at 7 build" in figure.caption


def test_timing_counts_everything_that_ran_once() -> None:
    seconds = [0.0, 0.01, 0.02, 0.5, 100.0]
    results = [replace(samples.passing(n), duration_s=s) for n, s in enumerate(seconds)]
    (figure,) = timings(samples.report(*results, samples.unsupported()))
    assert sum(bar.count for bar in figure.bars) == len(seconds)
    assert (figure.median_s, figure.slowest_s) == (0.02, 100.0)
    assert max(bar.share for bar in figure.bars) == 1


def test_ulp_bars_are_shares_of_the_tallest() -> None:
    bars = ulp_bars(samples.mismatch().differences[2])
    assert [bar.label for bar in bars] == ["1", "2-3", "512-1023", "nan"]
    assert bars[1].share == 1
    assert ulp_bars(samples.mismatch().differences[0]) == ()
