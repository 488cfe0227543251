"""What commands print, each in a process of its own, all forked from one that has imported the command line.

`python -m tests.golden.command_outputs < COMMANDS` reads a JSON list of argument lists and prints a JSON list of
[exit status, standard output, standard error]. An interpreter for each command would import the same modules
fifty times.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
from typing import Any

COMMAND_LINE = (
    "shardproof.__main__",
    "shardproof.cli.main",
    "shardproof.cli.investigate",
    "shardproof.run",
    "shardproof.laboratory.laboratory",
)


def said(words: list[str]) -> tuple[int, str, str]:
    """Run one command in a forked process."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        child = os.fork()
        if not child:
            _become(words, out.fileno(), err.fileno())
        _, status = os.waitpid(child, 0)
        return os.waitstatus_to_exitcode(status), _text(out), _text(err)


def _become(words: list[str], out: int, err: int) -> None:
    """The command itself: it never returns."""
    os.dup2(out, 1)
    os.dup2(err, 2)
    sys.argv = ["shardproof", *words]
    status: object = 1
    try:
        importlib.import_module("shardproof.__main__").main()
    except SystemExit as end:
        status = end.code
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(int(status) if isinstance(status, int) else 0)


def _text(file: Any) -> str:
    file.seek(0)
    text: str = file.read().decode()
    return text


if __name__ == "__main__":
    for name in COMMAND_LINE:
        importlib.import_module(name)
    json.dump([said(words) for words in json.load(sys.stdin)], sys.stdout)
