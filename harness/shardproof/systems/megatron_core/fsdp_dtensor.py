"""What a checkpoint of Megatron-Core's format fsdp_dtensor holds, as records, read without the library.

Model and optimizer state lie there as tensors of their parameter's shape. A fused weight, such as SwiGLU's gate and up
projection, is taken apart: each section is stored under a name of its own. The reader puts a section's rows back to
where the logical parameter has them, so that a library that cut in the wrong place shows as a gap, an overlap or wrong
elements of that parameter.

*Verifies*: what `pieces` does; that there is nothing unknown.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import prod
from pathlib import Path

from shardproof.mechanisms.megatron.ignored import unknown_records
from shardproof.models import NamedParam, model_spec
from shardproof.observe.record import ITEMSIZE, Record
from shardproof.program import Op
from shardproof.readers.errors import bad
from shardproof.readers.pieces import ObjectPiece, Piece, TensorPiece, pieces
from shardproof.readers.roles import (
    STATE_ROLE,
    Target,
    hyperparameter_records,
    integer_record,
    number_record,
    setting_records,
    tensor_records,
)
from shardproof.scenario import Scenario
from shardproof.systems.megatron_core.contract import CONTRACT

FORM = "a checkpoint of format fsdp_dtensor"


def read_fsdp_dtensor(path: Path, op: Op, scenario: Scenario) -> list[Record]:
    """The `written` records of the checkpoint that the save `op` left at `path`.

    Raises:
        CheckpointError: missing, truncated, foreign, inconsistent or hostile.
    """
    reader = _Reader(op, scenario, path)
    return [record for piece in pieces(path) for record in reader.records(piece)]


class _Reader:
    """Turns one piece after the other into records."""

    def __init__(self, op: Op, scenario: Scenario, path: Path) -> None:
        self.op, self.scenario, self.model = op, scenario, model_spec(scenario.model)
        self.target = Target(op.index, self.model, str(path))
        self.params = {named.fqn: named for named in self.model.params}
        self.buffers = {name for name, _ in self.model.buffers()}
        self.sections = {
            named.fqn + suffix: (named, index)
            for named in self.model.params
            for index, (suffix, _) in enumerate(named.spec.sections)
        }

    def records(self, piece: Piece) -> Iterator[Record]:
        match piece.path:
            case ("model", str(name)):
                yield from self.tensor(piece, "", self.name(name))
            case ("optimizer", "state", str(name), str(what)):
                yield from self.tensor(piece, STATE_ROLE.get(what, what), self.name(name))
            case ("optimizer", "param_to_group_meta", str(name), str(what), *_):
                yield from self.group(piece, self.name(name), what)
            case ("optimizer", "grad_scaler", "scale") if self.scenario.optimizer.loss_scale:
                yield number_record(self.target, piece, "scaler", "scale", "fp32")
            case ("optimizer", "grad_scaler", "growth_tracker" | "hysteresis_tracker" as name) if (
                self.scenario.optimizer.loss_scale
            ):
                yield integer_record(self.target, piece, "scaler", name)
            case ("opt_param_scheduler", "num_steps") if self.scenario.optimizer.schedule != "none":
                yield integer_record(self.target, piece, "scheduler", "last_epoch")
            case ("iteration",):
                yield integer_record(self.target, piece, "iteration", "iteration")
            case path:
                yield from unknown_records(self.op.index, piece, path)

    def name(self, stored: str) -> str:
        """A stored name without the wrappers around the model."""
        known = self.params.keys() | self.sections.keys() | self.buffers
        while stored not in known and stored.startswith("module."):
            stored = stored.removeprefix("module.")
        return stored

    def group(self, piece: Piece, fqn: str, what: str) -> Iterator[Record]:
        """A field of the group of a parameter, stored once for each parameter."""
        if what == "step":
            yield number_record(self.target, piece, "step", fqn, "fp32")
            return
        yield from setting_records(self.target, piece, fqn, what)
        if not (isinstance(piece, ObjectPiece) and piece.value is None):
            yield from hyperparameter_records(self.target, piece, fqn, what)

    def tensor(self, piece: Piece, role: str, name: str) -> Iterator[Record]:
        """A tensor of a parameter, or of one of its sections. role: empty for the parameter itself; what is stored
        is then its master, where it has one."""
        if name in self.buffers:
            yield from tensor_records(self.target, piece, "buffer", name)
            return
        named, index = self.sections.get(name, (self.params.get(name), None))
        if not role and named is not None:
            trained = self.model.param(named.spec.tied_to or named.fqn).spec.trainable == "yes"
            mastered = trained and CONTRACT.stages(self.scenario, named.spec, self.op.mesh).master
            role = "master" if mastered else "param"
            if named.spec.tied_to is not None:  # stored under this name as well
                for record in tensor_records(self.target, piece, role, named.spec.tied_to):
                    yield record._replace(replica=self.op.mesh.tp)
                return
        # every section has a copy of its parameter's step
        if role == "step" and named is not None and index is not None:
            for record in tensor_records(self.target, piece, role, named.fqn):
                yield record._replace(replica=index)
            return
        if named is None or index is None or not isinstance(piece, TensorPiece):
            yield from tensor_records(self.target, piece, role or "param", name)
            return
        for part in self.in_parameter(piece, named, index):
            yield from tensor_records(self.target, part, role, named.fqn)

    def in_parameter(self, piece: TensorPiece, named: NamedParam, index: int) -> Iterator[TensorPiece]:
        """A piece of a section, as pieces of the parameter. A section that has fewer rows than it should leaves a gap
        there.

        Raises:
            CheckpointError: a piece that no section of the parameter can have.
        """
        spec, rest = named.spec, named.spec.shape[1 + named.spec.stacked :]
        rows = spec.shape[1] if spec.stacked else spec.sections[index][1]
        if piece.shape[1:] != rest or piece.size[1:] != rest or piece.start[0] + piece.size[0] > rows:
            what = f"{self.target.origin}: shape of {'.'.join(map(str, piece.path))}"
            raise bad(what, str(piece.shape), f"pieces of whole rows of {(rows, *rest)}", FORM)
        if spec.stacked:
            yield replace(piece, shape=spec.shape, start=(index, *piece.start), size=(1, *piece.size))
            return
        # each tp rank has a share of every section, and its shares lie one after the other
        ranks = self.op.mesh.tp if spec.tp_dim == 0 else 1
        share, local = rows // ranks, spec.shape[0] // ranks
        before = sum(size for _, size in spec.sections[:index]) // ranks
        row_bytes = prod(rest) * ITEMSIZE[piece.dtype]
        for rank in range(ranks):
            first = max(piece.start[0], rank * share)
            last = min(piece.start[0] + piece.size[0], (rank + 1) * share)
            if first < last:
                at = rank * local + before + first - rank * share
                data = piece.data[(first - piece.start[0]) * row_bytes : (last - piece.start[0]) * row_bytes]
                zeros = (0,) * len(rest)
                yield replace(piece, shape=spec.shape, start=(at, *zeros), size=(last - first, *rest), data=data)
