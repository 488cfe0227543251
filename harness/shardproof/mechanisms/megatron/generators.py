"""The random generators of Megatron-Core's ranks: what each must hold, live and in checkpoints.

The training script seeds Python's, numpy's and torch's generator alike on every rank, and with
`model_parallel_cuda_manual_seed` the device's: its default generator, and beside it the library's tracker with a stream
of its own for each tensor-parallel rank, for each rank of an expert, and one for all ranks. A checkpoint holds all of
them for each tensor-parallel rank (`rng_state`). With s the script's seed they are seeded

    replicated  the device's default generator                      s
    tensor      `model-parallel-rng`     s + 2718 + its tensor-parallel rank
    expert      `expert-parallel-rng`    s + 1024 + 100 × its expert-parallel rank + its rank within an expert
    data        `data-parallel-rng`      s

A load gives all of them back, on any number of data-parallel ranks; where the tensor-parallel size is another one than
at the save, the script leaves the generators as they are and says so. The script promises no more than that: without
`data_parallel_random_init` data-parallel ranks have the same streams, and which of them is saved does not matter. Under
expert parallelism it does, and what a rank gets back must be its own.

Sources: megatron/core/tensor_parallel/random.py, `model_parallel_cuda_manual_seed` (0.13 to 0.19 alike);
megatron/training/initialize.py, `_set_random_seed`; megatron/training/checkpointing.py, `get_rng_state` and
`load_checkpoint` ("RNG state will be ignored"); that a rank must get its own back, NVIDIA/Megatron-LM PR 6858.

*Verifies* nothing by itself. *Does not say* anything of `data_parallel_random_init`, pipeline or context parallelism.
"""

from __future__ import annotations

from collections.abc import Iterator

from shardproof.models import model_spec
from shardproof.observe.logical import Key, Logical, Value
from shardproof.observe.record import LIVE, WRITTEN
from shardproof.oracle.generators import Drawn, follow, state_of
from shardproof.program import Op, expand
from shardproof.scenario import Mesh, Scenario

TRACKED = {"model-parallel-rng": "tensor", "expert-parallel-rng": "expert", "data-parallel-rng": "data"}
"""The tracker's name of a stream → what modules call it that draw from it."""

STREAMS = ("replicated", *TRACKED.values())

HOST = ("python", "numpy", "torch")
"""The host's generators. They are seeded and draw nothing."""


def megatron_streams(scenario: Scenario) -> Logical:
    """The states of all generators, live on every rank and in what saves wrote."""
    expected, ops = Logical(), expand(scenario)
    for stream in STREAMS:
        modules = [module for module in model_spec(scenario.model).modules if module.draws == stream]
        sizes = tuple(module.params[0].numel for module in modules)
        coordinates = "replicated" if stream == "data" else stream
        for op, places, at, saved in follow(coordinates, scenario, ops, _tensor_parallel):
            states = [state_of(drawn, sizes, device=True) for drawn in places]
            expected |= {
                Key(op.index, LIVE, "rng", f"rank{rank}.{stream}"): states[at[rank]] for rank in range(len(at))
            }
            for number, drawn in enumerate(saved):
                written = state_of(drawn, sizes, device=True)
                expected[Key(op.index, WRITTEN, "rng", f"rank0.{stream}.{number}")] = written
    for op, places, at, saved in follow("replicated", scenario, ops, _tensor_parallel):
        for name, value in _host(places[0], op):
            expected |= {Key(op.index, LIVE, "rng", f"rank{rank}.{name}"): value for rank in range(len(at))}
        for drawn in saved:
            expected |= {Key(op.index, WRITTEN, "rng", f"rank0.{name}.0"): value for name, value in _host(drawn, op)}
    return expected


def _tensor_parallel(mesh: Mesh) -> int:
    return mesh.tp


def _host(drawn: Drawn, op: Op) -> Iterator[tuple[str, Value]]:
    """The host's generators, as a rank has them that seeded them so."""
    from shardproof.observe.ambient import expected_generators

    for key, value in expected_generators(drawn.seed, [op]).items():
        rank, _, name = key.fqn.partition(".")
        if rank == "rank0":
            yield name, value
