"""The figures of the page: the geometry says what the data says."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import report_samples as samples
from shardproof.diff import RUNS, Difference, diff
from shardproof.observe.logical import Key, Value
from shardproof.program import PROGRAMS, expand
from shardproof.report.figures import timeline, timings, ulp_bars
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
