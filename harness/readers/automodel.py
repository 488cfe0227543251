"""What NeMo Automodel's checkpointer wrote: the model as safetensors or a distributed checkpoint, the optimizer as one.

The optimizer's state has each parameter's hyperparameters under its name; a schedule lies beside it as `sched`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from harness.models import ModelSpec, model_spec
from harness.observe.record import Record
from harness.program import Op
from harness.readers.pieces import Piece, pieces
from harness.readers.roles import records_of
from harness.readers.safetensors import sharded_pieces
from harness.scenario import Scenario


def read_automodel(path: Path, op: Op, scenario: Scenario) -> list[Record]:
    """The `written` records of the save `op`.

    Raises:
        CheckpointError: missing, truncated, foreign, inconsistent or hostile.
    """
    model = model_spec(scenario.model)
    return list(records_of(_pieces(path, model, scenario.checkpoint), op.index, model, str(path)))


def _pieces(path: Path, model: ModelSpec, form: str) -> Iterator[Piece]:
    if form == "safetensors":
        shapes = {p.fqn: p.spec.shape for p in model.params} | {fqn: b.shape for fqn, b in model.buffers()}
        yield from sharded_pieces(path / "model", shapes)
    else:
        for piece in pieces(path / "model"):
            yield replace(piece, path=("model", *piece.path))
    for piece in pieces(path / "optim"):
        if piece.path[:1] == ("sched",):
            yield replace(piece, path=("extra", "scheduler", *piece.path[1:]))
        else:
            yield piece
