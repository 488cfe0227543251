"""Stores each finished trial of a run in a file, so that an interrupted run continues where it stopped.

    DIR/trials.jsonl    one line of JSON each: who wrote it and what was asked for; a stack that was begun; a trial

A line is written as soon as its trial is made, and a line that is not whole, since the process was killed or the disk
full while it was written, does not count. So whatever ends a run costs the trials that were going on, and no other.
The results database of `run` (`harness/shardproof/store.py`) keeps scenarios and their verdicts, which a trial has not.

A later run with the same seed and number of trials takes over what it finds, if a stack saves as it did: the same
libraries, and a record of the same changes in the same order. A run that had come to its end is not gone on with; the
next one begins anew, as `run` does.

*Does not verify*: that the files of the library are those of before; its releases are compared, not its code.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from shardproof import __version__
from shardproof.errors import NO_SPACE, UsageError
from shardproof.resilience.planned_trials import FinishedTrial
from shardproof.store import StoreFull

NAME = "trials.jsonl"
_FORMAT = 1
_BEGINS = b'{"written_by": "shardproof '


class TrialStore:
    """A folder's trials, open for more. The folder is locked by the caller (`folders.at_work_in`).

    Args:
        asked: what makes two runs one, such as seed and number of trials.

    Raises:
        UsageError: the file is not ours, or cannot be opened. StoreFull: by every method that writes.
    """

    def __init__(self, folder: Path, asked: Mapping[str, Any]) -> None:
        self.path = folder / NAME
        self._asked = dict(asked)
        self._found: dict[tuple[str, str], FinishedTrial] = {}
        self._keys: dict[str, str] = {}

    def __enter__(self) -> Self:
        try:
            self._handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        except OSError as error:
            allowed = f"a folder whose {NAME} can be opened ({error.strerror})"
            raise UsageError.of("--out", str(self.path.parent), allowed, "--out reports/another") from None
        if not self._goes_on(self._lines()):
            self._found, self._keys = {}, {}
            os.ftruncate(self._handle, 0)
            self._write({"written_by": f"shardproof {__version__}", "format": _FORMAT, "asked": self._asked})
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._handle)

    def begun(self, stack: str, key: str) -> dict[str, FinishedTrial]:
        """A stack's trials begin; by label, those that need not be made again.

        Args:
            key: says how the stack saves. Trials of another key do not count.
        """
        if self._keys.get(stack) != key:
            self._write({"stack": stack, "key": key})
            return {}
        return {label: tried for (name, label), tried in self._found.items() if name == stack}

    def add(self, stack: str, tried: FinishedTrial) -> None:
        """A trial was made."""
        self._write({"of": stack, **asdict(tried)})

    def end(self) -> None:
        """Record that every planned trial was made and the reports were written, so that the next run starts anew."""
        self._write({"ended": True})

    def _lines(self) -> Sequence[Mapping[str, Any]]:
        """The whole lines of the file; what lies behind them is cut off.

        Raises:
            UsageError: it is not ours.
        """
        with os.fdopen(os.dup(self._handle), "rb") as file:
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        try:
            lines = [json.loads(line) for line in whole.splitlines()]
        except ValueError:
            raise self._foreign() from None
        if data[: len(_BEGINS)] != _BEGINS[: len(data)]:
            raise self._foreign()
        os.ftruncate(self._handle, len(whole))
        return lines

    def _foreign(self) -> UsageError:
        allowed = f"a folder without {NAME}, or with one that shardproof wrote and nothing damaged"
        return UsageError.of("--out", str(self.path.parent), allowed, "--out reports/another")

    def _goes_on(self, lines: Sequence[Mapping[str, Any]]) -> bool:
        """Take over the trials in a stored file, if the file belongs to an interrupted run with the same seed and
        number of trials."""
        if not lines or (lines[0].get("format"), lines[0].get("asked")) != (_FORMAT, self._asked):
            return False
        for line in lines[1:]:
            if "ended" in line:
                return False
            if "key" in line:
                stack = line["stack"]
                self._keys[stack] = line["key"]
                self._found = {found: tried for found, tried in self._found.items() if found[0] != stack}
            else:
                try:
                    tried = FinishedTrial(**{name: value for name, value in line.items() if name != "of"})
                except TypeError:
                    raise self._foreign() from None
                self._found[line["of"], tried.label] = tried
        return True

    def _write(self, line: Mapping[str, Any]) -> None:
        data = (json.dumps(line) + "\n").encode("ascii")
        end = os.lseek(self._handle, 0, os.SEEK_END)
        try:
            while data:
                data = data[os.write(self._handle, data) :]
        except OSError as error:
            os.ftruncate(self._handle, end)
            if error.errno in NO_SPACE:
                said = f"cannot write to {self.path}: {error.strerror}; the trials before it are kept"
                raise StoreFull(said) from None
            raise
