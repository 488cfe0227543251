"""Seconds a Megatron-Core scenario on two ranks of the warm server takes, and whose they are.

Three ways, interleaved in one run: a format without `dist_checkpointing`; one with it, its manager forked from the
rank; the same with the manager started as the library does it, spawned. Then an interpreter that does nothing but
start one such manager. The library's share is the time in its operations (build, step, save, load; our gradient probe
runs inside its forward); ours is forking ranks, joining the group, observing and recording.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from shardproof.emulation.spawn import REAL_SPAWN
from shardproof.scenario import Scenario
from shardproof.world.job import Job, JobOutcome
from shardproof.world.server import ForkServer

from benchmarks.bench_world import scratch_folder
from benchmarks.servers import server_options

PROGRAM = "build step step save build load step"
MANAGER = """
import multiprocessing
import torch
if __name__ == "__main__":
    import time
    start = time.perf_counter()
    multiprocessing.get_context("spawn").Manager()
    print(time.perf_counter() - start)
"""


def bench_scenario(checkpoint: str) -> Scenario:
    """Build, two steps, save, build again, load, step, in bf16 with a distributed optimizer."""
    return Scenario().with_axes(
        {
            "system": "megatron-core", "sharding": "zero1", "dtype": "bf16/master=fp32", "mesh": "1x2x1",
            "optimizer": "adamw/impl=multi_tensor", "checkpoint": checkpoint, "program": PROGRAM,
        }
    )  # fmt: skip


@dataclass
class Way:
    """One way of running the scenario, and what it took."""

    name: str
    scenario: Scenario
    server: ForkServer
    outcomes: list[JobOutcome] = field(default_factory=list)

    def run(self, directory: Path) -> None:
        directory.mkdir()
        outcome = self.server.submit(Job(self.scenario, 0, directory, 120)).result()
        if not outcome.ok:
            raise SystemExit(f"a scenario failed: {outcome}")
        shutil.rmtree(directory)
        self.outcomes.append(outcome)


def measure(ways: Sequence[Way], rounds: int) -> list[float]:
    """Run every way once a round, after a round that does not count; the seconds of a manager's start beside them."""
    numbers, starts = itertools.count(), []
    with scratch_folder() as scratch:
        (scratch / "manager.py").write_text(MANAGER)
        for _ in range(rounds + 1):
            for way in ways:
                way.run(scratch / str(next(numbers)))
            starts.append(_manager_start(scratch / "manager.py"))
    for way in ways:
        del way.outcomes[0]
    return starts[1:]


def _manager_start(script: Path) -> float:
    done = subprocess.run([sys.executable, str(script)], check=True, capture_output=True, text=True)
    return float(done.stdout)


def report(way: Way) -> None:
    wall = statistics.median(outcome.duration_s for outcome in way.outcomes)
    cpu = statistics.median(outcome.cpu_s for outcome in way.outcomes)
    phases: dict[str, float] = {}
    for name in dict(way.outcomes[0].profile):
        phases[name] = statistics.median(dict(outcome.profile).get(name, 0.0) for outcome in way.outcomes)
    library = sum(seconds for name, seconds in phases.items() if name.endswith(" op"))
    print(f"{way.name:34} {wall:6.3f} s, processor {cpu:.3f} s; in the library {100 * library / wall:.0f} %")
    spent = (f"{n.removesuffix(' op')} {1000 * s:.0f}" for n, s in phases.items() if n.endswith(" op") or " " not in n)
    print(f"{'':34} ms: {', '.join(spent)}", flush=True)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, world 2")
    plain, distributed = bench_scenario("dp_zero"), bench_scenario("fully_reshardable")
    with ExitStack() as stack:
        started = server_options(plain)
        warm = stack.enter_context(ForkServer(**started))
        spawning = stack.enter_context(ForkServer(**{**started, "env": {**started["env"], REAL_SPAWN: "1"}}))
        ways = [
            Way("dp_zero", plain, warm),
            Way("fully_reshardable", distributed, warm),
            Way("fully_reshardable, real spawn", distributed, spawning),
        ]
        began = time.perf_counter()
        starts = measure(ways, options.rounds)
    for way in ways:
        report(way)
    print(f"{'a spawned manager by itself':34} {statistics.median(starts):6.3f} s")
    print(f"{options.rounds} rounds in {time.perf_counter() - began:.0f} s, load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
