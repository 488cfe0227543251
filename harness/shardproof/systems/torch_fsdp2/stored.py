"""FSDP2's checkpoints: those of torch, as the harness reads them for everybody."""

from __future__ import annotations

from pathlib import Path

from shardproof.mechanisms.fsdp2.formats import HUB, checkpoint_plan, hub_folder
from shardproof.models import model_spec
from shardproof.observe.logical import Logical
from shardproof.observe.record import Record
from shardproof.program import Op, expand
from shardproof.readers.pieces import pieces
from shardproof.readers.roles import records_of
from shardproof.readers.safetensors import sharded_pieces
from shardproof.readers.stored import TorchStored
from shardproof.scenario import Scenario


class Fsdp2Stored(TorchStored):
    """With `ignore_frozen_params`, checkpoints have no parameter that is frozen when they are made."""

    def read(self, path: Path, op: Op, scenario: Scenario) -> list[Record]:
        plan = checkpoint_plan(scenario.checkpoint)
        if plan.form != HUB:
            return super().read(path, op, scenario)
        model = model_spec(scenario.model)
        shapes = {p.fqn: p.spec.shape for p in model.params} | {fqn: b.shape for fqn, b in model.buffers()}
        found = (*sharded_pieces(hub_folder(plan, path), shapes), *pieces(path))
        return list(records_of(found, op.index, model, str(path)))

    def must_hold(self, live: Logical, op: Op, scenario: Scenario) -> Logical:
        must = super().must_hold(live, op, scenario)
        if not checkpoint_plan(scenario.checkpoint).ignore_frozen:
            return must
        frozen = frozen_at(scenario, op.taken)
        return {key: value for key, value in must.items() if key.role != "param" or key.fqn not in frozen}


def frozen_at(scenario: Scenario, index: int) -> set[str]:
    """The names of the parameters that are not trained after an operation."""
    ops = expand(scenario)[: index + 1]
    since = max(op.index for op in ops if op.kind == "build")
    joined = any(op.kind in ("unfreeze", "add_group") for op in ops[since:])
    kept = {"yes", "later"} if joined else {"yes"}
    return {p.fqn for p in model_spec(scenario.model).params if p.spec.trainable not in kept}


STORED = Fsdp2Stored()
"""The reader of FSDP2's checkpoints, for every system that writes the same."""
