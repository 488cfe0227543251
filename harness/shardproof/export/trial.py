"""Runs an exported script as its reader will: in an interpreter that cannot import shardproof.

A script is run once as it is, and must fail: it ends with status 1 and has printed what it expected and what it saw.
With a cure it is run on a copy of the library, and must end with status 0. The copy is made of links, so that a library
of gigabytes is copied in no time: only the files that a cure changes are files of their own, in folders of their own.

*Verifies*: that a script shows what it says, here. *Does not verify*: that it does so on another machine.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

LIMIT_S = 600.0
FAILED, PASSED = 1, 0

_GUARD = """\
import sys


class NotHere:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "shardproof":
            raise ImportError(f"{name}: this interpreter has the library under test alone")


sys.meta_path.insert(0, NotHere())
"""


@dataclass(frozen=True)
class ScriptOutcome:
    """How a script ended. status: its exit status, -1 where the time was up. said: what it printed. errors: the end of
    what it wrote to stderr."""

    status: int
    said: str
    errors: str

    @property
    def shows(self) -> bool:
        """Whether it failed as it should, with a sentence."""
        return self.status == FAILED and "expected" in self.said

    def raises(self, message: str) -> bool:
        """Whether it says the error of that message; numbers, what is quoted and the names of our own classes may
        differ."""
        first = message.strip().partition("\n")[0]
        words = [word for word in re.findall(r"[A-Za-z_]{3,}", first) if "Probe" not in word]
        return all(word in self.said for word in words[:6])

    @property
    def passes(self) -> bool:
        """Whether the script ran to its end and its comparison found equal values, as after a cure."""
        return self.status == PASSED and "expected" in self.said

    @property
    def ending(self) -> str:
        """How it ended, for a reader: what it printed last, on a failure what a rank that saw it did; else the last
        line of its errors."""
        lines = [line for line in (self.said.strip() or self.errors.strip()).splitlines() if line.strip()]
        if self.status == FAILED:
            lines = [line for line in lines if "observed" in line] or lines
        return f"status {self.status}: {lines[-1][:300] if lines else 'it printed nothing'}"


def run(script: Path, python: str, paths: Sequence[Path], sources: Mapping[str, str] | None = None) -> ScriptOutcome:
    """Run a script in a clean interpreter.

    Args:
        paths: where the library lies that the interpreter has not, first on the path; for a library that it has, the
            folder with its packages. sources: path below `paths` → the text that a cure gives the file there.
    """
    with tempfile.TemporaryDirectory(prefix="shardproof-export-") as folder:
        guard, copy, work = Path(folder, "guard"), Path(folder, "copy"), Path(folder, "work")
        guard.mkdir()
        (guard / "sitecustomize.py").write_text(_GUARD, "utf-8")
        work.mkdir()
        for file in script.parent.glob("*.py"):
            (work / file.name).write_text(file.read_text("utf-8"), "utf-8")
        for name, text in (sources or {}).items():
            cured_copy(copy, paths, name, text)
        search = [guard, *([copy] if sources else []), *paths]
        return _ran([python, script.name], work, {"PYTHONPATH": os.pathsep.join(map(str, search))})


def cured_copy(copy: Path, paths: Sequence[Path], name: str, text: str) -> None:
    """Give the copy of a library another text at `name`, with links to everything beside it."""
    origin = next(path for path in paths if (path / name).is_file())
    folder = copy
    for part in Path(name).parts[:-1]:
        folder, origin = folder / part, origin / part
        folder.mkdir(parents=True, exist_ok=True)
        compiled = folder / "__pycache__"  # else every rank would compile what lies beside the changed file
        compiled.mkdir(exist_ok=True)
        for entry in [*origin.iterdir(), *origin.glob("__pycache__/*.pyc")]:
            link = (compiled if entry.suffix == ".pyc" else folder) / entry.name
            if not link.exists():
                link.symlink_to(entry)
        following = folder / Path(name).parts[len(folder.relative_to(copy).parts)]
        following.unlink(missing_ok=True) if following.is_symlink() else None
    (folder / Path(name).name).write_text(text, "utf-8")


def _ran(command: Sequence[str], folder: Path, environment: Mapping[str, str]) -> ScriptOutcome:
    """Run a command in a session of its own, and kill the whole process group when the time limit is reached."""
    own = {key: value for key, value in os.environ.items() if not key.startswith(("SHARDPROOF_", "PYTHON"))}
    with tempfile.TemporaryFile("w+") as said, tempfile.TemporaryFile("w+") as errors:
        started = subprocess.Popen(
            command, cwd=folder, env={**own, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", **environment},
            stdin=subprocess.DEVNULL, stdout=said, stderr=errors, start_new_session=True,
        )  # fmt: skip
        try:
            status = started.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            status = -1
        with suppress(ProcessLookupError):  # what it started may live on, as the manager of a writer's queue does
            os.killpg(started.pid, signal.SIGKILL)
        started.wait()
        texts = []
        for file in (said, errors):
            file.seek(0)
            texts.append(file.read())
    own_paths = f"{folder}{os.sep}"  # a reader has no use for where we ran it
    return ScriptOutcome(status, texts[0].replace(own_paths, ""), texts[1][-4000:].replace(own_paths, ""))
