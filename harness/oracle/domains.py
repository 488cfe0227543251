"""Over which elements FusedAdam takes the scale of a scaled state, from the written contract.

It sees a tensor for every shard of a parameter that its rank owns, and takes one scale for each from the largest
magnitude in it: a domain is a rank's shard. So the bits of a moment in fp16 or fp8 depend on the partition.

Those shards are intervals of Megatron's buffers, or FSDP2's chunks of dim 0.

Source: transformer_engine.pytorch.optimizers.FusedAdam._apply_scale (2.10 to 2.20.2), over the shards of
megatron.core.optimizer.distrib_optimizer (see `partition`).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from harness.models import NamedParam, model_spec
from harness.oracle.contracts import has_scales
from harness.oracle.partition import local_numel, shards, whole
from harness.scenario import Mesh, Scenario

Domains = npt.NDArray[np.int64]


def scale_domains(scenario: Scenario, mesh: Mesh) -> dict[str, Domains]:
    """Fully qualified name of each trained parameter → the number of each element's domain, in the logical shape; no
    number occurs in two parameters. Empty where no state is scaled."""
    if not has_scales(scenario):
        return {}
    spec = model_spec(scenario.model)
    trained = [p for p in spec.unique_params if p.spec.trainable == "yes"]
    if scenario.sharding == "fully_shard":
        return {p.fqn: _by_rows(p, mesh, mesh.world * number) for number, p in enumerate(trained)}
    shared = scenario.expert_parallel
    experts = [p for p in trained if p.spec.ep_dim is not None and shared > 1]
    dense = [p for p in trained if p not in experts]
    found: dict[str, Domains] = {}
    for params, ways in ((dense, 1), (experts, shared)):
        cut = Mesh(1, max(1, mesh.dp_shard // ways), mesh.tp if ways == 1 else 1)
        for fqn, local in _owners(scenario, params, cut, ways).items():
            param = spec.param(fqn)
            dim, parts = (param.spec.tp_dim, mesh.tp) if ways == 1 else (param.spec.ep_dim, ways)
            numbered = [local + cut.dp_shard * part + mesh.world * len(found) for part in range(parts)]
            found[fqn] = whole(numbered, param, dim)
    return found


def _by_rows(param: NamedParam, mesh: Mesh, first: int) -> Domains:
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
    numbers: Domains = first + row // -(-rows // mesh.dp_shard) * mesh.tp + part
    return numbers


def _owners(scenario: Scenario, params: list[NamedParam], mesh: Mesh, ways: int) -> dict[str, Domains]:
    """Of each element that a model-parallel rank has, the rank that owns it."""
    owner = {p.fqn: np.zeros(local_numel(p, mesh, ways), np.int64) for p in params}
    for rank in range(mesh.dp_shard):
        for shard in shards(scenario, params, mesh, rank, ways):
            owner[shard.fqn][shard.start : shard.end] = rank
    return owner
