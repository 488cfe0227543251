"""Muon in the reference: momentum on each rank's shards, the direction on matrices gathered from all of them.

torch.optim.Muon's order of operations (torch/optim/_muon.py, 2.13) for what is done element by element. The direction
is the five iterations in double precision on the whole matrix, rounded once. How a library rounds its products is its
own affair (`shardproof.oracle.muon`), so that the twin takes this one from the reference as it does from a library.
"""

from __future__ import annotations

from collections.abc import Collection
from math import sqrt
from typing import TYPE_CHECKING

import numpy as np

from shardproof.reference.kernels import Hyper, add, lerp, working
from shardproof.reference.numerics import DTYPE, FP32, Array, rounded

if TYPE_CHECKING:
    from shardproof.reference.state import Session

QUINTIC = (3.4445, -4.775, 2.0315)
ITERATIONS = 5


def step_matrices(session: Session, hyper: Hyper, names: Collection[str]) -> dict[str, Array]:
    """One step of the named matrices of a group, on all ranks, whose momenta are there; returns their directions,
    (rows, columns), in bf16, as the first replica has them."""
    catalogue = session.catalogue
    whole = np.zeros((len(session.shards[0].stepped), catalogue.padding + 1))  # replicas, every element
    for shards in session.shards:
        assert shards.main_grad is not None
        chosen, dtype = catalogue.belongs_to(names, shards.layout.shard_element), shards.stepped.dtype
        gradient, buffer = working(shards.main_grad[:, chosen]), working(shards.moments["momentum"][:, chosen])
        buffer = rounded(lerp(buffer, gradient, 1 - hyper.momentum), dtype)
        shards.moments["momentum"][:, chosen] = buffer
        source = rounded(lerp(gradient, buffer, hyper.momentum), dtype) if hyper.nesterov else buffer
        whole[:, shards.layout.shard_element[chosen]] = source
    directions: dict[str, Array] = {}
    for param in catalogue.params:
        if param.fqn not in names:
            continue
        rows, columns = param.spec.shape
        matrices = whole[:, catalogue.span(param)].reshape(-1, rows, columns)
        made = np.stack([direction(matrix) for matrix in matrices]).astype(DTYPE["bf16"])
        whole[:, catalogue.span(param)] = made.reshape(len(whole), -1)
        directions[param.fqn] = made[0]
        rate = hyper.lr * sqrt(max(1, rows / columns))
        for shards in session.shards:
            chosen, dtype = catalogue.belongs_to({param.fqn}, shards.layout.shard_element), shards.stepped.dtype
            moves = whole[:, shards.layout.shard_element[chosen]].astype(FP32)
            kept = working(shards.stepped[:, chosen]) * np.float32(1 - hyper.lr * hyper.weight_decay)
            sum_dtype = dtype if dtype == DTYPE["bf16"] else FP32  # of bf16 and another dtype, torch adds in fp32
            shards.stepped[:, chosen] = rounded(add(rounded(kept, dtype), moves, -rate, sum_dtype), dtype)
    return directions


def direction(matrix: Array) -> Array:
    """The direction of a matrix, (rows, columns), fp64."""
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    length = np.sqrt(np.square(x).sum())
    x = x / max(length, 1e-30)
    first, third, fifth = QUINTIC
    for _ in range(ITERATIONS):
        gram = x @ x.T
        x = first * x + (third * gram + fifth * (gram @ gram)) @ x
    return np.ascontiguousarray(x.T if tall else x)
