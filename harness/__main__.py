"""`python -m harness` and the `shardproof` command."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line and exit with the contract's status."""
    from harness.cli import entry

    sys.exit(entry(sys.argv[1:]))


if __name__ == "__main__":
    main()
