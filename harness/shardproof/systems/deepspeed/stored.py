"""DeepSpeed's checkpoints as the judge reads them, without torch and without the library.

A folder of files of torch.save, one folder a tag. Stages 1 and 2: `mp_rank_00_model_states.pt` with the module's whole
state dict, the schedule and the counters, and from every rank `zero_pp_rank_{rank}_mp_rank_00_optim_states.pt` (with
`bf16_` in front, in bf16) with its own part of the masters and moments, flat and without the padding at the end, the
param groups and the loss scaler. Stage 3 has a file `zero_pp_rank_{rank}_mp_rank_00_model_states.pt` for every rank
instead of the first; the state dict in it has empty tensors for parameters. What is trained is in the flat masters
only, which are the parameters themselves in fp32, and what is frozen in fragments beside the state dict.

*Verifies*: what `shardproof.readers.pieces` does; that every flat tensor is long enough for what its rank owns; that
every rank's file has the same loss scaler. *Does not verify*: `param_slice_mappings`, which the library writes for its
conversion tool, the copy of the configuration, names of buffers and shapes of parameters, `latest`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from shardproof.models import model_spec
from shardproof.observe.logical import Key, Logical, Value
from shardproof.observe.record import ITEMSIZE, WRITTEN, Record
from shardproof.program import Op
from shardproof.readers.errors import bad
from shardproof.readers.pieces import KeyPath, ObjectPiece, Piece, TensorPiece, key_of, pieces
from shardproof.readers.roles import (
    STATE_ROLE,
    Target,
    extra_records,
    hyperparameter_records,
    integer_record,
    number_record,
    setting_records,
    tensor_records,
)
from shardproof.readers.stored import TorchStored
from shardproof.readers.symbolic import Name
from shardproof.readers.vocabulary import Vocabulary
from shardproof.scenario import Scenario
from shardproof.systems.deepspeed import flat, universal
from shardproof.systems.deepspeed.contract import CONTRACT

FORM = "a checkpoint as DeepSpeed's engine writes it"
_MODEL_FILE = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_00_model_states\.pt")
_OPTIM_FILE = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_00_optim_states\.pt")

VOCABULARY = Vocabulary(
    objects=frozenset(
        {
            Name("deepspeed.runtime.fp16.loss_scaler", "LossScaler"),
            Name("deepspeed.runtime.fp16.loss_scaler", "DynamicLossScaler"),
            Name("deepspeed.runtime.zero.config", "ZeroStageEnum"),
            Name("deepspeed.utils.tensor_fragment", "fragment_address"),
        }
    )
)


class DeepSpeedStored(TorchStored):
    """The files of one tag."""

    vocabulary = VOCABULARY

    def read(self, path: Path, op: Op, scenario: Scenario) -> list[Record]:
        return list(_Reader(path, op, scenario).records())

    def must_hold(self, live: Logical, op: Op, scenario: Scenario) -> Logical:
        """What lasts, with the number of steps taken. Under stage 3 a parameter that has a master is stored as that
        only, and every other one under its own name only."""
        written = super().must_hold(live, op, scenario)
        if scenario.sharding == "fully_shard":
            masters = {key.fqn for key in written if key.role == "master"}
            stored = {p.fqn for p in model_spec(scenario.model).unique_params} - masters
            written = {key: value for key, value in written.items() if key.role != "param" or key.fqn in stored}
        written[Key(op.index, WRITTEN, "iteration", "iteration")] = Value("int64", (), np.int64(op.iteration).tobytes())
        return written


class _Reader:
    def __init__(self, path: Path, op: Op, scenario: Scenario) -> None:
        self.path, self.op, self.scenario = path, op, scenario
        self.model = model_spec(scenario.model)
        self.target = Target(op.index, self.model, str(path))
        self.buffers = {name for name, _ in self.model.buffers()}

    def records(self) -> Iterator[Record]:
        """The records of every file."""
        whole = [] if self.in_parts else [0]
        for rank, path in self.files(_MODEL_FILE, whole or list(range(self.op.mesh.world))):
            yield from self.of_model(rank, pieces(path))
        if self.scenario.checkpoint == "universal":
            yield from self.of_universal(self.path / "zero")
            return
        for rank, path in self.files(_OPTIM_FILE, list(range(self.op.mesh.world))):
            yield from _Part(self, rank).records(pieces(path))

    def of_universal(self, folder: Path) -> Iterator[Record]:
        """The folder with every parameter whole."""
        trained = universal.names_in(flat.groups(self.scenario))
        yield from universal.tensors_of(folder, trained, stepped_role(self.scenario), self.target)
        yield from _Part(self, 0, every=True).records_of_state(pieces(folder / universal.STATE_FILE))

    @property
    def in_parts(self) -> bool:
        """Whether the model's parameters are cut into parts: stage 3."""
        return self.scenario.sharding == "fully_shard"

    def files(self, name: re.Pattern[str], ranks: list[int]) -> list[tuple[int, Path]]:
        """The checkpoint's files that match a pattern, as `(rank, file)`. Raises if a rank has no file or two."""
        found = sorted((int(m[1] or 0), path) for path in self.path.glob("*") if (m := name.fullmatch(path.name)))
        if [rank for rank, _ in found] != ranks:
            raise bad(f"{self.path}: ranks with a file {name.pattern}", [rank for rank, _ in found], ranks, FORM)
        return found

    def of_model(self, rank: int, found: Iterable[Piece]) -> Iterator[Record]:
        """The module's state dict, the schedule, and the number of steps that were not left out."""
        counted: dict[str, int] = {}
        for piece in (replace(piece, rank=rank) for piece in found):
            match piece.path:
                case ("module", *rest):
                    yield from self.of_module(piece, key_of(tuple(rest)))
                case ("frozen_param_fragments", *rest) if self.in_parts and isinstance(piece, TensorPiece):
                    yield from self.of_fragment(piece, key_of(tuple(rest)))
                case ("lr_scheduler", "last_batch_iteration") if isinstance(
                    piece, ObjectPiece
                ):  # a schedule of its own
                    steps = replace(piece, value=int(str(piece.value)) + 1)
                    yield integer_record(self.target, steps, "scheduler", "last_epoch")
                case ("lr_scheduler", *rest):
                    yield from extra_records(self.target, piece, ("scheduler", *rest))
                case ("global_steps" | "skipped_steps" as name,) if isinstance(piece, ObjectPiece):
                    counted[str(name)] = int(str(piece.value))
        steps = ObjectPiece(("global_steps",), rank, counted.get("global_steps", 0) - counted.get("skipped_steps", 0))
        yield integer_record(self.target, steps, "iteration", "iteration")

    def of_module(self, piece: Piece, name: str) -> Iterator[Record]:
        """An entry of the module's state dict; under stage 3 the empty tensors for parameters are none."""
        if name in self.buffers:
            yield from tensor_records(self.target, piece, "buffer", name)
        elif not (self.in_parts and isinstance(piece, TensorPiece) and not piece.data):
            yield from tensor_records(self.target, piece, "param", name)

    def of_fragment(self, piece: TensorPiece, name: str) -> Iterator[Record]:
        """A rank's part of a frozen parameter, with the padding of the last ones."""
        named = next((p for p in self.model.unique_params if p.fqn == name), None)
        if named is None:
            yield from tensor_records(self.target, piece, "param", name)
            return
        start, count = flat.own_part(named.spec.numel, self.op.mesh.dp, piece.rank)
        yield _flat_record(self.target, piece, "param", flat.Piece(named, 0, 0, 0, start, count))


