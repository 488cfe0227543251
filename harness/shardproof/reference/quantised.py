"""Weights in fp8 for matrix products, kept beside the parameters that the optimizer steps, with a scale and a
history.

They model what TransformerEngine keeps of a linear layer's weight, and Megatron-Core's `fp8_param_gather`. A weight is
its master (or, without one, the parameter itself) times a scale, in fp8e4m3, and comes back as that times the scale's
inverse. There are two recipes:

    current  the scale is 448 over the greatest magnitude that the weight has now (Float8CurrentScaling)
    delayed  448 over the greatest magnitude of the last `HISTORY` times that it was quantised, 1 as long as there is
             none (DelayedScaling: `amax_history`, reduced by `max`)

The magnitude is that of the whole weight, on all ranks that share it out between them, by data and by tensor
parallelism (NVIDIA/TransformerEngine pull request 2713, `weight_mesh`).

Weights are quantised at the build, and after every step that is not skipped. A checkpoint holds bytes, inverse scales
and histories as they are; a load gives them back without quantising anything anew: what went through fp8 once and is
quantised again has other bits than the master (Megatron-LM pull request 6666, TransformerEngine 2974).

*Does not verify* anything: `shardproof.systems.reference.generators_and_fp8` says, with code of its own, what weights
must be.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from shardproof.models import ModelSpec
from shardproof.reference.numerics import DTYPE, FP32, Array

FP8 = DTYPE["fp8e4m3"]
LARGEST = np.float32(448)
HISTORY = 4


@dataclass
class Weights:
    """What is quantised of one `Shards`. data: fp8; inverse: of the scale, for each element; both (R, S, m), and
    meaningless where no weight is quantised. mask: where one is, (S, m)."""

    data: Array
    inverse: Array
    mask: Array


@dataclass
class Kept:
    """One quantised weight in a checkpoint: flattened bytes, an inverse scale for each element, and the history."""

    data: Array
    inverse: Array
    history: Array


def recipes(model: ModelSpec) -> Iterator[tuple[str, str]]:
    """Name and recipe of every weight that is quantised: the matrices of the modules that say so."""
    for module in model.modules:
        for param in module.params:
            if module.quantised and len(param.shape) > 1:
                yield f"{module.path}.{param.name}", module.quantised


def empty(shape: tuple[int, ...], mask: Array) -> Weights:
    """Weights that have not been quantised yet."""
    return Weights(np.zeros(shape, FP8), np.ones(shape, FP32), mask)


def greatest(values: Array, own: Array) -> Array:
    """The greatest magnitude on each replica's ranks of elements chosen by `own`, (S, m), of (R, S, m): fp32, (R,)."""
    found: Array = np.abs(values[:, own].astype(np.float32)).max(axis=1, initial=0)
    return found


def scales_for(amax: Array) -> Array:
    """The scales for some greatest magnitudes, fp32; 1 where there is none."""
    amax = amax.astype(np.float32)
    usable = np.isfinite(amax) & (amax > 0)
    scales: Array = np.where(usable, LARGEST / np.where(usable, amax, 1), np.float32(1)).astype(np.float32)
    return scales


def quantise(values: Array, scales: Array) -> Array:
    """Values times scales in fp8, saturating."""
    return np.clip(values.astype(np.float32) * scales, -LARGEST, LARGEST).astype(FP8)


def dequantised(weights: Weights) -> Array:
    """What a matrix product reads, fp32."""
    values: Array = weights.data.astype(np.float32) * weights.inverse
    return values
