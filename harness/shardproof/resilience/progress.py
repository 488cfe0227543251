"""Progress of the trials: a bar on a terminal, a line every ten seconds in a log."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self, TextIO

INTERVAL_S = 10.0


class Progress:
    """Shows the trials of one stack after the other, until its block ends."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._last, self._name = stream, time.monotonic(), ""
        self._bar = None
        if stream.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn())
            self._bar = Progress(*columns, TimeRemainingColumn(), console=Console(file=stream), transient=True)
            self._task = self._bar.add_task("", total=None)

    def __enter__(self) -> Self:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._bar:
            self._bar.stop()

    def stack(self, name: str) -> None:
        """The trials of a stack begin."""
        self._name = name
        if self._bar:
            self._bar.reset(self._task, description=name, total=None)

    def resumed(self, name: str, done: int, of: int) -> None:
        """So many trials of a stack had been made by an earlier run."""
        print(f"resuming {name}: {done} of {of} trials done", file=self._stream, flush=True)

    def trials_done(self, done: int, of: int | None) -> None:
        """So many trials of the stack are made, of so many; None where nobody knows it yet."""
        if self._bar:
            self._bar.update(self._task, completed=done, total=of)
        elif time.monotonic() - self._last >= INTERVAL_S or done == of:
            self._last = time.monotonic()
            print(f"{self._name}: {done}{f'/{of}' if of else ''} trials", file=self._stream, flush=True)
