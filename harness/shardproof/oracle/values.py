"""The values that a twin's tensors begin with, and the gradients that it steps on: what `shardproof.probe` defines, as
torch tensors.

Scenarios of one model ask for the same ones again and again. So they are remembered, and nobody may change one in
place.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod

import numpy as np
import torch

from shardproof import probe
from shardproof.grid import Grid
from shardproof.oracle.inputs import Buffer, Parameter
from shardproof.oracle.steppers import TORCH_DTYPE


@lru_cache(maxsize=4096)
def initial_param(param: Parameter, seed: int, init_seed: int) -> torch.Tensor:
    """The initial values of a parameter, clipped to its bound and rounded to one dtype after the other."""
    drawn = probe.initial_values(probe.element_keys(param.fqn, param.shape, seed), init_seed)
    values = torch.from_numpy(probe.with_rare(drawn, init_seed) if param.rare else drawn).reshape(param.shape)
    values = values.clamp(-param.bound, param.bound)
    for dtype in param.initial:
        values = values.to(TORCH_DTYPE[dtype])
    return values


@lru_cache(maxsize=16384)
def exact_gradient(
    uses: tuple[str, ...], shape: tuple[int, ...], grid: Grid, dtype: str, step: tuple[int, int, tuple[int, ...]]
) -> torch.Tensor:
    """The mean gradient over ranks, summed over uses and microbatches. step: the seed, the iteration, and the
    microbatches whose forward uses the parameter."""
    seed, iteration, forwards = step
    units = np.zeros(prod(shape), np.int64)
    for use in uses:
        keys = probe.element_keys(use, shape, seed)
        for microbatch in forwards:
            units += probe.mean_units(keys, iteration, microbatch, grid)
    exact = torch.from_numpy(units * grid.unit).reshape(shape)
    gradient = exact.to(TORCH_DTYPE[dtype])
    if not torch.equal(gradient.double(), exact):
        raise ArithmeticError(f"the grid is not exact in {dtype} for {uses}: a fault of the harness")
    return gradient


@lru_cache(maxsize=1024)
def initial_buffer(buffer: Buffer, seed: int, init_seed: int) -> torch.Tensor:
    """The initial values of a buffer: integers are zero, booleans change with the build."""
    keys = probe.element_keys(buffer.fqn, buffer.shape, seed)
    match buffer.dtype:
        case "int64":
            return torch.zeros(buffer.shape, dtype=torch.int64)
        case "bool":
            return torch.from_numpy(((keys ^ np.uint64(init_seed)) & np.uint64(1)).astype(bool)).reshape(buffer.shape)
        case dtype:
            values = torch.from_numpy(probe.initial_values(keys, init_seed))
            return values.reshape(buffer.shape).to(TORCH_DTYPE[dtype])
