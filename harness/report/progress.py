"""Live progress of a run: a bar with rate, time left and failures on a terminal; a line now and then in a log.

The time left comes from the plan's estimates, scaled by how the estimates have held up so far in this run.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self, TextIO

from harness.result import Result
from harness.verdict import Verdict

if TYPE_CHECKING:
    from rich.progress import Progress as Bar
    from rich.progress import TaskID

Clock = Callable[[], float]


class Tally:
    """Counts and time left; no output.

    estimates_s: seconds expected for each planned scenario, by id.
    """

    def __init__(self, estimates_s: Mapping[str, float], clock: Clock = time.monotonic) -> None:
        self._estimates_s = dict(estimates_s)
        self._planned_s = sum(estimates_s.values())
        self._clock = clock
        self._began = clock()
        self._expected_s = 0.0
        self.total = len(estimates_s)
        self.done = 0
        self.failures = 0
        self.known = 0
        self.unknown = 0

    def add(self, result: Result) -> None:
        """Count a result."""
        self.done += 1
        self._expected_s += self._estimates_s.pop(result.id, 0.0)
        if result.verdict is Verdict.UNKNOWN:
            self.unknown += 1
        elif result.known_issue is not None:
            self.known += 1
        elif result.verdict.is_failure:
            self.failures += 1

    @property
    def elapsed_s(self) -> float:
        return self._clock() - self._began

    @property
    def rate(self) -> float:
        """Scenarios a second so far."""
        return self.done / self.elapsed_s if self.elapsed_s > 0 else 0.0

    @property
    def left_s(self) -> float | None:
        """Seconds left; None before anything is known."""
        if self._expected_s <= 0:
            return None
        return max(0.0, self._planned_s - self._expected_s) * self.elapsed_s / self._expected_s

    def __str__(self) -> str:
        left = "" if self.left_s is None else f", {_duration(self.left_s)} left"
        problems = "".join(
            f", {n} {what}"
            for n, what in ((self.failures, "failed"), (self.known, "known"), (self.unknown, "unknown"))
            if n
        )
        return f"{self.done}/{self.total} scenarios, {self.rate:.1f}/s{left}{problems}"


class Display(Protocol):
    """Where progress is shown."""

    def update(self, tally: Tally) -> None: ...
    def close(self, tally: Tally) -> None: ...


class Progress:
    """A context around the execution of a plan; `finished` may be called from any thread."""

    def __init__(
        self, estimates_s: Mapping[str, float], stream: TextIO, interval_s: float = 10.0, clock: Clock = time.monotonic
    ) -> None:
        self.tally = Tally(estimates_s, clock)
        self._lock = threading.Lock()
        self._display: Display = (
            _TerminalDisplay(stream, self.tally) if stream.isatty() else _LogDisplay(stream, interval_s, clock)
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            self._display.close(self.tally)

    def finished(self, result: Result) -> None:
        """Count a result and show it."""
        with self._lock:
            self.tally.add(result)
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


def _duration(seconds: float) -> str:
    """`45 s`, `12 min 30 s` or `3 h 20 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"
