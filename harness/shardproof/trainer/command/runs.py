"""The runs of a command, each kept in a folder of its own, so that a command that was cut off goes on where it was.

DIR/folder        what stands for {folder} in every run: checkpoints may hold this path
DIR/kept/NAME     what a run left there. DIR/logs/NAME.log: its output
DIR/runs.json     how each run ended, and what was asked for
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from shardproof.report.publish import publish
from shardproof.trainer.command.asked import AskedCommand
from shardproof.trainer.command.checkpoints import Checkpoint, checkpoints_in
from shardproof.trainer.command.process import Ended, run, said_last

WRITTEN_BY = "shardproof trainer --command"


@dataclass(frozen=True)
class Ran:
    """A run that ended. folder: its checkpoints. log: its output. status: the exit status; None after a deadline."""

    name: str
    folder: Path
    log: Path
    status: int | None
    seconds: float

    @property
    def ended_well(self) -> bool:
        return self.status == 0

    @cached_property
    def checkpoints(self) -> list[Checkpoint]:
        """The checkpoints that it left, the newest last."""
        return checkpoints_in(self.folder)

    @property
    def said_last(self) -> str:
        """Why the run failed, as its output says it."""
        return said_last(self.log)


class Runs:
    """Runs a command, and remembers each run.

    Args:
        out: the folder of the results. deadline_s: seconds a run may take. tell: is told of each run that begins.
    """

    def __init__(self, asked: AskedCommand, out: Path, deadline_s: float, tell: Callable[[str], None]) -> None:
        self.asked, self.out, self.deadline_s, self._tell = asked, out, deadline_s, tell
        self._file, self.work = out / "runs.json", out.absolute() / "folder"
        kept = json.loads(self._file.read_text("utf-8")) if self._file.is_file() else {}
        self._ran: dict[str, dict[str, Any]] = kept["runs"] if kept.get("key") == asked.key else {}
        if not self._ran:  # another command's, or of one that came to its end
            self.forget()
        for name in ("kept", "logs"):
            (out / name).mkdir(exist_ok=True)

    def of(
        self, name: str, until: int, *, world: int | None = None, base: Path | None = None, patience: int = 1,
        change: Callable[[Path], None] = lambda folder: None, under: Sequence[str] = (),
    ) -> Ran:  # fmt: skip
        """The run of that name, which is made unless there is one.

        Args:
            world: how many ranks; the first that was asked for without. base: a folder to resume in a copy of.
            patience: how many times the deadline it may take. change: what is done to the copy first. under: words of
                a program that runs the command, such as strace.

        Raises:
            UsageError: the command cannot be started.
        """
        if name not in self._ran:
            world = world or next(iter(self.asked.worlds), None)
            self._tell(f"{name}: {'resumes, ' if base else ''}until {until}{f', on {world} ranks' if world else ''}")
            ended = self._made(name, until, world, base, patience, change, under)
            self._ran[name] = asdict(ended)
            self._write()
        return Ran(name, self._kept(name), self._log(name), **self._ran[name])

    def anew(self, name: str, until: int, base: Path, *, patience: int = 1) -> Ran:
        """A run that resumes in a copy of a folder, made in any case, in the place of an earlier one of that name."""
        world = next(iter(self.asked.worlds), None)
        ended = self._made(name, until, world, base, patience, lambda folder: None, ())
        return Ran(name, self._kept(name), self._log(name), **asdict(ended))

    def _kept(self, name: str) -> Path:
        return self.out / "kept" / name

    def _log(self, name: str) -> Path:
        return self.out / "logs" / f"{name}.log"

    def _made(
        self, name: str, until: int, world: int | None, base: Path | None, patience: int,
        change: Callable[[Path], None], under: Sequence[str],
    ) -> Ended:  # fmt: skip
        for path in (self.work, self._kept(name)):
            shutil.rmtree(path, ignore_errors=True)
        if base is None:
            self.work.mkdir()
        else:
            shutil.copytree(base, self.work, symlinks=True)
            change(self.work)
        found = next(reversed(checkpoints_in(self.work)), None)
        checkpoint = None if base is None else found.path if found else self.work
        words = self.asked.words(self.work, until, world, checkpoint)
        ended = run([*under, *words], self._log(name), self.deadline_s * patience)
        self.work.rename(self._kept(name))
        return ended

    def seconds(self) -> Mapping[str, float]:
        """How long each run took."""
        return {name: one["seconds"] for name, one in self._ran.items()}

    def end(self) -> None:
        """Say that every run was made: the same command begins anew. What the runs left stays until then."""
        self._file.unlink(missing_ok=True)

    def forget(self) -> None:
        """Remove what every run left. Logs stay."""
        self.end()
        for path in (self.work, self.out / "kept"):
            shutil.rmtree(path, ignore_errors=True)

    def _write(self) -> None:
        publish(self._file, json.dumps({"written_by": WRITTEN_BY, "key": self.asked.key, "runs": self._ran}))


def on_stderr(quiet: bool) -> Callable[[str], None]:
    """Tells of each run on the standard error output, unless that is unwanted."""
    return (lambda text: None) if quiet else (lambda text: print(text, file=sys.stderr, flush=True))
