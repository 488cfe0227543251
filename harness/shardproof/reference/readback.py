"""Reads a checkpoint of the reference as records, independently of the code that loads it.

*Verifies* nothing; it states what the checkpoint says of itself: every box, run, bucket share and half is put
where the checkpoint's own keys and tables place it.
*Does not verify*: that the pieces cover a tensor or agree (`observe.assemble` does).
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

import numpy as np

from shardproof.models import ModelSpec
from shardproof.observe.record import WRITTEN, Record, whole
from shardproof.oracle.extra_state import EXTRA_STATE
from shardproof.reference.checkpoint import Content
from shardproof.reference.kernels import COUNT_NO_STEPS
from shardproof.reference.numerics import NAME
from shardproof.reference.observe import hyperparameters
from shardproof.reference.sections import start_of


def read_back(content: Content, model: ModelSpec, op: int) -> Iterator[Record]:
    """The `written` records of one checkpoint; pieces carry the rank that wrote them, the rest rank 0."""
    for role, tensors in content.get("full", {}).items():
        for fqn, values in tensors.items():
            shape = model.param(fqn).spec.shape
            yield whole(op, 0, role, fqn, NAME[values.dtype], shape, values.tobytes(), WRITTEN)
    for rank, roles in content.get("ranks", {}).items():
        for role, filed in roles.items():
            for key, parts in filed.items():
                yield from _pieces(parts, int(rank.removeprefix("rank_")), role, key, model, op)
    if "buckets" in content:
        yield from _buckets(content, model, op)
    yield from _common(content["common"], model, op)


def _pieces(parts: list[dict[str, Any]], rank: int, role: str, key: str, model: ModelSpec, op: int) -> Iterator[Record]:
    fqn, _, section = key.partition(":")
    shape = model.param(fqn).spec.shape
    for part in parts:
        data, start, size = part["data"], tuple(part["start"]), tuple(part["size"])
        flat = bool(section) or len(size) != len(shape)
        if section:
            start = (start[0] + start_of(model.param(fqn), section),)
        yield Record(op, rank, WRITTEN, role, fqn, NAME[data.dtype], shape, start, size, data.tobytes(), flat)


def _buckets(content: Content, model: ModelSpec, op: int) -> Iterator[Record]:
    """Each parameter's tensor-parallel shard, cut out of the joined shares of its bucket."""
    steps = content["common"]["steps"]
    for tp, by_storage in content["table"].items():
        tp_index = int(tp.removeprefix("tp_"))
        for storage, rows in by_storage.items():
            for fqn, number, offset, start, size in rows:
                shape = model.param(fqn).spec.shape
                if (prod(size) == 0 and prod(shape)) or (tp_index and tuple(size) == shape):
                    continue
                shares = content["buckets"][tp][storage][f"bucket_{number}"]
                for role in shares["rank_0"]:
                    if role != "master" and fqn not in steps:
                        continue
                    bucket = np.hstack([shares[f"rank_{index}"][role] for index in range(len(shares))])
                    data = bucket[offset : offset + prod(size)]
                    dtype = NAME[data.dtype]
                    yield Record(op, tp_index, WRITTEN, role, fqn, dtype, shape, start, size, data.tobytes())


def _common(common: Content, model: ModelSpec, op: int) -> Iterator[Record]:
    adaptive = all(group["hyper"].kind not in COUNT_NO_STEPS for group in common["groups"])
    values: list[tuple[str, str, Any]] = []
    if adaptive:
        values += [("step", fqn, np.float32(step)) for fqn, step in common["steps"].items()]
    for index, group in enumerate(common["groups"]):
        numbers = hyperparameters(group["hyper"]).items()
        values += [("hyperparameter", f"group{index}.{key}", np.float64(number)) for key, number in numbers]
        text = np.frombuffer("\n".join(group["params"]).encode(), np.uint8)
        yield whole(op, 0, "hyperparameter", f"group{index}.params", "utf8", text.shape, text.tobytes(), WRITTEN)
    values += [("buffer", fqn, value) for fqn, value in common["buffers"].items()]
    if common["schedule"] is not None:
        values.append(("scheduler", "last_epoch", np.int64(common["schedule"].epoch)))
        rates = enumerate(common["schedule"].last_lr)
        values += [("scheduler", f"last_lr.{index}", np.float64(rate)) for index, rate in rates]
    if common["scaler"] is not None:
        scale, growth, hysteresis = common["scaler"]
        values += [("scaler", "scale", np.float32(scale)), ("scaler", "growth_tracker", np.int64(growth))]
        if hysteresis is not None:
            values.append(("scaler", "hysteresis_tracker", np.int64(hysteresis)))
    for fqn, data in common["opaque"].items():
        yield whole(op, 0, EXTRA_STATE, fqn, "uint8", (len(data),), data, WRITTEN)
    for fqn, kept in common["weights"].items():
        shape = model.param(fqn).spec.shape
        values += [("quantised", fqn, kept.data.reshape(shape))]
        values += [("quant_scale", f"{fqn}.quantised", kept.inverse.reshape(shape))]
        values += [("quant_scale", f"{fqn}.amax_history", kept.history)]
    values += [("rng", stream, states) for stream, states in common["streams"].items()]
    for role, fqn, value in values:
        yield whole(op, 0, role, fqn, NAME[value.dtype], value.shape, value.tobytes(), WRITTEN)
