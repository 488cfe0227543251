"""`python -m harness`, which is the `shardproof` command."""

from __future__ import annotations

import signal
import sys


def main() -> None:
    """Run the command line and exit with the contract's status. A SIGTERM is a Ctrl-C."""
    from harness.cli import entry

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(entry(sys.argv[1:]))


if __name__ == "__main__":
    main()
