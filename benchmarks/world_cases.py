"""The same FSDP2 + DCP session through PyTorch's own multi-process test classes, for bench_world.

`python -m benchmarks.world_cases spawn|reuse WORLD SCRATCH` waits for lines on standard input, runs one test a line and
prints its seconds. The ranks execute the code that our fork server's ranks execute: the same `RankSystem`, operations,
observations and files; only who starts the processes differs.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
import unittest
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from shardproof.observe.record import pack
from shardproof.program import expand
from shardproof.systems.torch_fsdp2.rank import Rank
from shardproof.torch_loop.loop import context_of
from torch.testing._internal.common_distributed import MultiProcContinuousTest, MultiProcessTestCase

from benchmarks.bench_world import bench_scenario


def run_session(rank: int, world: int, directory: Path) -> None:
    """What shardproof.world.rank does between joining the group and its last word."""
    torch.set_num_threads(1)
    directory.mkdir(exist_ok=True)
    scenario = bench_scenario(world)
    system = Rank(replace(context_of(scenario, directory), rank=rank))
    with (directory / f"session0.rank{rank}.obs").open("wb", buffering=0) as file:
        for op in expand(scenario):
            getattr(system, op.kind)(op)
            file.write(pack(system.observe(op)))


class Spawned(MultiProcessTestCase):
    """Fresh processes a test, each of which imports torch."""

    @property
    def world_size(self) -> int:
        return int(os.environ["BENCH_WORLD"])

    def setUp(self) -> None:
        super().setUp()
        self._spawn_processes()

    def test_session(self) -> None:
        store = dist.FileStore(self.file_name, self.world_size)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.world_size)
        run_session(self.rank, self.world_size, Path(os.environ["BENCH_DIRECTORY"]))


class Reused(MultiProcContinuousTest):
    """The same processes, process group and caches for every test."""

    world_size = int(os.environ.get("BENCH_WORLD", "2"))
    runs = itertools.count()

    @classmethod
    def backend_str(cls) -> str:
        return "gloo"

    @classmethod
    def device_type(cls) -> str:
        return "cpu"

    def test_session(self) -> None:
        base = Path(os.environ["BENCH_DIRECTORY"])
        base.mkdir(exist_ok=True)
        run_session(self.rank, self.world_size, base / str(next(self.runs)))


def timed_test(case: Callable[[str], unittest.TestCase]) -> float:
    result = unittest.TestResult()
    start = time.perf_counter()
    case("test_session").run(result)
    seconds = time.perf_counter() - start
    if not result.wasSuccessful() or result.testsRun != 1:
        raise SystemExit(f"the test failed: {result.errors} {result.failures}")
    return seconds


def main() -> None:
    kind, world, scratch = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    os.environ["BENCH_WORLD"] = world
    Reused.world_size = int(world)
    for index, _ in enumerate(sys.stdin):
        os.environ["BENCH_DIRECTORY"] = str(scratch / (kind if kind == "reuse" else f"{kind}{index}"))
        print(timed_test(Reused if kind == "reuse" else Spawned), flush=True)
    if kind == "reuse":
        Reused.tearDownClass()


if __name__ == "__main__":
    # Spawned ranks unpickle the test class by its module's name, which must not be __main__.
    from benchmarks.world_cases import main as importable_main

    importable_main()
