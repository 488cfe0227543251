"""Progress: counts, time left, and one line now and then where nobody watches."""

from __future__ import annotations

import io
from threading import Event

import report_samples as samples
from shardproof.report.progress import ENOUGH, RECENT, SILENT_S, NowAndThen, Progress, Tally, verdict_of
from shardproof.scenario import Scenario


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


MANY = [samples.passing(n) for n in range(60)]
RESULTS = [samples.passing(0), samples.mismatch(), samples.hang(), samples.unknown()]
ESTIMATES_S = {r.id: seconds for r, seconds in zip(RESULTS, [1.0, 3.0, 4.0, 4.0], strict=True)}


def test_the_time_left_scales_with_how_the_estimates_held_up() -> None:
    clock = Clock()
    tally = Tally({result.id: 1.0 for result in MANY}, clock)
    assert tally.left_s is None
    assert str(tally) == "0/60 scenarios after 0 s: releases and servers are made ready"
    for result in MANY[:ENOUGH]:
        clock.now += 2.0
        tally.add(result)
    assert tally.left_s == 2.0 * (len(MANY) - ENOUGH)
    assert str(tally).startswith("5/60 scenarios, 0.5/s, 1 min 50 s left")


def test_results_are_counted_in_the_words_of_every_report() -> None:
    clock = Clock()
    tally = Tally(ESTIMATES_S, clock)
    for result in RESULTS:
        clock.now += 2000.0
        tally.add(result)
    assert str(tally) == "4/4 scenarios, 1.8/h, 1 new, 1 known, 1 unknown"
    verdicts = Tally(ESTIMATES_S, clock, verdict_of)
    for result in RESULTS:
        verdicts.add(result)
    assert str(verdicts).endswith(", 1 mismatch, 1 hang, 1 unknown")


def test_a_slow_start_promises_no_hours() -> None:
    """Servers start, and releases are installed, before the first result: once, and not for each scenario."""
    clock = Clock()
    tally = Tally({result.id: 0.3 for result in MANY}, clock)
    clock.now = 90.0
    shown = []
    for result in MANY:
        clock.now += 1.0
        tally.add(result)
        shown.append(tally.left_s)
    assert shown[: ENOUGH - 1] == [None] * (ENOUGH - 1)
    assert [round(left) for left in shown[ENOUGH - 1 :] if left is not None] == [*range(55, -1, -1)]


def test_the_time_left_follows_the_load_of_the_machine() -> None:
    clock = Clock()
    tally = Tally({result.id: 1.0 for result in MANY}, clock)
    for result in MANY[:10]:
        clock.now += 600.0
        tally.add(result)
    for result in MANY[10 : 10 + RECENT]:
        clock.now += 1.0
        tally.add(result)
    assert tally.left_s is not None
    assert round(tally.left_s) == len(MANY) - 10 - RECENT


def test_what_must_be_ready_counts_once_and_not_for_the_others() -> None:
    """A release is installed in the middle of a run: it is part of the time left before, and says nothing after."""
    clock = Clock()
    late = MANY[30].id

    def needs(scenario: Scenario) -> list[str]:
        return ["early 1.0", "late 2.0"][: 1 + (scenario.id == late)]

    ready_s = {"early 1.0": 100.0, "late 2.0": 50.0}
    tally = Tally({result.id: 1.0 for result in MANY}, clock, ready_s=ready_s, needs=needs)
    clock.now = 300.0
    for result in MANY[:30]:
        clock.now += 1.0
        tally.add(result)
    assert tally.left_s == 30 + 50
    clock.now += 200.0
    tally.add(MANY[30])
    assert tally.left_s == 29


def test_a_log_gets_a_line_at_most_every_interval_and_one_at_the_end() -> None:
    clock, stream = Clock(), io.StringIO()
    with Progress(ESTIMATES_S, stream, interval_s=10.0, clock=clock) as progress:
        for seconds, result in zip((1.0, 11.0, 12.0, 4000.0), RESULTS, strict=True):
            clock.now = seconds
            progress.finished(result)
    lines = stream.getvalue().splitlines()
    assert len(lines) == 3
    assert lines[0].startswith("2/4 scenarios, 0.2/s, 1 new")
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


class Said(io.StringIO):
    """A stream that tells when something was written to it."""

    def __init__(self) -> None:
        super().__init__()
        self.told = Event()

    def write(self, text: str) -> int:
        written = super().write(text)
        if text.endswith("\n"):
            self.told.set()
        return written


def test_a_log_is_not_silent_while_nothing_finishes() -> None:
    stream = Said()
    with Progress({"a": 1.0}, stream, interval_s=0.001):
        assert stream.told.wait(60)
    first = stream.getvalue().splitlines()[0]
    assert first == "0/1 scenarios after 0 s: releases and servers are made ready"


def test_a_search_says_what_it_runs_once_it_has_been_silent_for_a_while() -> None:
    clock, stream, result = Clock(), io.StringIO(), samples.passing(0)
    told = NowAndThen(stream, clock)
    confirmed = told.before("running", lambda _: result, always=True)
    tried = told.before("trying", lambda _: result)
    assert confirmed(result.scenario) is result
    assert tried(result.scenario) is result
    clock.now += SILENT_S
    assert tried(result.scenario) is result
    assert stream.getvalue() == f"running: {result.scenario}\ntrying: {result.scenario}\n"
    assert NowAndThen(None, clock).before("running", lambda _: result, always=True)(result.scenario) is result
