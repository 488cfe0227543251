"""What NeMo Automodel's checkpointer wrote: the model as safetensors or a distributed checkpoint, the optimizer as one.

The optimizer's state has each parameter's hyperparameters under its name; a schedule lies beside it as `sched`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from harness.models import ModelSpec, model_spec
from harness.observe.record import Record
from harness.oracle.pretrained import file_name
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
    return list(records_of(_native(_pieces(path, model, scenario.checkpoint), model), op.index, model, str(path)))


def _native(found: Iterable[Piece], model: ModelSpec) -> Iterator[Piece]:
    """The pieces under the model's names of its parameters, where the file has others."""
    names = {file_name(model.name, p.fqn): p.fqn for p in model.params}
    for piece in found:
        section, *rest = piece.path
        if section == "model" and len(rest) == 1:
            piece = replace(piece, path=(section, names.get(str(rest[0]), rest[0])))
        yield piece


def _pieces(path: Path, model: ModelSpec, form: str) -> Iterator[Piece]:
    if form == "safetensors":
        shapes = {file_name(model.name, p.fqn): p.spec.shape for p in model.params}
        shapes |= {fqn: b.shape for fqn, b in model.buffers()}
        yield from sharded_pieces(path / "model", shapes)
    else:
        for piece in pieces(path / "model"):
            yield replace(piece, path=("model", *piece.path))
    for piece in pieces(path / "optim"):
        if piece.path[:1] == ("sched",):
            yield replace(piece, path=("extra", "scheduler", *piece.path[1:]))
        else:
            yield piece
