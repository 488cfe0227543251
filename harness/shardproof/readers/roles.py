"""Turns each piece of a checkpoint into a record with a role, as defined in harness/shardproof/observe/record.py.

The keys are those of torch.distributed.checkpoint.state_dict in the layout `{"model", "optim", "extra"}`, bare or
under one key `app`: parameters and buffers by fully qualified name, optimizer state by parameter name, param groups
as a list or, with flatten_optimizer_state_dict, by parameter name; scheduler and scaler state in `extra`.

*Does not verify*: the rest of the scheduler's and scaler's own state, the iteration count, and keys outside of the
three sections.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod

import numpy as np

from shardproof.diff import numpy_dtype
from shardproof.models import ModelSpec
from shardproof.observe.generators import state_value
from shardproof.observe.record import ITEMSIZE, NUMPY_NAME, WRITTEN, Record, whole
from shardproof.observe.settings import OTHERWISE, RECORDED, SETTING, line_of
from shardproof.readers.errors import CheckpointError, bad, unfamiliar
from shardproof.readers.pieces import KeyPath, ObjectPiece, Piece, TensorPiece, key_of

STATE_ROLE = {"momentum_buffer": "momentum", "master_param": "master"}
"""Optimizer state whose role has another name; every other name is its own role."""

OPTIMIZER_SECTIONS = ("optim", "optimizer")
SECTIONS = ("model", *OPTIMIZER_SECTIONS, "extra")
"""Sections of a checkpoint whose keys are read."""

GROUP_NUMBERS = ("lr", "weight_decay", "eps", "momentum", "nesterov")


@dataclass(frozen=True, slots=True)
class Target:
    """Where converted records go: op, model, the checkpoint for messages."""

    op: int
    model: ModelSpec
    origin: str


def records_of(pieces: Iterable[Piece], op: int, model: ModelSpec, origin: str) -> Iterator[Record]:
    """The records of a checkpoint's pieces, in their order.

    A name that the model lacks is a `param`, and unknown optimizer state a role of its own name: both show
    as `extra` when compared.

    Args:
        op: index of the save. origin: the checkpoint, for messages.

    Raises:
        CheckpointError: a hyperparameter, scheduler or scaler value that is no number.
        UnfamiliarError: tensors in a section of another name, of which nothing would be read.
    """
    target = Target(op, model, origin)
    buffers = {name for name, _ in model.buffers()}
    for piece in pieces:
        path = piece.path[1:] if piece.path[:1] == ("app",) else piece.path
        section, rest = (path[0], path[1:]) if len(path) > 1 else ("", ())
        if section == "model":
            name = key_of(rest)
            role = "extra_state" if name.endswith("_extra_state") else "buffer" if name in buffers else "param"
            yield from tensor_records(target, piece, role, name)
        elif section in OPTIMIZER_SECTIONS:
            yield from _optim(target, piece, rest)
        elif section == "extra":
            yield from extra_records(target, piece, rest)
        elif isinstance(piece, TensorPiece):
            form = '{"model": …, "optim": …, "extra": …}'
            raise unfamiliar(f"{origin}: section", str((path or piece.path)[0]), SECTIONS, form)


def _optim(target: Target, piece: Piece, rest: KeyPath) -> Iterator[Record]:
    if len(rest) > 2 and rest[0] == "param_groups" and isinstance(rest[1], int):
        yield from _group_records(target, piece, f"group{rest[1]}", key_of(rest[2:]))
        return
    kind, _, tail = key_of(rest).partition(".")
    fqn, _, name = tail.rpartition(".")
    if kind == "param_groups":
        yield from _group_records(target, piece, fqn, name)
    elif kind == "state":
        yield from tensor_records(target, piece, STATE_ROLE.get(name, name), fqn)


def _group_records(target: Target, piece: Piece, owner: str, name: str) -> Iterator[Record]:
    """Hyperparameters, the step where a group counts it (FusedAdam), and the line of every key that is a setting."""
    if name == "step":
        yield number_record(target, piece, "hyperparameter", f"{owner}.step")
        return
    yield from hyperparameter_records(target, piece, owner, name)
    yield from setting_records(target, piece, owner, name)


def setting_records(target: Target, piece: Piece, owner: str, name: str) -> Iterator[Record]:
    """The line of a param group's key, where the key is a setting. owner: as of `hyperparameter_records`."""
    if name not in OTHERWISE:
        text = _line_of(piece, name).encode()
        yield whole(target.op, piece.rank, SETTING, f"{owner}.{name}", "utf8", (len(text),), text, WRITTEN)


def _line_of(piece: Piece, name: str) -> str:
    """A setting's line, as `shardproof.observe.settings` has it of a live one."""
    match piece:
        case TensorPiece():
            return f"tensor {NUMPY_NAME[piece.dtype]} {piece.shape}"
        case ObjectPiece(value=value):
            return line_of(value, with_number=name not in RECORDED)


