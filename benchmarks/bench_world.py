"""Seconds a scenario through three ways of starting ranks, interleaved in one run, and where ours go.

(a) torch's MultiProcessTestCase: fresh processes a test. (b) torch's MultiProcContinuousTest in steady state: the same
processes for all tests, no isolation. (c) the fork server: fresh processes a scenario, forked from a warm one, `-j`
scenarios at once. Rank code, scenario and environment are the same in all three.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from shardproof.scenario import Mesh, Scenario
from shardproof.world.job import Job, JobOutcome
from shardproof.world.server import DETERMINISM, ForkServer

PROGRAM = "build step step save build load step"
ROOT = Path(__file__).resolve().parents[1]
WARM_UP = ["shardproof.systems.torch_fsdp2.rank:warm_up"]
RAM_DISK = Path("/dev/shm")


def bench_scenario(world: int) -> Scenario:
    """Shard, two steps, save, shard again, load, step."""
    return Scenario(system="torch-fsdp2", model="dense", mesh=Mesh(1, world, 1), program=PROGRAM)


class UpstreamCase:
    """One of torch's test classes in a process of its own, told to run one test at a time."""

    def __init__(self, kind: str, world: int, scratch: Path) -> None:
        environment = {
            **os.environ,
            **DETERMINISM,
            "PYTHONPATH": f"{ROOT}:{ROOT / 'harness'}",
            "BENCH_WORLD": str(world),
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.world_cases", kind, str(world), str(scratch)],
            env=environment,
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def run(self) -> float:
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write("run\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit("torch's test class failed; run it by hand: python -m benchmarks.world_cases")
        return float(line)

    def close(self) -> None:
        self.process.communicate()


class OurServer:
    """The fork server with a number of scenarios in progress at once."""

    def __init__(self, world: int, scratch: Path, server: ForkServer) -> None:
        self.scenario = bench_scenario(world)
        self.scratch, self.server, self.numbers = scratch, server, itertools.count()
        self.outcomes: list[JobOutcome] = []

    def run(self, jobs: int, scenarios: int, *, cold: bool = False) -> float:
        start = time.perf_counter()
        with ThreadPoolExecutor(jobs) as threads:
            outcomes = list(threads.map(lambda _: self._one(cold=cold), range(scenarios)))
        self.outcomes += [] if cold else outcomes
        return (time.perf_counter() - start) / scenarios

    def _one(self, *, cold: bool) -> JobOutcome:
        directory = self.scratch / f"ours{next(self.numbers)}"
        directory.mkdir()
        outcome = self.server.submit(Job(self.scenario, 0, directory, 120, cold=cold)).result()
        if not outcome.ok:
            raise SystemExit(f"a scenario failed: {outcome}")
        shutil.rmtree(directory)
        return outcome


@contextmanager
def scratch_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=RAM_DISK if RAM_DISK.is_dir() else None) as folder:
        yield Path(folder)


def measure(world: int, rounds: int, server: ForkServer) -> None:
    jobs_tried = (1, 2, 3, 4)
    with scratch_folder() as scratch:
        spawn, reuse = (UpstreamCase(kind, world, scratch) for kind in ("spawn", "reuse"))
        ours = OurServer(world, scratch, server)
        for _ in range(3):
            reuse.run()  # past its start and its caches' first misses
        ours.run(2, 2)
        ours.outcomes.clear()
        seconds: dict[str, list[float]] = {}
        for _ in range(rounds):
            seconds.setdefault("per-test spawn (a)", []).append(spawn.run())
            seconds.setdefault("reused processes (b)", []).extend(reuse.run() for _ in range(5))
            for jobs in jobs_tried:
                seconds.setdefault(f"fork server -j{jobs}", []).append(ours.run(jobs, 2 * jobs))
            seconds.setdefault("cold ranks -j2", []).append(ours.run(2, 4, cold=True))
        spawn.close()
        reuse.close()
    report(world, {name: statistics.median(values) for name, values in seconds.items()})
    profile(ours.outcomes)


def report(world: int, medians: dict[str, float]) -> None:
    spawn, reuse = medians["per-test spawn (a)"], medians["reused processes (b)"]
    print(f"\nworld {world}: median seconds a scenario")
    for name, seconds in medians.items():
        print(f"  {name:22} {seconds:8.3f} s   (a)/this {spawn / seconds:6.1f}   this/(b) {seconds / reuse:5.2f}")
    best = min(seconds for name, seconds in medians.items() if name.startswith("fork"))
    print(f"  best -j: {spawn / best:.1f} times (a); {best / reuse:.2f} of (b)", flush=True)


def profile(outcomes: list[JobOutcome]) -> None:
    """Where the time of our ranks goes, medians over scenarios of the slowest rank a phase."""
    phases: dict[str, list[float]] = {}
    for outcome in outcomes:
        for phase, seconds in outcome.profile:
            phases.setdefault(_grouped(phase), []).append(seconds)
    print("  profile, all -j together, ms (slowest rank; median):", end="")
    for phase, values in phases.items():
        print(f"  {phase} {1000 * statistics.median(values):.0f}", end="")
    cpu = statistics.median(outcome.cpu_s for outcome in outcomes)
    wall = statistics.median(outcome.duration_s for outcome in outcomes)
    print(f"\n  processor seconds a scenario {cpu:.3f}; wall {wall:.3f}", flush=True)


def _grouped(phase: str) -> str:
    if phase.endswith(" op"):
        return phase.removesuffix(" op")
    return phase.split()[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worlds", default="2,4,8")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; 1-minute load matters: quote ratios")
    with ForkServer(warm_up=WARM_UP) as server:
        for world in map(int, options.worlds.split(",")):
            measure(world, options.rounds, server)


if __name__ == "__main__":
    main()
