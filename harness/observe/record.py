"""Records: what one rank held of one thing at one point of the program, as raw bytes.

Conventions every system, the reference and the twin follow, so that their observations are comparable:

    role            fqn; dtype and shape; when
    param           every name, tied aliases included; storage dtype, logical; every op
    compute_param   every name used in a forward; compute dtype, logical; after step and overflow, as the last
                    microbatch's forward saw it
    grad            canonical name; as the optimizer saw it (unscaled, clipped), absent if it saw none; after step
    master          canonical name; master dtype, only where a system keeps separate masters; every op
    exp_avg, exp_avg_sq, momentum
                    canonical name; state dtype, logical, absent until created; every op
    step            canonical name; fp32, shape (), absent until created; every op
    hyperparameter  `group{i}.{key}`: fp64, shape (); `group{i}.params`: utf8, shape (bytes,), canonical names
                    joined by newlines; every op. Of a system with `owner_groups` instead `{parameter}.{key}`, of the
                    parameters that the optimizer holds, by every rank that owns some of the parameter
    buffer          every name; its own dtype and shape; every op
    scheduler       `last_epoch`: int64, the steps it has counted; `last_lr.{i}`: fp64, of schedules of torch;
                    shape (); every op if there is a schedule
    scaler          `scale`: fp32, `growth_tracker`: int64, and Megatron's `hysteresis_tracker`: int64, shape (); every
                    op if there is a dynamic loss scale
    norm            `total_norm`: shape (), in the dtype that the system reports it in and clips with (fp32; Megatron's
                    python float: fp64), compared by ULPs, not bits; after step if clipping
    host            canonical name; bool, logical: which elements a kernel of the host steps; every op where some are
                    offloaded and it is known which (`oracle.host_elements.knows_host`)
    quant_scale     `{parameter}.{role}` of every scaled master and moment (`contracts.scaled_roles`): fp32, in the
                    parameter's shape, of every element the scale of its domain; every op where there is the state.
                    `{parameter}.param` of every quantised parameter (`contracts.is_quantised`): the inverse of the
                    scale, stored too; its `param` is in fp8e4m3 then
    emulated        `symbols`: utf8, shape (bytes,), the emulated symbols touched so far, joined by newlines; per rank,
                    collected, not compared
    device          `note`: utf8, shape (bytes,), which GPU and which collectives the rank has; per rank, collected, not
                    compared; every op where ranks have one
    resolved        name; utf8, shape (bytes,): what the texts of a recipe come to; after build, of systems that parse
                    them (`oracle.pretrained`)
    tag             name; int64, shape (): the dim along which a parameter is marked as tensor-parallel; after build,
                    with the option `tags` (`oracle.tags`)
    rng, warning    see observe/ambient.py; per rank, no box; every op
    extra_state     name; uint8, shape (bytes,): what a layer's own get_extra_state gives; every op (`oracle.carried`)

Values of `hyperparameter`: lr, weight_decay and, by kind, betas as `beta1`/`beta2`, `eps`, `momentum`,
`nesterov` (0.0 or 1.0). `written` records carry what a checkpoint holds after a `save`, read back by the
independent reader: param, master, exp_avg, exp_avg_sq, momentum, step, hyperparameter, persistent buffers,
scheduler and scaler, as far as the format stores them; of Megatron-Core also `iteration` (int64, shape (): optimizer
steps taken) and, as `unknown`, whatever nobody expects there.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import NamedTuple

NUMPY_NAME = {
    "fp32": "float32", "fp64": "float64", "fp16": "float16", "bf16": "bfloat16",
    "int64": "int64", "int32": "int32", "int16": "int16", "uint8": "uint8", "utf8": "uint8", "bool": "bool",
    "fp8e4m3": "float8_e4m3fn",
}  # fmt: skip

ITEMSIZE = {
    "fp32": 4, "fp64": 8, "fp16": 2, "bf16": 2, "int64": 8, "int32": 4, "int16": 2, "uint8": 1, "utf8": 1, "bool": 1,
    "fp8e4m3": 1,
}  # fmt: skip

LIVE, WRITTEN = "live", "written"

PER_RANK_ROLES = frozenset({"rng", "warning", "emulated", "device"})

OWNER_ROLES = frozenset({"hyperparameter", "step", "exp_avg", "exp_avg_sq", "momentum", "host", "quant_scale"})
"""Roles that in a system with `owner_groups` only the ranks record that own some of the parameter."""


class Record(NamedTuple):
    """A piece of a logical tensor. A named tuple: a scenario makes thousands, and a frozen dataclass takes 3 µs each.

    op: index of the program's operation it was taken after. rank: global rank. where: `live` or `written`.
    shape: of the whole logical tensor. start, size: the box this piece fills, one entry a dim; with
    `flat`, one entry each, in elements of the row-major flattened tensor. data: the piece's bytes,
    row-major, little endian; its length is product(size) times the dtype's item size. replica: which copy of the
    tensor the piece belongs to, where copies are cut differently (a tp-replicated parameter in flat buffers, which
    lie differently on every tp rank); each copy must be whole, and all must agree. others: further ranks that hold this
    very piece with these very bytes; whoever observes many ranks at once compares them there, and `every_rank` gives
    each its own record.
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
    """The records with one for every rank that holds a piece."""
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
