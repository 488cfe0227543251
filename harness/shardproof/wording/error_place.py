"""Finds in a traceback where inside the library an error was raised, for titles, pages and the terminal.

An assertion without a message says nothing but its place; so the place is what a reader needs first.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from shardproof.ownership import LIBRARY
from shardproof.result import Failure

_SITE = "site-packages/"
_FRAME = re.compile(
    r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>[^\n]+)(?:\n(?P<code>[^\n]*))?', re.MULTILINE
)


@dataclass(frozen=True)
class Place:
    """One frame. file: below site-packages where it lies there. line: its number. code: the line's text, empty where
    the traceback has none."""

    file: str
    line: int
    function: str
    code: str = ""

    @property
    def short(self) -> str:
        """For a title: `_init_optim_state (state_dict.py:612)`."""
        return f"{self.function} ({self.file.rpartition('/')[2]}:{self.line})"

    @property
    def full(self) -> str:
        """For a page: `torch/distributed/checkpoint/state_dict.py:612, in _init_optim_state`."""
        return f"{self.file}:{self.line}, in {self.function}"


def place_of(error: Failure) -> Place | None:
    """The innermost frame of an error, in an installed library other than ours where one of the frames lies there; None
    for a deadline, which nothing raised, and for a traceback without frames."""
    frames = list(frames_of(error))
    installed = [place for path, place in frames if re.search(LIBRARY, path)]
    return next(iter((installed or [place for _, place in frames])[-1:]), None)


def frames_of(error: Failure) -> Iterator[tuple[str, Place]]:
    """The whole path and the place of each frame of an error, the innermost last; none for a deadline."""
    if error.type != "deadline":
        for frame in _FRAME.finditer(error.traceback):
            yield frame["file"], _place(frame)


def _place(frame: re.Match[str]) -> Place:
    file = frame["file"].rpartition(_SITE)[2]
    code = (frame["code"] or "").strip()
    return Place(file, int(frame["line"]), frame["function"].strip(), "" if code.startswith('File "') else code)
