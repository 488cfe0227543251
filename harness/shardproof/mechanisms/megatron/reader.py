"""What a checkpoint of Megatron-Core holds, as records, read without torch and without the library.

There are two kinds of folder: files of torch.save, one folder a model-parallel rank (`mp_rank_*`), and a distributed
checkpoint. What all ranks have in common, such as the iteration and the optimizer's param groups, lies beside a
distributed checkpoint in `common.pt`, or, since Megatron-LM's pull request 5160 (0.19), inside it as the object
`common_state`; the reader takes whichever is there. Optimizer state lies there in one of three forms, by format:

* under its parameter's name, in the parameter's shape (`sharded`, `fully_reshardable`);
* under a number, which counts the optimizer's parameters (`plain`);
* in flat buffers, one tensor for all parameters of a gradient buffer (the `dp_zero` formats, `dp_reshardable`).

Random generators are objects of each model-parallel rank (`stored_generators`).

Where a parameter lies in a flat buffer, `flat_buffers` computes anew. If the library's own map is wrong, as in
NVIDIA/Megatron-LM issue 2777, this reader finds the values of another parameter in the place.

*Verifies*: what `pieces` does; that every buffer has the size and dtypes that the model's parameters make; that there
is nothing unknown.
*Does not verify*: padding between parameters: zeros where buffers were gathered first, uninitialised memory where each
rank wrote its own part.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from shardproof.layout import interval_boxes
from shardproof.mechanisms.megatron.flat_buffers import Buffer, Owner, Slot, buffers, local_box
from shardproof.mechanisms.megatron.groups import Entry, group_records, members
from shardproof.mechanisms.megatron.ignored import unknown_records
from shardproof.mechanisms.megatron.stored_generators import StoredGenerators
from shardproof.models import NamedParam, model_spec, storage_dtype
from shardproof.observe.record import ITEMSIZE, WRITTEN, Record
from shardproof.program import Op
from shardproof.readers.errors import bad, unfamiliar
from shardproof.readers.pieces import KeyPath, ObjectPiece, Piece, TensorPiece, pieces
from shardproof.readers.roles import STATE_ROLE, Target, integer_record, number_record, tensor_records
from shardproof.scenario import Scenario

MODEL_FILE, PARAMETER_STATE_FILE, COMMON_FILE = "model_optim_rng.pt", "distrib_optim.pt", "common.pt"
COMMON_OBJECT = "common_state/shard_0_1"
"""What a checkpoint without a `common.pt` has in its place: a ShardedObject of one shard."""
FORM = "a checkpoint as Megatron-Core's training script writes it"

_FOLDER = re.compile(r"mp_rank_(\d{2})(?:_(\d{3}))?")
_DISTRIBUTED = re.compile(r"(?:chained_(\d+)\.)?optimizer\.distributed\.dp_group_idx_(\d+)\.(.+)")
_BUCKET = re.compile(r"gbuf_idx_(\d+)\.dtype_(\(.+\))\.bucket_idx_(\d+)\.(\w+)")
_GENERATORS = re.compile(r"rng_state/shard_0\.(\d{1,4})(?:\.(\d{1,4}))?_1\.\d+(?:\.\d+)?")
"""`rng_state` of a pipeline and a tensor-parallel rank and, in releases that have it so under expert parallelism, of a
data-parallel one."""
_STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.([a-z0-9_]+)\.(.+)")
_LAYER_NORMS = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
}
"""What a transformer layer stores its norms as, whichever layers implement them → what they are called here."""
_STACKED = re.compile(r"(.+\.layers)\.(\D.*)")

MASTERS = ("param", "fp32_param", "master_param")
"""The names that optimizer state has for what the optimizer steps on."""


def read_megatron(path: Path, op: Op, scenario: Scenario) -> list[Record]:
    """The `written` records of the checkpoint that the save `op` left at `path`.

    Raises:
        CheckpointError: missing, truncated, foreign, inconsistent or hostile.
    """
    folders = sorted(path.glob("mp_rank_*")) if path.is_dir() else []
    reader = _Reader(op, scenario, path)
    if folders:
        for folder in folders:
            reader.files(folder)
    else:
        reader.distributed(path)
    return reader.finish()


class _Reader:
    """Collects the records of one checkpoint. Param groups are kept until all of their fields are there, since the
    fields say which parameters a group holds."""

    def __init__(self, op: Op, scenario: Scenario, path: Path) -> None:
        self.op, self.scenario = op, scenario
        self.model = model_spec(scenario.model)
        self.target = Target(op.index, self.model, str(path))
        self.buffer_names = {name for name, _ in self.model.buffers()}
        self.params = {p.fqn: p for p in self.model.params}
        self.records: list[Record] = []
        self.groups: dict[tuple[Owner, int], dict[str, Piece]] = {}
        self.numbered: list[tuple[Owner, KeyPath, Piece]] = []
        self.generators = StoredGenerators(op)

    # The two kinds of folder

    def files(self, folder: Path) -> None:
        match = _FOLDER.fullmatch(folder.name)
        if match is None:
            raise bad(f"{folder}: name", folder.name, "mp_rank_TP or mp_rank_TP_EP", FORM)
        owner = Owner(int(match[1]), int(match[2] or 0), experts=False)
        rank = owner.ep * self.op.mesh.tp + owner.tp
        for piece in pieces(folder / MODEL_FILE):
            self.common(replace(piece, rank=rank), owner)
        if self.scenario.sharding == "zero1":
            for piece in pieces(folder / PARAMETER_STATE_FILE):
                link, rest = _link(piece.path)
                self.gathered(replace(piece, rank=rank), replace(owner, experts=link == 1), rest)

    def distributed(self, path: Path) -> None:
        everyone = Owner(0, 0, experts=False)
        beside = (path / COMMON_FILE).exists()
        for piece in pieces(path / COMMON_FILE) if beside else ():
            self.common(piece, everyone)
        keys = set[str]()
        for piece in pieces(path):
            key, rest = str(piece.path[0]), piece.path[1:]
            keys.add(key)
            if key == COMMON_OBJECT and rest[:1] == (0,):  # objects are stored in a list of one
                self.common(replace(piece, path=rest[1:]), everyone)
            elif match := _DISTRIBUTED.fullmatch(key):
                link, index = int(match[1] or 0), int(match[2])
                owner = Owner(0, index, experts=True) if link else Owner(index, 0, experts=False)
                self.of_data_parallel_group(piece, owner, match[3], rest)
            elif match := _STATE.fullmatch(key):
                self.state(piece, match[1], match[2])
            elif match := _GENERATORS.fullmatch(key):
                self.generator(piece, int(match[1]), int(match[2] or 0), rest)
            else:
                self.model_tensor(piece, key)
        if not beside and COMMON_OBJECT not in keys:
            given = f"not there, nor the object {COMMON_OBJECT}"
            raise unfamiliar(
                f"`{COMMON_FILE}`", given, "one of the two, which hold what all ranks have in common", FORM
            )

    # What the pieces are

    def common(self, piece: Piece, owner: Owner) -> None:
        """A piece of the dict that the training script stores: model, schedule, iteration and what else there is."""
        match piece.path:
            case ("model", str(name)):
                self.model_tensor(piece, name, owner)
            case ("opt_param_scheduler", "num_steps") if self.scenario.optimizer.schedule != "none":
                self.records.append(integer_record(self.target, piece, "scheduler", "last_epoch"))
            case ("iteration",):
                self.records.append(integer_record(self.target, piece, "iteration", "iteration"))
            case ("rng_state", 0, *rest):
                self.generators.take((owner.tp, owner.ep), 0, tuple(rest), piece)
            case ("optimizer", *rest):
                link, path = _link(tuple(rest))
                self.optimizer(piece, replace(owner, experts=link == 1), path)
            case path:
                self.unknown(piece, path)

    def generator(self, piece: Piece, tp: int, dp: int, path: KeyPath) -> None:
        """A piece of the generators that a model-parallel rank stores as an object: a list of one, of which the library
        makes another list of one."""
        if path[:2] != (0, 0):
            self.unknown(piece, ("rng_state", *path))
            return
        experts = self.scenario.expert_parallel
        self.generators.take((tp, dp % experts), dp // experts, path[2:], piece)

    def unknown(self, piece: Piece, path: KeyPath) -> None:
        self.records += unknown_records(self.op.index, piece, path)

    def of_data_parallel_group(self, piece: Piece, owner: Owner, name: str, rest: KeyPath) -> None:
        """A piece of what one data-parallel group's distributed optimizer stores under its own keys."""
        if match := _BUCKET.fullmatch(name):
            buffer = self.buffer(owner, int(match[1]), match[2])
            self.bucket(piece, owner, buffer, int(match[3]), match[4])
            return
        path = rest[1:] if rest[:1] == (0,) else rest  # objects are stored in a list of one
        kind = name.partition("/")[0]
        if kind == "param_state":
            self.gathered(piece, owner, path)
        elif kind in ("optimizer", "grad_scaler"):
            self.optimizer(piece, owner, (kind, *path))
        else:
            self.unknown(piece, (kind, *path))

    def optimizer(self, piece: Piece, owner: Owner, path: KeyPath) -> None:
        """A piece of a Megatron optimizer's state dict."""
        inner = path[1:] if path[:1] == ("optimizer",) else path
        match inner:
            case ("param_groups", int(index), str(name), *_):
                self.groups.setdefault((owner, index), {})[name] = piece
            case ("state", *_) | ("fp32_from_fp16_params", *_):
                self.numbered.append((owner, inner, piece))
            case ("grad_scaler", "scale") if self.scenario.optimizer.loss_scale:
                self.records.append(number_record(self.target, piece, "scaler", "scale", "fp32"))
            case ("grad_scaler", "growth_tracker" | "hysteresis_tracker" as name) if self.scenario.optimizer.loss_scale:
                self.records.append(integer_record(self.target, piece, "scaler", name))
            case _:
                self.unknown(piece, inner)

    def model_tensor(self, piece: Piece, key: str, owner: Owner | None = None) -> None:
        """A parameter or buffer. owner: the model-parallel rank whose local tensor it is; None for a piece of the
        whole tensor."""
        if "._extra_state" in key:  # layers without quantised weights store nothing there
            if piece.data if isinstance(piece, TensorPiece) else piece.value not in (None, [None]):
                self.unknown(piece, (key,))
            return
        fqn, piece = self.unstacked(key, piece)
        role = "buffer" if fqn in self.buffer_names else "param"
        named = self.params.get(fqn)
        if owner is not None and named is not None and isinstance(piece, TensorPiece):
            start = local_box(named.spec, self.op.mesh, owner, self.scenario.expert_parallel).start
            piece = replace(piece, shape=named.spec.shape, start=start)
        self.records += tensor_records(self.target, piece, role, fqn)

    def state(self, piece: Piece, name: str, key: str) -> None:
        """Optimizer state in the shape of its parameter."""
        fqn, piece = self.unstacked(key, piece)
        role, copy = self.role(name, self.params.get(fqn))
        self.records += [r._replace(replica=copy) for r in tensor_records(self.target, piece, role, fqn)]

    def unstacked(self, key: str, piece: Piece) -> tuple[str, Piece]:
        """The name and piece of one layer, where a checkpoint stores all layers as one tensor with a dim in front."""
        match = _STACKED.fullmatch(key)
        if key in self.params or match is None or not isinstance(piece, TensorPiece) or piece.size[:1] != (1,):
            return key, piece
        fqn = f"{match[1]}.{piece.start[0]}.{match[2]}"
        for stored, name in _LAYER_NORMS.items():
            fqn = fqn if fqn in self.params else fqn.replace(stored, name)
        return fqn, replace(piece, shape=piece.shape[1:], start=piece.start[1:], size=piece.size[1:])

    def role(self, name: str, named: NamedParam | None) -> tuple[str, int]:
        """The role of a piece of optimizer state, and which copy of the value it is.

        What the optimizer steps is a master. Of an fp32 parameter, which has none, it is the parameter once more: a
        second copy, which must equal the first.
        """
        if name not in MASTERS:
            return STATE_ROLE.get(name, name), 0
        if named is not None and storage_dtype(self.scenario.dtype, named.spec) == "fp32":
            return "param", self.op.mesh.tp
        return "master", 0

    # Flat buffers

    def buffer(self, owner: Owner, index: int, dtypes: str) -> Buffer:
        known = buffers(self.scenario, self.op.mesh, owner)
        if index >= len(known) or known[index].dtypes != dtypes:
            allowed = ", ".join(f"{number} of {buffer.dtypes}" for number, buffer in enumerate(known))
            raise bad(f"{self.target.origin}: gradient buffer", f"{index} of {dtypes}", allowed, FORM)
        return known[index]

    def gathered(self, piece: Piece, owner: Owner, path: KeyPath) -> None:
        """State of a whole buffer. The path has the buffer's index, its dtypes, and the name of the state."""
        match path:
            case (int(index), str(dtypes), str(name)) if isinstance(piece, TensorPiece):
                buffer = self.buffer(owner, index, dtypes)
                self.expect_numel(piece, buffer.numel)
                for slot in buffer.slots:
                    self.flat(piece, owner, slot, buffer.unpadded_start(slot), name)
            case () | (int(),) if isinstance(piece, ObjectPiece) and piece.value is None:
                return  # the buffers of this optimizer lie in the file of another rank
            case _:
                self.unknown(piece, path)

    def bucket(self, piece: Piece, owner: Owner, buffer: Buffer, index: int, name: str) -> None:
        """Read the optimizer state of one gradient bucket, stored flat, and cut it into records for the parameters in
        the bucket."""
        if not isinstance(piece, TensorPiece):
            raise bad(f"{self.target.origin}: bucket", type(piece.value).__name__, "a tensor", FORM)
        self.expect_numel(piece, buffer.sizes[index] if index < len(buffer.sizes) else 0)
        for slot in buffer.slots:
            if slot.bucket == index:
                self.flat(piece, owner, slot, slot.start, name)

    def expect_numel(self, piece: TensorPiece, numel: int) -> None:
        if piece.shape != (numel,):
            what = f"{self.target.origin}: shape of {piece.path[0]!r}"
            raise bad(what, str(piece.shape), f"({numel},), as the model's parameters make it", FORM)

    def flat(self, piece: TensorPiece, owner: Owner, slot: Slot, at: int, name: str) -> None:
        """What a piece of a flat tensor holds of one parameter, which begins at `at` in that tensor."""
        first = max(at, piece.start[0])
        last = min(at + slot.box.volume, piece.start[0] + piece.size[0])
        if first >= last:
            return
        spec, item = slot.param.spec, ITEMSIZE[piece.dtype]
        data = piece.data[(first - piece.start[0]) * item : (last - piece.start[0]) * item]
        role, copy = self.role(name, slot.param)
        head = (self.op.index, piece.rank, WRITTEN, role, slot.param.fqn, piece.dtype, spec.shape)
        if slot.box.size == spec.shape:
            replica = copy + owner.tp
            self.records.append(Record(*head, (first - at,), (last - first,), data, flat=True, replica=replica))
            return
        position = 0
        for box in interval_boxes(slot.box.size, first - at, last - first):
            start = tuple(o + s for o, s in zip(slot.box.start, box.start, strict=True))
            end = position + box.volume * item
            self.records.append(Record(*head, start, box.size, data[position:end], replica=copy))
            position = end

    # What needs the groups

    def finish(self) -> list[Record]:
        for (_, index), entry in self.groups.items():
            self.records += group_records(self.target, entry, index, self.op, self.scenario)
        for owner, path, piece in self.numbered:
            self.numbered_state(owner, path, piece)
        self.records += self.generators.records()
        # the model's own value first, then the copies that must equal it
        return sorted(self.records, key=lambda record: record.replica)

    def numbered_state(self, owner: Owner, path: KeyPath, piece: Piece) -> None:
        """Optimizer state under the number that torch gives a parameter, or one step that holds for all parameters."""
        match path:
            case ("state", "common_step"):
                for fqn in self.owned(owner):
                    self.records.append(number_record(self.target, piece, "step", fqn, "fp32"))
            case ("state", int(number), str(name)):
                self.local(piece, owner, name, self.by_number(owner).get(number, f"number {number}"))
            case ("fp32_from_fp16_params", int(group), int(position)):
                halves = [
                    p.fqn
                    for p in members(self.groups.get((owner, group), {}), self.op, self.scenario)
                    if storage_dtype(self.scenario.dtype, p.spec) != "fp32"
                ]
                fqn = halves[position] if position < len(halves) else f"group{group}.{position}"
                self.local(piece, owner, MASTERS[0], fqn)
            case _:
                self.unknown(piece, path)

    def local(self, piece: Piece, owner: Owner, name: str, fqn: str) -> None:
        named = self.params.get(fqn)
        role, copy = self.role(name, named)
        if named is not None and isinstance(piece, TensorPiece) and role != "step":
            start = local_box(named.spec, self.op.mesh, owner, self.scenario.expert_parallel).start
            piece = replace(piece, shape=named.spec.shape, start=start)
        self.records += [r._replace(replica=copy) for r in tensor_records(self.target, piece, role, fqn)]

    def owned(self, owner: Owner) -> list[str]:
        return list(self.by_number(owner).values())

    def by_number(self, owner: Owner) -> dict[int, str]:
        """Number → parameter, over all groups of one optimizer, each in the library's order."""
        found: dict[int, str] = {}
        for (other, _), entry in sorted(self.groups.items(), key=lambda item: item[0][1]):
            if other == owner:
                names = [p.fqn for p in members(entry, self.op, self.scenario)]
                found |= zip(_numbers(entry, len(found), len(names)), names, strict=False)
        return found


def _numbers(entry: Entry, first: int, count: int) -> list[int]:
    """The numbers of a group's parameters. Where a checkpoint does not store them, they go on counting from the
    group before."""
    piece = entry.get("params")
    stored = piece.value if isinstance(piece, ObjectPiece) else None
    if isinstance(stored, list) and all(isinstance(number, int) for number in stored):
        return [number for number in stored if isinstance(number, int)]
    return list(range(first, first + count))


def _link(path: KeyPath) -> tuple[int, KeyPath]:
    """Which optimizer of a ChainedOptimizer a path belongs to, and the rest of the path. An optimizer that is alone
    has no number in front."""
    chained = len(path) > 1 and isinstance(path[0], int) and not _is_buffer(path)
    return (int(path[0]), path[1:]) if chained else (0, path)


def _is_buffer(path: KeyPath) -> bool:
    """Whether a path begins with a gradient buffer: its index and its dtypes."""
    return isinstance(path[1], str) and path[1].startswith("(")
