"""The command line over servers that answer by heart, so that it can be struck at every call that it makes.

    python -m tests.unit.fire_driver ANSWERS FOLDER

The process runs the command once itself, in FOLDER, so that everything is imported and asked, and then forks itself for
each further run. A request is a line of JSON with the `folder` in which `shardproof run` is given, and whether the
child `waits`, stopped, for a tracer. It gets two lines back: the child's process id, and how it ended.

ANSWERS is a file of what the judges of a real run said (`test_under_fire.recorded`). A child writes the id of each
scenario whose result is stored into `notes`, right after the commit: what is in there may never be lost.
"""

from __future__ import annotations

import base64
import ctypes
import io
import json
import os
import signal
import sys
import tempfile
from collections.abc import Iterable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, NoReturn

from shardproof.__main__ import main
from shardproof.laboratory import laboratory
from shardproof.result import Result
from shardproof.store import Store

WORDS = ("run", "fire.toml", "-j", "1", "--out", "out", "--json", "run.json")
_ALLOW_TRACING, _BY_ANYONE = 0x59616D61, ctypes.c_ulong(-1)
"""Of prctl(2): PR_SET_PTRACER, PR_SET_PTRACER_ANY."""


class AnsweringServer:
    """In the place of `ForkServer`: no process is started."""

    answers: dict[str, str]

    def __init__(self, **options: Any) -> None:
        pass

    def __enter__(self) -> AnsweringServer:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def start(self) -> None:
        pass

    def call(self, target: str, payload: bytes, deadline_s: float) -> bytes:
        return base64.b64decode(self.answers[payload.decode()])


def _noting() -> None:
    """Have each result be noted once it is committed."""
    finish = Store.finished_many

    def finished(self: Store, run_id: str, results: Iterable[Result]) -> None:
        kept = list(results)
        finish(self, run_id, kept)
        handle = os.open("notes", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.write(handle, "".join(f"{result.id}\n" for result in kept).encode())
        os.close(handle)

    Store.finished_many = finished  # type: ignore[method-assign]


def _forked(folder: Path, waits: bool) -> int:
    """A child that gives the command in a folder."""
    child = os.fork()
    if not child:
        _run(folder, waits)
    if waits:
        os.waitpid(child, os.WUNTRACED)
    return child


def _run(folder: Path, waits: bool) -> NoReturn:
    status = 70
    try:
        (folder / "scratch").mkdir(exist_ok=True)
        said = os.open(folder / "said", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(said, 1)
        os.dup2(said, 2)
        if waits:
            ctypes.CDLL(None).prctl(_ALLOW_TRACING, _BY_ANYONE, 0, 0, 0)
            os.kill(os.getpid(), signal.SIGSTOP)
        status = _command(folder)
    finally:
        os._exit(status)


def _command(folder: Path) -> int:
    """Give the command in a folder, in this process; its status."""
    os.chdir(folder)
    scratch = folder / "scratch"
    tempfile.tempdir, laboratory.RAM_DISK = str(scratch), scratch
    sys.argv = ["shardproof", *WORDS]
    try:
        main()
    except SystemExit as end:
        return int(end.code or 0)


def serve() -> None:
    """Answer requests until there are no more."""
    for line in sys.stdin:
        asked = json.loads(line)
        child = _forked(Path(asked["folder"]), asked["waits"])
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    AnsweringServer.answers = json.loads(Path(sys.argv[1]).read_text())
    laboratory.ForkServer = AnsweringServer  # type: ignore[assignment,misc]
    _noting()
    (Path(sys.argv[2]) / "scratch").mkdir(exist_ok=True)
    with redirect_stdout(io.StringIO()):
        _command(Path(sys.argv[2]))
    serve()
