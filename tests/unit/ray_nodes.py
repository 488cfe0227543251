"""A Ray cluster of two nodes on this machine, as a process of its own: `python -m tests.unit.ray_nodes`.

It says its address. For each line that it reads it kills the second node, puts another in its place, and says `lost`.
It ends with its input. In the process of the tests, Ray's threads and unclosed files would be errors of theirs.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import Any

ATTEMPTS = 5


def main() -> None:
    os.environ.update(RAY_worker_niceness="0")  # 15 without: beside other tests, ranks would miss their deadlines
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=False)
    _added(cluster, include_dashboard=False)
    second = _added(cluster)
    print(cluster.address, flush=True)
    for _ in sys.stdin:
        cluster.remove_node(second, allow_graceful=False)
        second = _added(cluster)
        print("lost", flush=True)
    cluster.shutdown()


def _added(cluster: Any, **options: Any) -> Any:
    """A node more. Ray gives it half a minute to start, which is too little on a busy machine."""
    for _ in range(ATTEMPTS):
        with suppress(Exception):
            return cluster.add_node(num_cpus=2, **options)
    return cluster.add_node(num_cpus=2, **options)


if __name__ == "__main__":
    main()
