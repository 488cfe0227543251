"""Over which elements FusedAdam takes the scale of a scaled state under FSDP2: over a rank's shard of a parameter.

FSDP2 cuts dim 0 into chunks. For example, a weight of 5 rows on two ranks has two domains, rows 0 to 2 and rows 3 to 4;
`shardproof.mechanisms.fused_adam` says why that decides bits.

Source: transformer_engine.pytorch.optimizers.FusedAdam._apply_scale (2.10 to 2.20.2).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shardproof.models import ModelSpec, NamedParam
from shardproof.scenario import Mesh


def row_domains(model: ModelSpec, mesh: Mesh) -> dict[str, tuple[int, ...]]:
    """Name of each trained parameter → the number of each element's domain, row-major. No number occurs twice."""
    trained = [p for p in model.unique_params if p.spec.trainable == "yes"]
    return {p.fqn: tuple(_numbers(p, mesh, mesh.world * number).ravel().tolist()) for number, p in enumerate(trained)}


def _numbers(param: NamedParam, mesh: Mesh, first: int) -> npt.NDArray[np.int64]:
    """The domains of a parameter under FSDP2, numbered from `first`: torch.chunk over tensor-parallel ranks, and
    of each chunk's dim 0 over data-parallel ranks."""
    shape, dim = param.spec.shape, param.spec.tp_dim if mesh.tp > 1 else None
    if not shape:
        return np.full(shape, first)
    index = np.indices(shape)
    row, rows, part = index[0], np.full(shape, shape[0]), np.zeros(shape, np.int64)
    if dim is not None:
        width = -(-shape[dim] // mesh.tp)
        part = index[dim] // width
        if dim == 0:
            row, rows = row - part * width, np.minimum(width, rows - part * width)
    numbers: npt.NDArray[np.int64] = first + row // -(-rows // mesh.dp_shard) * mesh.tp + part
    return numbers
