"""Chooses where the scenarios of a run are executed: on this machine, or on the nodes of a cluster."""

from __future__ import annotations

import sys

from shardproof.errors import printable
from shardproof.laboratory.executor import Executor, LocalExecutor
from shardproof.laboratory.laboratory import Laboratory
from shardproof.request import Request


def executor_of(request: Request) -> Executor:
    """The executor of a run: that of this machine or, where the request names one, of a Ray cluster. Nothing has
    started yet."""
    systems, logs = {scenario.system for scenario in request.plan.scenarios}, request.out / "logs"
    if request.ray is None:
        laboratory = Laboratory(
            jobs=request.jobs, deadline_s=request.deadline_s, plugins=request.plugins, python=request.python,
            keep=logs, systems=systems,
        )  # fmt: skip
        return LocalExecutor(laboratory, request.known)
    from shardproof.cluster.handout import ClusterExecutor
    from shardproof.cluster.node import setting_of
    from shardproof.cluster.on_ray import RayCluster

    samples = request.plan.supported or request.plan.scenarios
    return ClusterExecutor(
        RayCluster(request.ray.address, logs / "ray.log"),
        setting_of(samples, request.plugins, request.python, request.deadline_s, request.known),
        most=request.ray.most,
        keep=logs,
        say=lambda line: None if request.quiet else print(printable(line), file=sys.stderr, flush=True),
    )
