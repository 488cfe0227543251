"""Scaled states of FusedAdam under FSDP2: a domain is the box that a rank holds, on every mesh."""

from __future__ import annotations

import numpy as np
import pytest
from shardproof.layout import shard_box
from shardproof.models import model_spec
from shardproof.scenario import Scenario
from shardproof.systems.transformer_engine import SYSTEM

BASE = Scenario(system="transformer-engine").with_axes(
    {"optimizer": "adamw/impl=multi_tensor", "dtype": "bf16/master=fp16/exp_avg=fp16"}
)


@pytest.mark.parametrize("mesh", ["1x1x1", "1x2x1", "1x3x1", "2x2x1", "1x1x2", "1x2x2", "1x4x2"])
@pytest.mark.parametrize("model", ["short", "dense", "te_layers"])
def test_a_domain_is_the_box_of_a_rank(model: str, mesh: str) -> None:
    asked = BASE.with_axes({"model": model, "mesh": mesh})
    domains = SYSTEM.contract.scale_domains(asked, asked.mesh)
    used: set[int] = set()
    for param in model_spec(model).unique_params:
        numbers, dim = np.array(domains[param.fqn]), param.spec.tp_dim if asked.mesh.tp > 1 else None
        numbers = numbers.reshape(param.spec.shape)
        sizes = (1, asked.mesh.dp_shard, asked.mesh.tp)
        boxes = {
            shard_box(param.spec.shape, sizes, (0, shard, part), dim)
            for shard, part in np.ndindex(asked.mesh.dp_shard, asked.mesh.tp)
        }
        held = [tuple(slice(at, at + n) for at, n in zip(b.start, b.size, strict=True)) for b in boxes if b.volume]
        found = {frozenset(np.unique(numbers[where]).tolist()) for where in held}
        assert len(found) == len(held)
        assert all(len(each) == 1 for each in found)
        own = set(domains[param.fqn])
        assert not own & used
        used |= own
