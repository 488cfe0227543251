"""Seconds from the shell to the answer of commands that must not import torch: `--help`, `list`, `plan nightly`."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

COMMANDS = (("--help",), ("list",), ("plan", "smoke"), ("plan", "nightly"))
RUNS = 5


def main() -> None:
    """Measure and print."""
    for command in COMMANDS:
        taken = []
        for _ in range(RUNS):
            began = time.perf_counter()
            subprocess.run([sys.executable, "-m", "shardproof", *command], check=True, stdout=subprocess.DEVNULL)
            taken.append(time.perf_counter() - began)
        print(f"shardproof {' '.join(command):<14} {statistics.median(taken):.2f} s (best {min(taken):.2f})")


if __name__ == "__main__":
    main()
