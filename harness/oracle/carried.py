"""Extra state: bytes that a library's layers make of their own (scales, histories of quantization) and that no
arithmetic of ours predicts. What a round trip must do with it is known all the same, and predicted here.

* A build or a step may give any bytes; no layer's state may come or go without a build.
* A save changes none, and the checkpoint holds the bytes that were live; none, where the scenario leaves them out.
* A load gives back the bytes that were live at the save; none of its own, where the scenario leaves them out.
* All ranks have the same bytes: a checkpoint keeps one copy (checked where pieces are assembled).
"""

from __future__ import annotations

from collections.abc import Sequence

from harness.observe.logical import Key, Logical, Value
from harness.observe.record import LIVE, WRITTEN
from harness.program import Op

EXTRA_STATE = "extra_state"
"""The role."""


def carried(observed: Logical, ops: Sequence[Op], *, left_out: bool) -> Logical:
    """What the extra state of the operations observed must be, from what it was at earlier ones.

    Args:
        left_out: whether checkpoints are to hold none.
    """
    live: dict[int, dict[str, Value]] = {}
    for key, value in observed.items():
        if key.role == EXTRA_STATE and key.where == LIVE:
            live.setdefault(key.op, {})[key.fqn] = value
    expected: Logical = {}
    before: dict[str, Value] = {}
    saved: dict[int, dict[str, Value]] = {}
    for op in ops:
        now = live.get(op.index, {})
        if op.kind == "build":
            must = now
        elif op.kind == "save":
            must = saved[op.checkpoint] = before
        elif op.kind in ("load", "load_model_only"):
            must = before if left_out else saved[op.checkpoint]
        else:
            must = {fqn: now.get(fqn, value) for fqn, value in before.items()}
        expected |= {Key(op.index, LIVE, EXTRA_STATE, fqn): value for fqn, value in must.items()}
        if op.kind == "save" and not left_out:
            expected |= {Key(op.index, WRITTEN, EXTRA_STATE, fqn): value for fqn, value in must.items()}
        before = must
    return expected
