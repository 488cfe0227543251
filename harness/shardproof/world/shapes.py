"""What DTensor works out from shapes and from placements, remembered from one rank to the next.

For every operator that a rank meets for the first time, DTensor asks torch's fake tensors which shape, strides and
dtype its result has, and then chooses how the result is sharded: most of the processor time of a rank that shards,
steps and saves. A cache of DTensor's own that keeps the answers keeps the mesh of who asked as well, so that no other
rank may have it (`shardproof.world.host`). But what a result's shape is depends on the operator, on shapes, strides and
dtypes of whole tensors and on plain arguments; how it is sharded depends on placements and on the size of the mesh
besides, wherever the arguments may stay as they are; and neither depends on a rank or a value. These answers are what
is remembered here: rank 0 of a job writes down what was new to it, the server reads it, and ranks that are forked
later ask nobody. What the server has read it also keeps for the next run (`shardproof.world.shapes_kept`), unless a
library beside torch says in its place how an operator of torch's is sharded.

What a library does is not changed by it, but two functions of torch are not run again. So there are *cold* ranks, which
ask torch for everything and compare what it says with what is remembered: those in which a failure has to come again,
and those of a tenth of the scenarios, another tenth each day. An answer that is not the remembered one ends the rank
with an error of ours, and nothing of it is kept. With `SHARDPROOF_COLD=1` in the environment nothing is remembered.
"""

from __future__ import annotations

import marshal
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, fields
from datetime import date
from pathlib import Path
from typing import Any

from shardproof.errors import HarnessError
from shardproof.world import shapes_kept

COLD = "SHARDPROOF_COLD"
MOST = 100_000  # answers that are remembered; a nightly of torch-fsdp2 comes to some thousands
MOST_BYTES = 16 << 20  # of a file of answers

Plain = Any
"""None, a bool, an int, a str, or a tuple of such."""

SHAPES, SHARDINGS = "_propagate_tensor_meta_non_cached", "propagate_op_sharding_non_cached"
"""Methods of DTensor's that answer."""

TORCHS = "aten."
"""What the names of torch's own operators begin with; of others a library says how shapes come out."""

ONE_IN = 10


def drawn(scenario_id: str, today: date | None = None) -> bool:
    """Whether the ranks of a scenario are cold today: one scenario in ten is, and each of them one day in ten."""
    day = (today or date.today()).toordinal()
    return (int(scenario_id[:8], 16) + day) % ONE_IN == 0


class _UnknownError(Exception):
    """Something that a key cannot hold: the answer may depend on more than can be compared."""


remembered: dict[Plain, Plain] = {}


@dataclass
class _State:
    """What is this process' own. installed: torch may be asked by way of this module. cold: see above. new: what torch
    was asked here. wrong: operators of which torch says something else than what is remembered. kept: where answers are
    kept for the next run; None where they are not."""

    installed: bool = False
    cold: bool = False
    new: dict[Plain, Plain] = field(default_factory=dict)
    wrong: set[str] = field(default_factory=set)
    kept: shapes_kept.Kept | None = None

    def hear(self, key: Plain, answer: Plain) -> None:
        """Take down what torch said."""
        if remembered.setdefault(key, answer) != answer:
            self.wrong.add(key[0])
        self.new[key] = answer


_state = _State()


def install() -> None:
    """Let DTensor look into `remembered` before torch is asked, in this process and in all that are forked from it."""
    if _state.installed or os.environ.get(COLD) or "torch.distributed.tensor" not in sys.modules:
        return
    from torch.distributed.tensor import DTensor, _sharding_prop

    propagators = _sharding_prop.ShardingPropagator
    if not hasattr(propagators, SHAPES):  # another torch, which may be organised in another way
        return
    _state.installed = True
    _ask_first(propagators, SHAPES, _Shapes())
    propagator = DTensor._op_dispatcher.sharding_propagator
    if _Shardings.known_of(propagator):
        _ask_first(propagators, SHARDINGS, _Shardings(propagator))
        # DTensor's own cache, which calls the method that it was made with
        propagator.propagate_op_sharding = _sharding_prop.LocalLRUCache(getattr(propagator, SHARDINGS))
        if _Shardings.of_torch_alone(propagator):
            _state.kept = shapes_kept.of_this_torch()
            remembered.update(_state.kept.read())


def _ask_first(kind: Any, name: str, plainly: _Shapes | _Shardings) -> None:
    """Replace a method of DTensor's by one that calls it for what is not remembered, or in a cold rank for all."""
    own = getattr(kind, name)

    def asked_first(self: Any, op_schema: Any) -> Any:
        try:
            key = plainly.key(op_schema)
        except _UnknownError:
            return own(self, op_schema)
        if key in remembered and not _state.cold:
            return plainly.made(remembered[key], op_schema)
        answer = own(self, op_schema)
        try:
            _state.hear(key, plainly.plain(answer, op_schema))
        except _UnknownError:
            if key in remembered:
                _state.wrong.add(key[0])
        return answer

    setattr(kind, name, asked_first)


