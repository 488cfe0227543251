"""Records: what one rank held of one thing at one point of the program, as raw bytes.

A *role* says what a value is to training. Systems, reference and twin follow the same conventions for each, so that
their observations can be compared. A *canonical name* is a parameter's fully qualified name; a tied alias has another
one. A value is *logical* where ranks hold pieces of it, which are joined before anything is compared; the roles at the
end of the table are each rank's own.

    role            under which name; in which dtype and shape; after which operations
    param           every name, tied aliases too; storage dtype, logical; every operation
    compute_param   every name that a forward uses; compute dtype, logical; after operations with forwards, as the last
                    microbatch's forward saw it
    grad            canonical name; as the optimizer saw it (unscaled, clipped), logical; after step and
                    apply_gradients, absent if the optimizer saw none
    master          canonical name; master dtype, logical; every operation, where a system keeps separate masters
    exp_avg, exp_avg_sq, momentum
                    canonical name; state dtype, logical; every operation, absent until created
    step            canonical name; fp32, shape (); every operation, absent until created
    hyperparameter  `group{i}.{key}`: fp64, shape (), and `group{i}.params`: utf8, the canonical names joined by
                    newlines; every operation. Of a system whose contract says `owner_groups`, instead
                    `{parameter}.{key}`, recorded by every rank that owns some of the parameter
    setting         `group{i}.{key}` of every key of a param group, under `owner_groups` `{parameter}.{key}`; utf8: the
                    type of its value and, where no other role has it, the value (`shardproof.observe.settings`); every
                    operation
    unknown         `{parameter}.{name}` of state under a name that no optimizer of ours gives; utf8: its type and
                    value; every operation. Nothing is ever expected there
    state           `{parameter}.{name}` of what a trainer's optimizer keeps under any other name; its own dtype,
                    logical where it has the parameter's shape; utf8 where it is no tensor; every operation
    buffer          every name; its own dtype and shape; every operation
    scheduler       `last_epoch`: int64, the steps it has counted; `last_lr.{i}`: fp64, of torch's schedules;
                    every operation, if there is a schedule
    schedule        what else a schedule of torch's keeps, by its name there (`shardproof.schedules`); utf8, a line as
    of
                    `setting`; every operation
    scaler          `scale`: fp32, `growth_tracker`: int64, and Megatron's `hysteresis_tracker`: int64; every operation,
                    if there is a dynamic loss scale
    norm            `total_norm`: the dtype that the system reports it in and clips with (fp32; Megatron's Python float:
                    fp64), compared by ULPs and not by bits; after step, if gradients are clipped
    host            canonical name; bool, logical: which elements a kernel of the host steps; every operation, where
                    some are offloaded and the contract knows which (`Contract.knows_host`)
    quant_scale     `{parameter}.{role}` of every master and moment that is kept divided by a scale
                    (`Contract.scaled_roles`): fp32, in the parameter's shape, for each element the scale of its domain;
                    every operation, where there is the state. `{parameter}.param` of a parameter that is stored in
                    fp8e4m3: the inverse of its scale, which is stored beside it
    quantised       canonical name; fp8e4m3, logical: a weight as matrix products read it, beside what the optimizer
                    steps on; every operation, of modules that keep one. `{parameter}.quantised` of `quant_scale` is its
                    inverse scale, `{parameter}.amax_history` the magnitudes that a delayed one is taken from
    resolved        any name; utf8: what the texts of a recipe came to; after build, of systems that parse recipes
    tag             name; int64, shape (): the dim along which a parameter is marked as tensor-parallel; after build, of
                    systems that record marks
    extra_state     name; uint8: what a layer's own get_extra_state gives; every operation
    (`shardproof.oracle.extra_state`) rng, warning    each rank's own, no box: see `shardproof.observe.ambient`, and of
    the reference's simulated ranks
                    `shardproof.reference.streams`; every operation
    emulated        `symbols`: utf8, the emulated symbols touched so far, joined by newlines; each rank's own,
                    collected and not compared
    device          `note`: utf8, which GPU and which collectives the rank has; each rank's own, collected and not
                    compared

Keys of `hyperparameter`: lr, weight_decay and, by kind of optimizer, betas as `beta1` and `beta2`, `eps`, `momentum`,
`nesterov` (0.0 or 1.0).

`written` records are what a checkpoint holds after a `save`, read back by the independent reader: param, master,
exp_avg, exp_avg_sq, momentum, step, hyperparameter, persistent buffers, scheduler and scaler, as far as the format
stores them; of Megatron-Core also `iteration` (int64: optimizer steps taken) and, as `unknown`, whatever nobody expects
there.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import NamedTuple

NUMPY_NAME = {
    "fp32": "float32", "fp64": "float64", "fp16": "float16", "bf16": "bfloat16",
    "int64": "int64", "int32": "int32", "int16": "int16", "uint8": "uint8", "utf8": "uint8", "bool": "bool",
    "fp8e4m3": "float8_e4m3fn", "fp8e5m2": "float8_e5m2", "uint32": "uint32", "uint64": "uint64", "uint16": "uint16",
    "int8": "int8",
}  # fmt: skip

ITEMSIZE = {
    "fp32": 4, "fp64": 8, "fp16": 2, "bf16": 2, "int64": 8, "int32": 4, "int16": 2, "uint8": 1, "utf8": 1, "bool": 1,
    "fp8e4m3": 1, "fp8e5m2": 1, "uint32": 4, "uint64": 8, "uint16": 2, "int8": 1,
}  # fmt: skip

LIVE, WRITTEN = "live", "written"

PER_RANK_ROLES = frozenset({"rng", "warning", "emulated", "device"})

OWNER_ROLES = frozenset(
    {"hyperparameter", "setting", "step", "exp_avg", "exp_avg_sq", "momentum", "host", "quant_scale"}
)
"""Roles that, where a contract says `owner_groups`, only those ranks record that own some of the parameter."""


class Record(NamedTuple):
    """A piece of a logical tensor. A named tuple, since a scenario makes thousands and a frozen dataclass takes 3 µs
    each.

    * op: index of the program's operation after which it was taken.
    * rank: global rank.
    * where: `live` or `written`.
    * shape: of the whole logical tensor.
    * start, size: the box that this piece fills, one entry a dim; with `flat` one entry each, in elements of the
      row-major flattened tensor.
    * data: the piece's bytes, row-major, little endian; product(size) times the dtype's item size of them.
    * replica: which copy of the tensor the piece belongs to, where copies are cut differently (a parameter that tensor
      parallelism does not cut lies otherwise in the flat buffers of each tp rank); each copy must be whole, and all
      must agree.
    * others: further ranks that hold this very piece with these very bytes; whoever observes many ranks at once
      compares them there, and `every_rank` gives each its own record.
    """

    op: int
    rank: int
    where: str
    role: str
    fqn: str
    dtype: str
    shape: tuple[int, ...]
    start: tuple[int, ...]
    size: tuple[int, ...]
    data: bytes
    flat: bool = False
    replica: int = 0
    others: tuple[int, ...] = ()


def every_rank(records: Iterable[Record]) -> Iterator[Record]:
    """The same records, with one for every rank that holds a piece."""
    for record in records:
        if not record.others:
            yield record
            continue
        alone = record._replace(others=())
        yield alone
        for rank in record.others:
            yield alone._replace(rank=rank)


def whole(op: int, rank: int, role: str, fqn: str, dtype: str, shape: tuple[int, ...], data: bytes,
          where: str = LIVE) -> Record:  # fmt: skip
    """A record that covers its whole logical tensor."""
    return Record(op, rank, where, role, fqn, dtype, shape, (0,) * len(shape), shape, data)


def pack(records: Iterable[Record]) -> bytes:
    """Records as one self-describing blob: a JSON header line, then the raw bytes in order."""
    kept = list(records)
    header = [(*r[:9], r.flat, r.replica, len(r.data), *r.others) for r in kept]
    return json.dumps(header).encode() + b"\n" + b"".join(r.data for r in kept)


def unpack(blob: bytes) -> Iterator[Record]:
    """The records of `pack`, one for every rank that held a piece.

    Raises:
        ValueError: the blob is truncated or not one of ours.
    """
    head, newline, body = blob.partition(b"\n")
    if not newline:
        raise ValueError("not an observation: no header line")
    position = 0
    for op, rank, where, role, fqn, dtype, shape, start, size, flat, replica, length, *others in json.loads(head):
        data = body[position : position + length]
        if len(data) != length:
            raise ValueError(f"truncated observation: {fqn} ({role}) has {len(data)} of {length} bytes")
        position += length
        box = tuple(shape), tuple(start), tuple(size)
        for holder in (rank, *others):
            yield Record(op, holder, where, role, fqn, dtype, *box, data, flat, replica)
    if position != len(body):
        raise ValueError(f"observation has {len(body) - position} stray bytes")
