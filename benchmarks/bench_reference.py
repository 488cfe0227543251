"""Scenarios a second of the reference on one core, and where the time goes.

Seconds are of the processor, so that whoever else uses the machine counts less. Remembered from one scenario to the
next is what a run remembers: what the contract says of the same axes, and what a build is before it runs (layouts,
initial values, the gradients that ranks contribute; `harness/shardproof/reference/blueprint.py`). Every step,
reduction, save, load and comparison is done anew.

The scenario: 12 parameters of mixed dtype, AdamW with fp32 masters, zero1 over dp 4, three steps, save, load on dp 2,
one step. Its final state, as all ranks hold it, is assembled and compared bit for bit with that of the twin, computed
once (one twin serves every mesh). `every operation` also observes and compares what every earlier operation left.
"""

from __future__ import annotations

import os

os.environ["ATEN_CPU_CAPABILITY"] = "default"  # as in every worker; read by torch when its first kernel runs

import cProfile
import pstats
import statistics
import time

from shardproof.diff import diff
from shardproof.models import ZOO, ModelSpec, ModuleSpec, ParamSpec
from shardproof.observe.logical import Logical
from shardproof.oracle import twin
from shardproof.program import expand
from shardproof.protocol.registry import contract_of
from shardproof.reference import system as reference
from shardproof.scenario import Scenario

AXES = {
    "model": "bench12", "sharding": "zero1", "dtype": "mixed/reduce=fp32/master=fp32", "mesh": "1x4x1", "load": "1x2x1",
    "optimizer": "adamw", "checkpoint": "gathered", "program": "build step step step save reshard build load step",
}  # fmt: skip


def bench_model() -> ModelSpec:
    """Twelve parameters in four units, a third of them fp32 islands."""
    shapes = ((12, 5), (7,), (6, 4))
    modules = tuple(
        ModuleSpec(f"layers.{n}", tuple(ParamSpec(f"p{i}", s, island=i == 1) for i, s in enumerate(shapes)))
        for n in range(4)
    )
    return ModelSpec("bench12", "for benchmarks", modules)


def one(truth: Logical, ops: tuple[int, ...]) -> None:
    """A whole scenario: from its axes to the verdict."""
    scenario = Scenario().with_axes(AXES)
    inputs, placement = contract_of(scenario).resolve(scenario)
    observed, _ = reference.look(inputs, placement, observe_ops=ops)
    assert observed is not None
    found = diff(truth, observed)
    assert not found, found[0]


def rate(truth: Logical, ops: tuple[int, ...], seconds: float) -> list[float]:
    """Milliseconds of each repetition."""
    taken: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        began = time.thread_time()
        one(truth, ops)
        taken.append((time.thread_time() - began) * 1e3)
    return taken


def main(seconds: float = 5.0) -> None:
    """Measure and print."""
    ZOO["bench12"] = bench_model()
    scenario = Scenario().with_axes(AXES)
    truth = twin.run(contract_of(scenario).resolve(scenario)[0])
    every = tuple(op.index for op in expand(scenario))
    for name, ops in (("final state", every[-1:]), ("every operation", every)):
        wanted = {key: value for key, value in truth.items() if key.op in ops}
        one(wanted, ops)
        taken = rate(wanted, ops, seconds)
        low, mid = min(taken), statistics.median(taken)
        print(f"reference, {name:<16} {1e3 / mid:6.0f}/s at the median ({mid:.2f} ms), {1e3 / low:6.0f}/s at best")
    profile = cProfile.Profile()
    profile.enable()
    rate({key: value for key, value in truth.items() if key.op in every[-1:]}, every[-1:], seconds / 2)
    profile.disable()
    print("where the time goes (final state, under the profiler):")
    stats = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    rows = sorted(((v[3], k) for k, v in stats.items() if "/harness/shardproof/" in k[0]), reverse=True)
    total = rows[0][0]
    for cumulative, (file, _line, function) in rows[1:16]:
        print(f"  {100 * cumulative / total:5.1f} %  {file.rpartition('/harness/shardproof/')[2]}: {function}")


if __name__ == "__main__":
    main()