def tensor_records(target: Target, piece: Piece, role: str, fqn: str) -> Iterator[Record]:
    """The record of a stored tensor. A bare number, such as a step counter, becomes a scalar of its own type."""
    match piece:
        case TensorPiece():
            yield Record(target.op, piece.rank, WRITTEN, role, fqn, piece.dtype, piece.shape, piece.start, piece.size,
                         piece.data)  # fmt: skip
            if piece.scale_inv:
                scales = piece.scale_inv * prod(piece.size)
                yield Record(target.op, piece.rank, WRITTEN, "quant_scale", f"{fqn}.{role}", "fp32", piece.shape,
                             piece.start, piece.size, scales)  # fmt: skip
        case ObjectPiece(value=None):
            return
        case ObjectPiece(value=int(value)) if not isinstance(value, bool):
            yield integer_record(target, piece, role, fqn)
        case ObjectPiece():
            yield number_record(target, piece, role, fqn)


def hyperparameter_records(target: Target, piece: Piece, owner: str, name: str) -> Iterator[Record]:
    """The record of a param group's number. owner: `group{i}`, or the parameter's name where a checkpoint is
    flattened."""
    role = "hyperparameter"
    if name == "betas" and isinstance(piece, ObjectPiece) and isinstance(piece.value, list) and len(piece.value) == 2:
        for number, value in enumerate(piece.value, 1):
            yield number_record(target, ObjectPiece(piece.path, piece.rank, value), role, f"{owner}.beta{number}")
    elif name == "params" and isinstance(piece, ObjectPiece) and isinstance(piece.value, list):
        text = "\n".join(str(fqn) for fqn in piece.value).encode(errors="replace")
        yield whole(target.op, piece.rank, role, f"{owner}.params", "utf8", (len(text),), text, WRITTEN)
    elif name in ("betas", "params"):
        raise _not_a_number(target, piece, "something else than a pair of betas or a list of names")
    elif name in GROUP_NUMBERS:
        yield number_record(target, piece, role, f"{owner}.{name}")


def extra_records(target: Target, piece: Piece, rest: KeyPath) -> Iterator[Record]:
    """The state of scheduler, scaler and random generators, by their keys in a section `extra`."""
    match rest:
        case ("scheduler", "last_epoch"):
            yield integer_record(target, piece, "scheduler", "last_epoch")
        case ("scheduler", "_last_lr") if isinstance(piece, ObjectPiece) and isinstance(piece.value, list):
            for index, value in enumerate(piece.value):
                yield number_record(target, ObjectPiece(piece.path, piece.rank, value), "scheduler", f"last_lr.{index}")
        case ("scheduler", "_last_lr", int(index)):  # a capturable optimizer keeps its rates as tensors
            yield number_record(target, piece, "scheduler", f"last_lr.{index}")
        case ("rng", *name) if isinstance(piece, TensorPiece):
            state = state_value(piece.data)
            yield whole(target.op, 0, "rng", key_of(tuple(name)), state.dtype, state.shape, state.data, WRITTEN)
        case ("scaler", "scale"):
            yield number_record(target, piece, "scaler", "scale", "fp32")
        case ("scaler", "_growth_tracker"):
            yield integer_record(target, piece, "scaler", "growth_tracker")


def number_record(target: Target, piece: Piece, role: str, fqn: str, dtype: str = "fp64") -> Record:
    """A piece's one number, in a floating-point dtype."""
    value = _scalar(target, piece)
    try:
        data = struct.pack("<d" if dtype == "fp64" else "<f", value)
    except (OverflowError, struct.error):
        raise _not_a_number(target, piece, f"{value!r}") from None
    return whole(target.op, piece.rank, role, fqn, dtype, (), data, WRITTEN)


def integer_record(target: Target, piece: Piece, role: str, fqn: str) -> Record:
    """A piece's one number, which must be whole."""
    value = _scalar(target, piece)
    if not -(1 << 63) <= value < 1 << 63 or value != int(value):
        raise _not_a_number(target, piece, f"{value!r}")
    return whole(target.op, piece.rank, role, fqn, "int64", (), struct.pack("<q", int(value)), WRITTEN)


def _scalar(target: Target, piece: Piece) -> int | float:
    """A piece's one number; the lr may be a tensor with one element."""
    match piece:
        case ObjectPiece(value=int(value) | float(value)):
            return value
        case TensorPiece(dtype=dtype, data=data) if len(data) == ITEMSIZE[dtype]:
            return float(np.frombuffer(data, numpy_dtype(dtype))[0])
        case ObjectPiece(value=value):
            raise _not_a_number(target, piece, type(value).__name__)
    raise _not_a_number(target, piece, "a tensor with several elements")


def _not_a_number(target: Target, piece: Piece, given: str) -> CheckpointError:
    return bad(f"{target.origin}: value of {key_of(piece.path)!r}", given, "one number", "lr = 0.1")