def stepped_role(scenario: Scenario) -> str:
    """The role of what the optimizer steps."""
    return "master" if CONTRACT.master(scenario, scenario.dtype.storage) else "param"


def _flat_record(target: Target, piece: TensorPiece, role: str, part: flat.Piece) -> Record:
    """What a flat tensor holds of one parameter."""
    item, end = ITEMSIZE[piece.dtype], part.at + part.count
    if len(piece.data) < end * item:
        what = f"{target.origin}: elements of {key_of(piece.path)!r} of rank {piece.rank}"
        raise bad(what, len(piece.data) // item, f"{end} or more, for {part.named.fqn}", FORM)
    return Record(
        target.op, piece.rank, WRITTEN, role, part.named.fqn, piece.dtype, part.named.spec.shape,
        (part.start,), (part.count,), piece.data[part.at * item : end * item], flat=True,
    )  # fmt: skip


class _Part:
    """One rank's file of optimizer state."""

    def __init__(self, reader: _Reader, rank: int, *, every: bool = False) -> None:
        self.reader, self.target, self.rank = reader, reader.target, rank
        self.owned = [p for p in flat.pieces(reader.scenario, reader.op.mesh, rank) if p.count or every]
        self.scaler: dict[str, int | float] = {}
        self.stepped = stepped_role(reader.scenario)

    def records(self, found: Iterable[Piece]) -> Iterator[Record]:
        """The records of its pieces."""
        for piece in found:
            section, path = piece.path[:1], replace(piece, path=piece.path[1:], rank=self.rank)
            if section == ("optimizer_state_dict",):
                yield from self.of_optimizer(path, path.path)
        if CONTRACT.loss_scale(self.reader.scenario):
            yield from self.of_scaler()

    def records_of_state(self, found: Iterable[Piece]) -> Iterator[Record]:
        """What a universal checkpoint keeps of a rank's state: param groups, counters and the loss scaler."""
        for piece in found:
            match piece.path:
                case ("optimizer_state_dict", "state", _, "step") | ("param_groups" | "loss_scaler", *_):
                    yield from self.of_optimizer(piece, piece.path)
        if CONTRACT.loss_scale(self.reader.scenario):
            yield from self.of_scaler()

    def of_optimizer(self, piece: Piece, path: KeyPath) -> Iterator[Record]:
        """A piece of the optimizer wrapper's state dict."""
        match path:
            case ("single_partition_of_fp32_groups" | "fp32_flat_groups", int(index)):
                yield from self.of_flat(piece, index, self.stepped)
            case ("base_optimizer_state" | "optimizer_state_dict", "state", int(index), str(name)):
                yield from self.of_state(piece, index, name)
            case ("base_optimizer_state" | "optimizer_state_dict", "param_groups", *rest) | ("param_groups", *rest):
                yield from self.of_group(piece, tuple(rest))
            case ("loss_scaler", str(name)) if isinstance(piece, ObjectPiece):
                if isinstance(piece.value, int | float):
                    self.scaler[name] = piece.value

    def of_group(self, piece: Piece, path: KeyPath) -> Iterator[Record]:
        """A key of a param group, which each parameter of it that lies here has."""
        match path:
            case (int(index), str(name), *rest) if name != "params":
                for part in self.owned:
                    if part.group == index:
                        key = key_of((name, *rest))
                        yield from hyperparameter_records(self.target, piece, part.named.fqn, key)
                        yield from setting_records(self.target, piece, part.named.fqn, key)

    def of_state(self, piece: Piece, index: int, name: str) -> Iterator[Record]:
        """Records of the optimizer state of one flat tensor: a flat array is cut by parameter, a step counter is
        repeated for every parameter."""
        role = STATE_ROLE.get(name, name)
        if isinstance(piece, TensorPiece) and piece.shape:
            yield from self.of_flat(piece, index, role)
            return
        for part in self.owned:
            if part.tensor == index:
                yield from tensor_records(self.target, piece, role, part.named.fqn)

    def of_flat(self, piece: Piece, index: int, role: str) -> Iterator[Record]:
        """Cut a flat tensor into a record for each parameter that has elements in the tensor."""
        if not isinstance(piece, TensorPiece):
            return
        for part in self.owned:
            if part.tensor == index:
                yield _flat_record(self.target, piece, role, part)

    def of_scaler(self) -> Iterator[Record]:
        """The loss scaler's state, as the conventions name it."""
        held = self.scaler
        stable = held.get("cur_iter", 0) - held.get("last_overflow_iter", 0) - 1
        for name, value in (("growth_tracker", stable), ("hysteresis_tracker", held.get("cur_hysteresis", 0))):
            yield integer_record(self.target, ObjectPiece((name,), self.rank, value), "scaler", name)
        scale = ObjectPiece(("cur_scale",), self.rank, held.get("cur_scale", 0))
        yield number_record(self.target, scale, "scaler", "scale", "fp32")


STORED = DeepSpeedStored()
