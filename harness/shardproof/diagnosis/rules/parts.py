"""The rule for gradients of which every tensor-parallel rank has a part, as of a norm under sequence parallelism.

Such a gradient is added up twice, over tensor-parallel ranks and over data-parallel ones, and a library may take one
dtype for the one and another for the other. The probe's grid (`Grid.parted`) makes every part known.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from math import prod

import numpy as np

from shardproof import probe
from shardproof.diagnosis.explanation import Context, Finding, Floats, Rule
from shardproof.diagnosis.rules.gradients import CLIPPED, HALF, assembled, reduced_in, times_a_factor
from shardproof.diff import Difference, as_numbers, numpy_dtype
from shardproof.observe.logical import Key
from shardproof.program import Op
from shardproof.scenario import Mesh


def narrowed_parts(difference: Difference, context: Context) -> Finding | None:
    """Every tensor-parallel rank has a part of the gradient, and the parts were added in a narrower dtype. Gradients
    that have no parts are right, so that it is no other sum (pytorch#190626)."""
    op, parts = context.op(difference.key.op), _parts(difference.key, context)
    if op is None or not parts or not _whole_gradients_are_right(op, context):
        return None
    return assembled(difference, context, partial(_narrow_sums_of_parts, parts))


def _whole_gradients_are_right(op: Op, context: Context) -> bool:
    """Whether every gradient of a step that has no parts is what it must be, but for the factor of a clipping."""
    build = context.inputs.builds[context.inputs.operations[op.index].build]
    for key, expected in context.expected.items():
        observed = context.observed.get(key) if key[:3] == (op.index, "live", "grad") else None
        param = build.by_name.get(key.fqn)
        if observed is None or observed == expected or not param or not param.gradient or param.gradient.parted:
            continue
        clipped = context.scenario.optimizer.clip and observed.dtype == expected.dtype
        values = as_numbers(expected)[None].astype(np.float64), as_numbers(observed).astype(np.float64)
        if not clipped or not times_a_factor(*values, CLIPPED[expected.dtype]):
            return False
    return True


def _parts(key: Key, context: Context) -> list[Floats]:
    """What tensor-parallel ranks have of the gradient that a step computes, of which each has a part; for each
    microbatch (dp, tp, numel). Empty where each has all of it."""
    inputs, op = context.inputs, context.op(key.op)
    if op is None:
        return []
    build = inputs.builds[inputs.operations[op.index].build]
    param = build.by_name.get(key.fqn)
    grid = param.gradient if param else None
    if param is None or grid is None or not grid.parted:
        return []
    mesh, found = op.mesh, []
    for batch in range(inputs.microbatches):
        parts = np.zeros((mesh.dp, mesh.tp, prod(param.shape)), np.int64)
        for use in param.uses:
            keys = probe.element_keys(use, param.shape, inputs.seed)
            parts += probe.part_units(keys, op.iteration, batch, mesh.dp, mesh.tp, grid)
        found.append(parts * np.float64(grid.unit))
    return found


def _narrow_sums_of_parts(parts: list[Floats], every: Floats, mesh: Mesh) -> Iterator[tuple[str, Floats]]:
    """Averages of gradients whose tensor-parallel parts were added in a narrower dtype: before the reduction over the
    data-parallel ranks, or after it. every: as for all hypotheses, of whole gradients."""
    for name in HALF:
        dtype = numpy_dtype(name)
        with np.errstate(over="ignore"):
            first = np.sum([reduced_in(batch.swapaxes(0, 1), dtype) for batch in parts], axis=0)  # alternatives, dp, n
            averages = np.sum(parts, axis=0).sum(axis=0) / mesh.dp
            last = [*reduced_in(averages, dtype), averages.sum(axis=0).astype(dtype).astype(np.float64)]
        yield f"summed over tensor-parallel ranks in {name}", np.stack([*first.sum(axis=1) / mesh.dp, *last])


RULES = (Rule("narrowed_parts", "Parts of a gradient were added in a narrower dtype", narrowed_parts),)