def begin(*, cold: bool) -> None:
    """Begin a rank.

    Args:
        cold: whether it asks torch for everything, as a user's process does, and compares.
    """
    _state.cold = cold
    _state.new.clear()


def end(path: Path | None) -> None:
    """End a rank.

    Args:
        path: where it writes down what was new to it, if it does. A disk that is full costs the next rank some time.

    Raises:
        HarnessError: something was remembered that torch does not say.
    """
    if _state.wrong:
        if _state.kept:
            _state.kept.forget()
        raise HarnessError(f"what was remembered of {', '.join(sorted(_state.wrong))} is not what torch says now")
    if path and _state.new:
        with suppress(OSError):
            path.write_bytes(marshal.dumps(list(_state.new.items())))


def read(path: Path) -> None:
    """Remember the answers that a rank of this server wrote down; nothing of the file is executed."""
    with suppress(OSError, ValueError, EOFError, TypeError):  # of a rank that was killed while it wrote
        if path.stat().st_size <= MOST_BYTES and len(remembered) < MOST:
            answers = dict(marshal.loads(path.read_bytes()))
            _keep({key: answer for key, answer in answers.items() if key not in remembered})
            remembered.update(answers)


def keep_warm_up() -> None:
    """Keep for later runs what torch was asked in this process, before any rank is forked from it."""
    _keep(_state.new)
    _state.new.clear()


def _keep(answers: dict[Plain, Plain]) -> None:
    own = {key: answer for key, answer in answers.items() if key[0].startswith(TORCHS)}
    if _state.kept and own:
        _state.kept.add(own)


class _Shapes:
    """Which shape, strides and dtype the result of an operator has."""

    def key(self, op_schema: Any) -> Plain:
        """The operator, shapes, strides and dtypes of its arguments, and what is around it."""
        return _key(op_schema)

    def plain(self, answer: Any, op_schema: Any) -> Plain:
        """An answer as plain data."""
        return _all_plain(answer, _plain_meta)

    def made(self, plain: Plain, op_schema: Any) -> Any:
        """The answer that plain data are of."""
        return _all_made(plain, _meta)


class _Shardings:
    """How the result of an operator is sharded, where its arguments may stay as they are and lie on one mesh.

    Then the answer depends on how the arguments are sharded and on the size of the mesh, and on no rank. What of an
    answer depends on one, such as the shape of its part of a view, DTensor says as another form of the arguments.
    """

    TABLES = "op_strategy_funcs", "op_single_dim_strategy_funcs", "op_to_rules"
    FIELDS = (
        ("mesh", "placements", "tensor_meta", "shard_order", "use_strided_shard_as_shard_order"),
        ("output_spec", "redistribute_schema", "needs_redistribute", "use_val_from_redistribute_schema"),
    )

    @classmethod
    def known_of(cls, propagator: Any) -> bool:
        """Whether torch says in all that is read and made here what it says in torch 2.13."""
        from torch.distributed.tensor._dtensor_spec import DTensorSpec
        from torch.distributed.tensor._op_schema import OutputSharding

        seen = tuple(tuple(each.name for each in fields(kind)) for kind in (DTensorSpec, OutputSharding))
        return seen == cls.FIELDS and {*cls.TABLES, "propagate_op_sharding"} <= vars(propagator).keys()

    @classmethod
    def of_torch_alone(cls, propagator: Any) -> bool:
        """Whether torch itself says of each of its operators how it is sharded, and no library in its place."""
        return all(
            getattr(rule, "__module__", "torch.").startswith("torch.")
            for name in cls.TABLES for op, rule in getattr(propagator, name).items() if str(op).startswith(TORCHS)
        )  # fmt: skip

    def __init__(self, propagator: Any) -> None:
        self._tables = tuple(getattr(propagator, name) for name in self.TABLES)
        self._known = tuple(map(dict, self._tables))  # what somebody registers later is asked

    def key(self, op_schema: Any) -> Plain:
        """What the shape depends on, with the size of the mesh and the placements of the arguments."""
        if any(table.get(op_schema.op) is not known.get(op_schema.op)
               for table, known in zip(self._tables, self._known, strict=True)):  # fmt: skip
            raise _UnknownError
        mesh = self._mesh(op_schema)
        specs = tuple(_plain_spec(spec, mesh) for spec in _specs_of(op_schema))
        return (*_key(op_schema), tuple(mesh.shape), specs)

    def plain(self, answer: Any, op_schema: Any) -> Plain:
        """An answer as plain data."""
        if answer.needs_redistribute or answer.redistribute_schema or answer.use_val_from_redistribute_schema:
            raise _UnknownError
        mesh = self._mesh(op_schema)
        plain = _all_plain(answer.output_spec, lambda spec: _plain_spec(spec, mesh))
        if self.made(plain, op_schema).output_spec != answer.output_spec:
            raise _UnknownError
        return plain

    def made(self, plain: Plain, op_schema: Any) -> Any:
        """The answer that plain data are of."""
        from torch.distributed.tensor._op_schema import OutputSharding

        mesh = self._mesh(op_schema)
        return OutputSharding(_all_made(plain, lambda spec: _spec(spec, mesh)))

    def _mesh(self, op_schema: Any) -> Any:
        meshes = [spec.mesh for spec in _specs_of(op_schema)]
        if not meshes or any(mesh != meshes[0] for mesh in meshes):
            raise _UnknownError
        return meshes[0]


