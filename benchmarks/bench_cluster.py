"""Two nodes of one core against one of one core: how many scenarios a minute a cluster does.

    python -m benchmarks.bench_cluster [ROUNDS]      needs the extra `ray`, two cores, and nothing else at work

Both nodes are Ray's, on this machine, each pinned to a core of its own with everything that it starts. The driver,
which hands out and waits, is not pinned. The same scenarios of torch-fsdp2 on two ranks run on the first node alone
and then on both, in turns; slots are warm before the clock starts. Each round prints seconds for each, the processor
time of the nodes in them, and how many times faster two nodes were. A node that has its core for itself uses as much
processor time as the clock shows; where it uses less, other work ran there, and the ratio says less.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from shardproof.cluster.handout import ClusterExecutor, Node
from shardproof.cluster.node import setting_of
from shardproof.cluster.on_ray import RayCluster
from shardproof.issues.known_issues import KnownIssues
from shardproof.scenario import Mesh, Scenario

SCENARIOS = 48
"""So many that the end, when one node has nothing left to do while the other does its last, weighs little."""
PLAIN = replace(Scenario(system="torch-fsdp2", program="resume"), mesh=Mesh(1, 2, 1))


class Some(RayCluster):
    """The cluster as if it had only its first nodes, of one core each."""

    def __init__(self, address: str, log: Path, names: Sequence[str]) -> None:
        super().__init__(address, log)
        self._names = names

    def __enter__(self) -> Any:
        return self  # Ray is connected once for all of them

    def __exit__(self, *error: object) -> None:
        pass

    def nodes(self) -> Sequence[Node]:
        return [replace(node, cpus=1) for node in super().nodes() if node.id in self._names]


def pinned(cluster: Any, core: int, **options: Any) -> Any:
    """A node whose processes have one core. Each has a CPU for either executor in Ray's account."""
    everywhere = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        return cluster.add_node(num_cpus=2, **options)
    finally:
        os.sched_setaffinity(0, everywhere)


def seconds(executor: ClusterExecutor, seed: int, raylets: Sequence[int]) -> tuple[float, float]:
    """What some new scenarios take: by the clock, and of the processors of all nodes."""
    began, used = time.monotonic(), sum(map(processor_s, raylets))
    scenarios = [replace(PLAIN, seed=seed + number) for number in range(SCENARIOS)]
    results = [result for found in executor.attributed(scenarios, lambda scenario, blob: None) for result in found]
    assert {result.verdict.value for result in results} == {"pass"}, results
    return time.monotonic() - began, sum(map(processor_s, raylets)) - used


def processor_s(pid: int) -> float:
    """Processor seconds of a process, all that it started and all that those have waited for."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        children = [int(child) for task in tasks for child in (task / "children").read_text().split()]
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK") + sum(map(processor_s, children))


def main() -> None:
    """Measure, and print."""
    rounds = int(sys.argv[1]) if sys.argv[1:] else 5
    os.environ.update(RAY_worker_niceness="0")
    from ray.cluster_utils import Cluster

    cores = sorted(os.sched_getaffinity(0))[:2]
    cluster = Cluster(initialize_head=False)
    nodes = [pinned(cluster, cores[0], include_dashboard=False), pinned(cluster, cores[1])]
    names = [node.node_id for node in nodes]
    raylets = [node.all_processes["raylet"][0].process.pid for node in nodes]
    setting = setting_of([PLAIN], (), None, 120.0, KnownIssues())
    with TemporaryDirectory() as folder, RayCluster(cluster.address, Path(folder, "ray.log")):
        log = Path(folder, "ray.log")
        one, two = (
            ClusterExecutor(Some(cluster.address, log, names[:n]), setting, most=None, keep=Path(folder), say=tell)
            for n in (1, 2)
        )
        with one, two:
            for executor in (one, two):
                seconds(executor, 1_000, raylets)
            times = []
            for number in range(rounds):
                alone, its = seconds(one, 100 * number, raylets)
                both, theirs = seconds(two, 100 * number, raylets)
                times.append(alone / both)
                tell(
                    f"one node {alone:5.1f} s, {its:5.1f} s of processors; two {both:5.1f} s, {theirs:5.1f} s:"
                    f" {alone / both:.2f} times; load {os.getloadavg()[0]:.1f}"
                )
            tell(f"median of {rounds}: {statistics.median(times):.2f} times")
    cluster.shutdown()


def tell(line: str) -> None:
    """Print for the user, whatever stdout is now."""
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
