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
    """One step of the named matrices of a group, on all ranks; returns their directions, (rows, columns), as the first
    replica has them."""
    catalogue = session.catalogue
    how = session.inputs.stepper.orthogonal
    assert how is not None
    params = [p for p in catalogue.params if p.fqn in names]
    replicas = len(session.shards[0].stepped)
    whole = np.zeros((replicas, catalogue.padding + 1))
    for shards in session.shards:
        assert shards.main_grad is not None
        chosen, dtype = catalogue.belongs_to(names, shards.layout.shard_element), shards.stepped.dtype
        if "momentum" not in shards.moments:
            shards.moments["momentum"] = np.zeros(
                shards.stepped.shape, DTYPE[session.working_dtype(shards, "momentum")]
            )
        gradient, buffer = shards.main_grad[:, chosen], shards.moments["momentum"][:, chosen]
        buffer = rounded(lerp(working(buffer), working(gradient), 1 - hyper.momentum), dtype)
        shards.moments["momentum"][:, chosen] = buffer
        source = rounded(lerp(working(gradient), buffer, hyper.momentum), dtype) if hyper.nesterov else buffer
        whole[:, shards.layout.shard_element[chosen]] = source
    directions: dict[str, Array] = {}
    for param in params:
        rows, columns = param.spec.shape
        factor = sqrt(max(1, rows / columns)) if how.scaled else 1.0
        handed_on = DTYPE[how.dtype or session.parameter(param.fqn).stages.stepped]
        made = np.stack([direction(own[catalogue.span(param)].reshape(rows, columns)) * factor for own in whole])
        whole[:, catalogue.span(param)] = made.astype(handed_on).reshape(replicas, -1)
        directions[param.fqn] = made[0].astype(handed_on)
    factors = np.ones(catalogue.padding + 1)
    for param in params if not how.scaled else ():
        factors[catalogue.span(param)] = sqrt(max(1, param.spec.shape[0] / param.spec.shape[1]))
    for shards in session.shards:
        chosen, dtype = catalogue.belongs_to(names, shards.layout.shard_element), shards.stepped.dtype
        elements = shards.layout.shard_element[chosen]
        decayed = rounded(working(shards.stepped[:, chosen]) * np.float32(1 - hyper.lr * hyper.weight_decay), dtype)
        for factor in np.unique(factors[elements]):
            at = factors[elements] == factor
            wide = FP32 if DTYPE.get(how.dtype, dtype) != dtype else dtype
            moved = add(decayed[:, at], whole[:, elements[at]].astype(np.float32), -hyper.lr * factor, wide)
            decayed[:, at] = rounded(moved, dtype)
        shards.stepped[:, chosen] = decayed
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