def _all_plain(answer: Any, plain_of: Callable[[Any], Plain]) -> Plain:
    """What an operator with no result, with one, or with several comes to, as plain data."""
    if answer is None:
        return ()
    if type(answer) in (list, tuple):
        return type(answer).__name__, tuple(None if one is None else plain_of(one) for one in answer)
    return "one", plain_of(answer)


def _all_made(plain: Plain, made_of: Callable[[Plain], Any]) -> Any:
    """What plain data are of."""
    if not plain:
        return None
    kind, found = plain
    if kind == "one":
        return made_of(found)
    made = (None if one is None else made_of(one) for one in found)
    return list(made) if kind == "list" else tuple(made)


def _specs_of(op_schema: Any) -> Iterator[Any]:
    """The arguments of an operator that are sharded, also those in lists."""
    from torch.distributed.tensor._dtensor_spec import DTensorSpec

    for value in (*op_schema.args_schema, *op_schema.kwargs_schema.values()):
        for one in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(one, DTensorSpec):
                yield one


def _plain_spec(spec: Any, mesh: Any) -> Plain:
    """How a tensor is sharded over a mesh."""
    if spec.mesh != mesh:
        raise _UnknownError
    order = tuple((entry.tensor_dim, tuple(entry.mesh_dims)) for entry in spec.shard_order or ())
    placements = tuple(map(_plain_placement, spec.placements))
    return placements, order, spec.use_strided_shard_as_shard_order, _plain_meta(spec.tensor_meta)


def _plain_placement(placement: Any) -> Plain:
    from torch.distributed.tensor.placement_types import Partial, Replicate, Shard, _StridedShard

    if type(placement) is Replicate:
        return ("replicate",)
    if type(placement) is Shard:
        return "shard", placement.dim
    if type(placement) is _StridedShard:
        return "strided", placement.dim, placement.split_factor
    if type(placement) is Partial:
        return "partial", placement.reduce_op
    raise _UnknownError


def _spec(plain: Plain, mesh: Any) -> Any:
    from torch.distributed.tensor import placement_types
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry

    placements, order, strided, meta = plain
    kinds: dict[str, Callable[..., Any]] = {
        "replicate": placement_types.Replicate, "shard": placement_types.Shard,
        "strided": lambda dim, factor: placement_types._StridedShard(dim, split_factor=factor),
        "partial": placement_types.Partial,
    }  # fmt: skip
    found = tuple(kinds[kind](*said) for kind, *said in placements)
    if strided:  # where placements say the order
        return DTensorSpec(mesh, found, _meta(meta), use_strided_shard_as_shard_order=True)
    entries = tuple(ShardOrderEntry(*entry) for entry in order)
    return DTensorSpec(mesh, found, _meta(meta), entries, use_strided_shard_as_shard_order=False)


def _key(op_schema: Any) -> Plain:
    """All that an answer depends on.

    Raises:
        _UnknownError: something is traced, or an argument is no plain value.
    """
    import torch
    from torch._guards import detect_fake_mode

    if detect_fake_mode() is not None:
        raise _UnknownError
    around = (
        str(torch.get_default_dtype()), torch.is_inference_mode_enabled(),
        *(f"{kind} {torch.get_autocast_dtype(kind)}" for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)),
    )  # fmt: skip
    named = tuple((name, _plain(value)) for name, value in op_schema.kwargs_schema.items())
    return str(op_schema.op), around, tuple(map(_plain, op_schema.args_schema)), named


def _plain(value: Any) -> Plain:
    """An argument as a plain value, with its type: 1, 1.0 and True are equal, and do not give the same dtype."""
    import torch
    from torch.distributed.tensor._dtensor_spec import DTensorSpec

    if value is None or type(value) in (bool, int, str):
        return type(value).__name__, value
    if type(value) is float:
        return "float", value.hex()
    if isinstance(value, (torch.dtype, torch.layout, torch.device, torch.memory_format)):
        return "torch", str(value)
    if isinstance(value, DTensorSpec):
        return "tensor", value.mesh.device_type, _plain_meta(value.tensor_meta)
    if type(value) in (list, tuple):
        return type(value).__name__, tuple(map(_plain, value))
    raise _UnknownError


def _plain_meta(meta: Any) -> Plain:
    from torch.distributed.tensor._dtensor_spec import TensorMeta

    if not isinstance(meta, TensorMeta):
        raise _UnknownError
    if any(type(size) is not int for size in (*meta.shape, *meta.stride)):  # a size may be a symbol
        raise _UnknownError
    return tuple(meta.shape), tuple(meta.stride), str(meta.dtype)


def _meta(plain: Plain) -> Any:
    import torch
    from torch.distributed.tensor._dtensor_spec import TensorMeta

    shape, stride, dtype = plain
    return TensorMeta(torch.Size(shape), stride, getattr(torch, dtype.removeprefix("torch.")))
