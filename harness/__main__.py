"""`python -m harness`, which is the `shardproof` command."""

from __future__ import annotations

import io
import signal
import sys


def main() -> None:
    """Run the command line and exit with the contract's status. A SIGTERM is a Ctrl-C."""
    from harness.cli import entry

    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # what it cannot express, such as half a character
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(entry(sys.argv[1:]))


if __name__ == "__main__":
    main()
