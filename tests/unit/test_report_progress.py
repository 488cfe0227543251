"""Progress: counts, time left, and one line now and then where nobody watches."""

from __future__ import annotations

import io

import report_samples as samples

from harness.report.progress import Progress, Tally


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


RESULTS = [samples.passing(0), samples.mismatch(), samples.hang(), samples.unknown()]
ESTIMATES_S = {r.id: seconds for r, seconds in zip(RESULTS, [1.0, 3.0, 4.0, 4.0], strict=True)}


def test_the_time_left_scales_with_how_the_estimates_held_up() -> None:
    clock = Clock()
    tally = Tally(ESTIMATES_S, clock)
    assert tally.left_s is None
    assert str(tally) == "0/4 scenarios, 0.0/s"
    clock.now = 8.0
    tally.add(RESULTS[0])
    tally.add(RESULTS[1])
    assert tally.left_s == 16.0
    assert str(tally) == "2/4 scenarios, 0.2/s, 16 s left, 1 failed"
    clock.now = 8000.0
    tally.add(RESULTS[2])
    tally.add(RESULTS[3])
    assert str(tally) == "4/4 scenarios, 0.0/s, 0 s left, 1 failed, 1 known, 1 unknown"


def test_a_log_gets_a_line_at_most_every_interval_and_one_at_the_end() -> None:
    clock, stream = Clock(), io.StringIO()
    with Progress(ESTIMATES_S, stream, interval_s=10.0, clock=clock) as progress:
        for seconds, result in zip((1.0, 11.0, 12.0, 4000.0), RESULTS, strict=True):
            clock.now = seconds
            progress.finished(result)
    lines = stream.getvalue().splitlines()
    assert len(lines) == 3
    assert lines[0].startswith("2/4 scenarios, 0.2/s, 22 s left")
    assert lines[-1].endswith("in 1 h 06 min")


def test_a_terminal_gets_a_bar_that_leaves_nothing_behind() -> None:
    stream = Terminal()
    with Progress(ESTIMATES_S, stream) as progress:
        for result in RESULTS:
            progress.finished(result)
    assert "4/4 scenarios" in stream.getvalue()


def test_nothing_planned() -> None:
    stream = io.StringIO()
    with Progress({}, stream):
        pass
    assert stream.getvalue().startswith("0/0 scenarios")
