"""What NeMo Automodel's checkpointer wrote: the model as safetensors or a distributed checkpoint, the optimizer as the
latter.

Where a save also exported the model in Hugging Face's form, the exported file is what is read, and not the shards
beside it. The optimizer's state has each parameter's hyperparameters under its name; a schedule lies beside it as
`sched`. The random generators that a recipe keeps have a file for each rank, or for each data-parallel rank.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np

from shardproof.mechanisms.param_scheduler import OWN_SCHEDULES
from shardproof.models import ModelSpec, model_spec
from shardproof.observe.logical import Logical, Value
from shardproof.observe.record import NUMPY_NAME, WRITTEN, Record, whole
from shardproof.program import Op
from shardproof.readers.errors import bad
from shardproof.readers.generators import numpy_state, numpy_state_in_parts, python_state, tensor_state
from shardproof.readers.pieces import KeyPath, ObjectPiece, Piece, pieces
from shardproof.readers.roles import records_of
from shardproof.readers.safetensors import sharded_pieces
from shardproof.readers.stored import TorchStored
from shardproof.readers.symbolic import Name
from shardproof.readers.unknown import unknown_record
from shardproof.readers.vocabulary import Vocabulary
from shardproof.scenario import Scenario
from shardproof.systems.automodel.generators import KEY
from shardproof.systems.automodel.pretrained import CONSOLIDATED, exported, file_name

VOCABULARY = Vocabulary(objects=frozenset({Name("nemo_automodel.components.training.rng", "RNGState")}))

_NUMPY: tuple[KeyPath, KeyPath, KeyPath, KeyPath, KeyPath] = (
    ("np_bit_generator",), ("np_keys",), ("np_position",), ("np_has_gauss",), ("np_cached_gaussian",),
)  # fmt: skip
"""Where releases from 0.6.0 on keep numpy's state."""

_CLASS, _ARGUMENTS = "class", "args"
"""Releases before 0.6.0 pickle an object: which class's it is, and what that was called with, which is nothing."""

_OF_GPUS = "cuda_rng_state"
"""The states of a GPU's generators: nothing on a CPU, and not compared yet on a GPU."""

_OF_A_RANK = re.compile(r"rng_(global|dp)_rank_(\d{1,6})\.pt")


class AutomodelStored(TorchStored):
    """The model in files of its own, and the optimizer's state always flat, by parameter."""

    vocabulary = VOCABULARY

    def read(self, path: Path, op: Op, scenario: Scenario) -> list[Record]:
        model = model_spec(scenario.model)
        records = list(records_of(_native(_pieces(path, model, scenario), model), op.index, model, str(path)))
        return [*records, *_generators(path / KEY, op, scenario)]

    def must_hold(self, live: Logical, op: Op, scenario: Scenario) -> Logical:
        return _as_exported(super().must_hold(live, op, scenario), scenario)

    def flattens(self, scenario: Scenario) -> bool:
        return True


def _native(found: Iterable[Piece], model: ModelSpec) -> Iterator[Piece]:
    """The pieces under the names that the model has for its parameters, where a file of one of Automodel's own
    classes has others."""
    names = {file_name(model.name, p.fqn): p.fqn for p in model.params}
    for piece in found:
        section, *rest = piece.path
        if section == "model" and len(rest) == 1:
            piece = replace(piece, path=(section, names.get(str(rest[0]), rest[0])))
        yield piece


def _pieces(path: Path, model: ModelSpec, scenario: Scenario) -> Iterator[Piece]:
    if scenario.checkpoint == "safetensors":
        shapes = {file_name(model.name, p.fqn): p.spec.shape for p in model.params}
        shapes |= {fqn: b.shape for fqn, b in model.buffers()}
        folder = path / "model" / "consolidated" if CONSOLIDATED in scenario.options else path / "model"
        yield from sharded_pieces(folder, shapes)
    else:
        for piece in pieces(path / "model"):
            yield replace(piece, path=("model", *piece.path))
    for piece in pieces(path / "optim"):
        if piece.path[:1] == ("sched",) and scenario.optimizer.schedule in OWN_SCHEDULES:
            if piece.path[1:] == ("num_steps",):  # the rest is what it was made with; a load that goes by it shows
                yield replace(piece, path=("extra", "scheduler", "last_epoch"))
        elif piece.path[:1] == ("sched",):
            yield replace(piece, path=("extra", "scheduler", *piece.path[1:]))
        else:
            yield piece


def _generators(folder: Path, op: Op, scenario: Scenario) -> Iterator[Record]:
    """The states of random generators, under the number of the rank that they are of: `torch.1`."""
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        of = _OF_A_RANK.fullmatch(path.name)
        if of is None:
            raise bad(f"{folder}: file", path.name, f"files such as {KEY}_global_rank_0.pt", "a StatefulRNG's folder")
        rank = int(of[2]) * (1 if of[1] == "global" else op.mesh.tp)
        held = {piece.path: piece for piece in pieces(path)}
        states = {
            "python": python_state(held, ("random_rng_state",)),
            "numpy": numpy_state(held, ("np_rng_state",)) or numpy_state_in_parts(held, _NUMPY),
            "torch": tensor_state(held, ("torch_rng_state",)),
        }
        for name, value in states.items():
            if value is not None:
                at = f"{name}.{rank}"
                yield whole(op.index, 0, "rng", at, value.dtype, value.shape, value.data, WRITTEN)
        for piece in held.values():
            if not _says_nothing(piece, scenario):
                yield unknown_record(op.index, piece, (KEY, rank, *piece.path))


def _says_nothing(piece: Piece, scenario: Scenario) -> bool:
    """Whether a piece of a generator's file needs no comparison."""
    name = piece.path[0]
    if name in (_ARGUMENTS, _OF_GPUS) and isinstance(piece, ObjectPiece) and not piece.value:
        return True
    return name == _CLASS or (name == _OF_GPUS and scenario.device != "cpu")


def _as_exported(written: Logical, scenario: Scenario) -> Logical:
    """What an export must hold: parameters and buffers in the dtypes of the file that was loaded, rounded once."""
    if CONSOLIDATED not in scenario.options:
        return written
    model = model_spec(scenario.model)
    dtypes = {p.fqn: exported(scenario, p.spec) for p in model.params} | {fqn: b.dtype for fqn, b in model.buffers()}
    return {k: _cast(v, dtypes[k.fqn]) if k.role in ("param", "buffer") else v for k, v in written.items()}


def _cast(value: Value, dtype: str) -> Value:
    if value.dtype == dtype:
        return value
    held, asked = (ml_dtypes.bfloat16 if name == "bf16" else NUMPY_NAME[name] for name in (value.dtype, dtype))
    return Value(dtype, value.shape, np.frombuffer(value.data, held).astype(asked).tobytes())


STORED = AutomodelStored()
