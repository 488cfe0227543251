"""The random generators that ranks draw dropout from: their seeds, and the state that each rank restores from a
checkpoint.

They model the streams that Megatron-Core's tracker of CUDA generators keeps beside the default one, and
TransformerEngine's like it (megatron/core/tensor_parallel/random.py, `model_parallel_cuda_manual_seed`):

    replicated  activations that all ranks of a replica have alike: one stream for all ranks
    tensor      activations that tensor parallelism cuts: a stream for each of its coordinates
    expert      those of experts: a stream for each coordinate of expert and tensor parallelism
    data        a generator of one's own, as of a data loader: a stream for each data-parallel rank

A state is what a CUDA generator's is: the seed, and how many numbers have been drawn. A forward draws one number for
each element of the first parameter of every module that has dropout. The masks themselves are not applied: what a wrong
stream does is seen in its state, and the gradients stay those of the exact grid.

A checkpoint holds one state for each coordinate of each stream. A load gives every rank that of its coordinate; a
stream that has another number of coordinates than was saved stays as it was seeded, as Megatron's training script
leaves generators alone where the parallel sizes have changed (megatron/training/checkpointing.py, `load_checkpoint`).

*Does not verify* anything: `shardproof.systems.reference.generators_and_fp8` says, with code of its own, what the
states must be.
"""

from __future__ import annotations

import numpy as np

from shardproof.models import ModelSpec
from shardproof.reference.numerics import Array
from shardproof.scenario import Mesh

Streams = dict[str, Array]
"""Stream → of every rank, or in a checkpoint of every coordinate, its seed and the numbers drawn, int64, (n, 2)."""


def coordinates(stream: str, mesh: Mesh, expert_parallel: int) -> list[int]:
    """Of every rank the coordinate that decides its stream."""
    ranks = range(mesh.world)
    match stream:
        case "replicated":
            return [0 for _ in ranks]
        case "tensor":
            return [rank % mesh.tp for rank in ranks]
        case "expert":
            return [rank // mesh.tp % expert_parallel * mesh.tp + rank % mesh.tp for rank in ranks]
        case "data":
            return [rank // mesh.tp for rank in ranks]
    raise ValueError(f"there is no stream {stream!r}")


def seed_of(stream: str, seed: int, coordinate: int, tp: int) -> int:
    """The seed of one coordinate's stream."""
    match stream:
        case "tensor":
            return seed + 2718 + coordinate
        case "expert":
            return seed + 1024 + 100 * (coordinate // tp) + coordinate % tp
        case "data":
            return seed + 10 * coordinate
    return seed


def fresh(model: ModelSpec, mesh: Mesh, expert_parallel: int, seed: int) -> Streams:
    """The streams of newly seeded ranks."""
    return {
        module.draws: np.array(
            [[seed_of(module.draws, seed, at, mesh.tp), 0] for at in coordinates(module.draws, mesh, expert_parallel)],
            np.int64,
        )
        for module in model.modules
        if module.draws
    }


def after_a_forward(streams: Streams, model: ModelSpec) -> Streams:
    """The streams after every module with dropout has drawn its mask."""
    drawn = {name: states.copy() for name, states in streams.items()}
    for module in model.modules:
        if module.draws:
            drawn[module.draws][:, 1] += module.params[0].numel
    return drawn


def collected(states: Array, at: list[int]) -> Array:
    """Generator states for a checkpoint, one state per coordinate. Ranks that share a coordinate hold equal states, so
    the first rank's state is taken."""
    return np.stack([states[at.index(coordinate)] for coordinate in range(max(at) + 1)])


def handed_out(states: Array, saved: Array, at: list[int]) -> Array:
    """What ranks have after a load: the saved state of their coordinate; their own, where coordinates have changed."""
    return states if len(saved) != max(at) + 1 else saved[at]
