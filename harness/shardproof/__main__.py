"""`python -m shardproof`, which is the `shardproof` command."""

from __future__ import annotations

import io
import os
import signal
import sys
from contextlib import suppress
from typing import Any, TextIO, cast


class _Forgiving:
    """A stream that nobody has to be able to read: what cannot be written to it, as on a full disk or a terminal that
    is gone, is lost, and the work goes on."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def main() -> None:
    """Run the command line and exit with the contract's status. A SIGTERM is a Ctrl-C.

    What goes to stdout was asked for: if it cannot be written, the status is 3. What goes to stderr is beside it.
    """
    from shardproof.cli.main import entry, unwritten

    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # what it cannot express, such as half a character
    sys.stderr = cast(TextIO, _Forgiving(sys.stderr))
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    status = entry(sys.argv[1:])
    try:
        sys.stdout.flush()
    except OSError as error:
        status = unwritten(error)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python tries once more, and says 120
    sys.exit(status)


if __name__ == "__main__":
    main()
