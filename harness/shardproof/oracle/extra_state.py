"""Extra state: bytes that a library's layers produce in `get_extra_state`, such as quantisation scales and histories,
which cannot be computed independently.

What a round trip must do with them is known all the same, and predicted here from what was observed earlier:

* A build or a step may give any bytes; no layer's state may come or go without a build.
* A save changes none, and the checkpoint holds the bytes that were live; none, where the scenario leaves them out.
* A load gives back the bytes that were live at the save; none of its own, where the scenario leaves them out.
* All ranks have the same bytes: a checkpoint keeps one copy (checked where pieces are assembled).

Where the bytes are a pickle with tensors, torch names each storage by its address, which no two processes share. Those
names are replaced by their order of appearance first (torch/serialization.py, `_legacy_save`: `str(storage._cdata)`).
Zeros after the end of a pickle are no part of it: a library may fill every layer's bytes up to one size, so that
ranks can exchange them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from shardproof.observe.logical import Key, Logical, Value
from shardproof.observe.record import LIVE, WRITTEN, Record
from shardproof.program import NO_CHECKPOINT, TAKES, WRITES, Op

EXTRA_STATE = "extra_state"
"""The role."""

_ADDRESS = re.compile(rb"(?:X.\0\0\0|\x8c.)(\d{8,20})", re.DOTALL)
"""A pickled text that is a large decimal number."""

_LENGTH = re.compile(rb"\x95.{3}\0{5}|(?:B.{4}|C.)(?=\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19\.)", re.DOTALL)
"""How long a frame of a pickle is, or what torch pickled in it: addresses differ in length, too."""


_FILLED_UP = re.compile(rb"(\x80.*\.)\0+", re.DOTALL)
"""A pickle with zeros after its end."""


def without_addresses(record: Record) -> Record:
    """The record, with the names of storages in extra state replaced by their order of appearance. Records of other
    roles are as they were."""
    if record.role != EXTRA_STATE or not record.data:
        return record
    order: dict[bytes, int] = {}
    filled_up = _FILLED_UP.fullmatch(record.data)
    data = _LENGTH.sub(b"", filled_up[1] if filled_up else record.data)
    data = _ADDRESS.sub(lambda found: b"storage %d" % order.setdefault(found[1], len(order)), data)
    return record._replace(data=data, shape=(len(data),), size=(len(data),))


def live_by_op(observed: Logical, role: str) -> dict[int, dict[str, Value]]:
    """The live values of a role after each operation that left any, by their names."""
    found: dict[int, dict[str, Value]] = {}
    for key, value in observed.items():
        if key.role == role and key.where == LIVE:
            found.setdefault(key.op, {})[key.fqn] = value
    return found


def carried(observed: Logical, ops: Sequence[Op], *, left_out: bool) -> Logical:
    """What the extra state must be after each operation, from what it was after earlier ones.

    Args:
        left_out: whether checkpoints are to hold none.
    """
    live = live_by_op(observed, EXTRA_STATE)
    expected: Logical = {}
    before: dict[str, Value] = {}
    saved: dict[int, dict[str, Value]] = {}
    for op in ops:
        now = live.get(op.index, {})
        if op.kind == "build":
            must = now
        elif op.kind in TAKES:
            must = saved[op.checkpoint] = before
        elif op.kind in ("load", "load_model_only", "recall"):
            must = before if left_out else saved[op.checkpoint]
        elif op.kind in ("load_optimizer_only", "load_schedule_only", "save_kept", "finish_save"):
            must = before
        else:
            must = {fqn: now.get(fqn, value) for fqn, value in before.items()}
        expected |= {Key(op.index, LIVE, EXTRA_STATE, fqn): value for fqn, value in must.items()}
        if op.kind == "save_kept":
            saved[op.checkpoint] = saved[NO_CHECKPOINT]
        if op.kind in WRITES and not left_out:
            held = saved[op.checkpoint]
            expected |= {Key(op.index, WRITTEN, EXTRA_STATE, fqn): value for fqn, value in held.items()}
        before = must
    return expected
