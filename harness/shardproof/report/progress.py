"""Live progress of a run: a bar with rate, time left and failures on a terminal; a line now and then in a log.

The time left comes from the plan's estimates, scaled by how they held up over the last results of this run, and from
what must be ready before the scenarios that are still to come: releases to install, servers to start. How long such a
thing took says nothing about how long the next scenarios take.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Protocol, Self, TextIO

from shardproof.result import Result
from shardproof.scenario import Scenario
from shardproof.verdict import SEVERITY, Standing

if TYPE_CHECKING:
    from rich.progress import Progress as Bar
    from rich.progress import TaskID

NOTHING: Mapping[str, float] = MappingProxyType({})

Clock = Callable[[], float]
Word = Callable[[Result], str]
Needs = Callable[[Scenario], Iterable[str]]

ENOUGH = 5
"""So many results, before a time left is shown: the first say little, above all on a busy machine."""

RECENT = 40
"""So many of the last results say how the estimates hold up now: a machine's load comes and goes."""

_ORDER = (Standing.NEW.value, Standing.KNOWN.value, *(verdict.value for verdict in SEVERITY))


def standing_of(result: Result) -> str:
    """Whether a failure is new or known, as every report of a run counts it."""
    return result.counts_as.value


def verdict_of(result: Result) -> str:
    """The verdict alone, where nothing is compared with what is known."""
    return result.verdict.value


class Tally:
    """Counts and time left; no output.

    * estimates_s: seconds expected for each planned scenario, by id.
    * ready_s: what must be ready for scenarios → seconds expected until it is. needs: what of it a scenario needs.
    * word: under which a result is counted.
    """

    def __init__(
        self, estimates_s: Mapping[str, float], clock: Clock = time.monotonic, word: Word = standing_of,
        ready_s: Mapping[str, float] = NOTHING, needs: Needs = lambda scenario: (),
    ) -> None:  # fmt: skip
        self._estimates_s = dict(estimates_s)
        self._unready_s = dict(ready_s)
        self._needs = needs
        self._planned_s = sum(estimates_s.values())
        self._clock = clock
        self._word = word
        self._began = clock()
        self._expected_s = 0.0
        self._last = self._began
        self.total = len(estimates_s)
        self.done = 0
        self.problems: Counter[str] = Counter()
        self._recent: deque[tuple[float, float]] = deque(maxlen=RECENT)

    def add(self, result: Result) -> None:
        """Count a result."""
        now, expected_s = self._clock(), self._estimates_s.pop(result.id, 0.0)
        waited = [need for need in self._needs(result.scenario) if self._unready_s.pop(need, None) is not None]
        if self.done and not waited:
            self._recent.append((now - self._last, expected_s))
        self._last = now
        self.done += 1
        self._expected_s += expected_s
        self.problems[self._word(result)] += 1

    @property
    def elapsed_s(self) -> float:
        return self._clock() - self._began

    @property
    def rate(self) -> float:
        """Scenarios a second so far."""
        return self.done / self.elapsed_s if self.elapsed_s > 0 else 0.0

    @property
    def left_s(self) -> float | None:
        """Seconds left, as the estimates held up over the last results; None before there are enough of them.

        The time before the first result, and before the first that needed something ready, says nothing of the others:
        servers start in it and libraries are installed, once.
        """
        took_s, expected_s = sum(took for took, _ in self._recent), sum(expected for _, expected in self._recent)
        if len(self._recent) + 1 < ENOUGH or not expected_s:
            return None
        left_s = max(0.0, self._planned_s - self._expected_s)
        return left_s * took_s / expected_s + sum(self._unready_s.values())

    def __str__(self) -> str:
        if self.total and not self.done:
            return f"0/{self.total} scenarios after {_duration(self.elapsed_s)}: releases and servers are made ready"
        left = "" if self.left_s is None else f", {_duration(self.left_s)} left"
        problems = "".join(
            f", {self.problems[word]} {word}" for word in _ORDER if word != Standing.PASS.value and self.problems[word]
        )
        return f"{self.done}/{self.total} scenarios, {_rate(self.rate)}{left}{problems}"


