"""Seconds a cell of a trainer, against a scenario of the system that does the same steps, interleaved in one run.

Both save after two steps, go on for two more, start fresh ranks, load, save once more and step twice. What a command
costs before its first result is taken off: eleven of them, less one, are ten.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TRAINER = Path(__file__).with_name("fsdp2_trainer.py")
PROGRAM = "build step step save step step restart build load save step step"
MANY, ROUNDS = 11, 3
SCENARIOS = """
schema = 1
[space]
strength = "all"
[system.torch-fsdp2]
[axes]
mesh = ["1x2x1"]
model = ["dense"]
optimizer = ["adamw/impl=forloop"]
program = ["{program}"]
seed = [{seeds}]
"""


def taken(*command: str) -> float:
    """Seconds that a command of shardproof takes, one scenario at a time."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        line = [sys.executable, "-m", "shardproof", *command, "-j", "1", "-q", "--out", folder]
        subprocess.run(line, check=True, stdout=subprocess.DEVNULL)
        return time.perf_counter() - began


def of_trainer(count: int) -> float:
    """Seconds for so many cells of the trainer."""
    cells = ",".join(map(str, range(count)))
    return taken("trainer", str(TRAINER), "--set", f"cell={cells}", "--program", "arms 2 2 resumed")


def of_system(count: int) -> float:
    """Seconds for so many scenarios of the system."""
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
        file.write(SCENARIOS.format(program=PROGRAM, seeds=",".join(map(str, range(count)))))
        file.flush()
        return taken("run", file.name)


def main() -> None:
    """Measure and print."""
    rounds = [[(of(MANY) - of(1)) / (MANY - 1) for of in (of_system, of_trainer)] for _ in range(ROUNDS)]
    system, trainer = map(statistics.median, zip(*rounds, strict=True))
    print(f"torch-fsdp2, a scenario of two sessions  {system:.2f} s")
    print(f"a trainer's cell, the same two sessions  {trainer:.2f} s, {trainer / system:.2f} times that")


if __name__ == "__main__":
    main()
