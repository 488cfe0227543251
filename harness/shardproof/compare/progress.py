"""A progress bar for a comparison on a terminal, with rate and time left. Without a terminal nothing is printed."""

from __future__ import annotations

from typing import Self, TextIO


class SilentProgress:
    """A progress display that prints nothing, for output that is not a terminal."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def phase(self, what: str, total_bytes: int) -> None:
        """A part of the work begins."""

    def read(self, count: int) -> None:
        """So many more bytes of files were read."""

    def compared(self, count: int) -> None:
        """So many more bytes of tensors were compared."""


class TerminalProgress(SilentProgress):
    """A bar of the bytes that were compared."""

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
        from rich.progress import TransferSpeedColumn as Rate

        columns = (
            TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), Rate(),
            TimeRemainingColumn(),
        )  # fmt: skip
        self._bar = Progress(*columns, console=Console(file=stream), transient=True)
        self._task = self._bar.add_task("reading what there is", total=None)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def phase(self, what: str, total_bytes: int) -> None:
        self._bar.reset(self._task, description=what, total=total_bytes)

    def compared(self, count: int) -> None:
        self._bar.advance(self._task, count)


def progress_on(stream: TextIO) -> SilentProgress:
    """What shows progress on a stream: a bar if it is a terminal, else nothing."""
    return TerminalProgress(stream) if stream.isatty() else SilentProgress()