class NowAndThen:
    """Lines for a command that runs one scenario after another, and cannot say how many: what begins now, where nothing
    was said for `SILENT_S`. stream: where they go; nowhere without."""

    def __init__(self, stream: TextIO | None, clock: Clock = time.monotonic) -> None:
        self._stream, self._clock, self._said = stream, clock, clock()

    def say(self, text: str) -> None:
        """Print a line on the stream, and note when."""
        if self._stream is not None:
            print(text, file=self._stream, flush=True)
        self._said = self._clock()

    def now_and_then(self, text: str) -> None:
        """Print a line where nothing was said for `SILENT_S`."""
        if self._clock() - self._said >= SILENT_S:
            self.say(text)

    def before(
        self, word: str, examine: Callable[[Scenario], Result], *, always: bool = False
    ) -> Callable[[Scenario], Result]:
        """`examine`, told of before each call with a word such as `trying`. always: however long ago something was
        said."""

        def told(scenario: Scenario) -> Result:
            if always or self._clock() - self._said >= SILENT_S:
                self.say(f"{word}: {scenario}")
            return examine(scenario)

        return told


SILENT_S = 5.0


class Display(Protocol):
    """Where progress is shown."""

    def update(self, tally: Tally) -> None: ...
    def close(self, tally: Tally) -> None: ...


class Progress:
    """A context around the execution of a plan; `finished` may be called from any thread. stream: where it is shown;
    nowhere without. Every `interval_s` seconds it is shown again, also where nothing has finished: a release that is
    installed, or a server that imports a library, can take minutes."""

    def __init__(
        self, estimates_s: Mapping[str, float], stream: TextIO | None, interval_s: float = 10.0,
        clock: Clock = time.monotonic, word: Word = standing_of,
        ready_s: Mapping[str, float] = NOTHING, needs: Needs = lambda scenario: (),
    ) -> None:  # fmt: skip
        self.tally = Tally(estimates_s, clock, word, ready_s, needs)
        self._lock = threading.Lock()
        self._display: Display | None = None
        self._interval_s, self._over = interval_s, threading.Event()
        if stream is not None:
            terminal = stream.isatty()
            self._display = _TerminalDisplay(stream, self.tally) if terminal else _LogDisplay(stream, interval_s, clock)

    def __enter__(self) -> Self:
        if self._display:
            threading.Thread(target=self._show_again, name="progress", daemon=True).start()
        return self

    def _show_again(self) -> None:
        while not self._over.wait(self._interval_s):
            with self._lock:
                if self._display and not self._over.is_set():
                    self._display.update(self.tally)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        with self._lock:
            if self._display:
                self._display.close(self.tally)

    def finished(self, result: Result) -> None:
        """Count a result and show it."""
        with self._lock:
            self.tally.add(result)
            if self._display:
                self._display.update(self.tally)


class _LogDisplay:
    """One line at most every `interval_s` seconds, and one at the end."""

    def __init__(self, stream: TextIO, interval_s: float, clock: Clock) -> None:
        self._stream, self._interval_s, self._clock = stream, interval_s, clock
        self._last = clock()

    def update(self, tally: Tally) -> None:
        if self._clock() - self._last >= self._interval_s:
            self._last = self._clock()
            print(tally, file=self._stream, flush=True)

    def close(self, tally: Tally) -> None:
        print(f"{tally} in {_duration(tally.elapsed_s)}", file=self._stream, flush=True)


class _TerminalDisplay:
    """A live bar."""

    def __init__(self, stream: TextIO, tally: Tally) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as Bar

        self._bar: Bar = Bar(
            BarColumn(), TextColumn("{task.description}", markup=False), console=Console(file=stream), transient=True
        )
        self._task: TaskID = self._bar.add_task(str(tally), total=tally.total)
        self._bar.start()

    def update(self, tally: Tally) -> None:
        self._bar.update(self._task, completed=tally.done, description=str(tally))

    def close(self, tally: Tally) -> None:
        self._bar.stop()


def _rate(a_second: float) -> str:
    """A rate in the smallest unit of time in which it is no 0.0: a scenario can take minutes."""
    units = (("s", 1), ("min", 60), ("h", 3600))
    unit, seconds = next((each for each in units if a_second * each[1] >= 0.1), units[0])
    return f"{a_second * seconds:.1f}/{unit}"


def _duration(seconds: float) -> str:
    """`45 s`, `12 min 30 s` or `3 h 20 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"
