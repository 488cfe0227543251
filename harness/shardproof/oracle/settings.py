"""The expected keys of a param group and the types of their values: as built, or as saved in the checkpoint that was
loaded.

No arithmetic of ours predicts them: which keys a group has is its optimizer's own affair, and its scheduler's. What a
program may do to them is known all the same. A build makes them, and those of a group that joins the optimizer later
are made then; a load gives back those that were live at the save; nothing else adds a key, drops one or changes a type.
Both `torch.optim.Optimizer.load_state_dict` and the functions of `torch.distributed.checkpoint.state_dict` promise the
group that was saved. Numbers of the keys that other roles know (`lr`, `betas`) are compared with the twin's, as
`hyperparameter`.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardproof.observe.logical import Key, Logical, Value
from shardproof.observe.record import LIVE
from shardproof.observe.settings import SETTING
from shardproof.oracle.extra_state import live_by_op
from shardproof.program import NO_CHECKPOINT, TAKES, Op


def kept_settings(observed: Logical, ops: Sequence[Op], run_keeps: Sequence[str] = ()) -> Logical:
    """The expected settings of every param group after each operation, derived from builds, loads and the settings
    observed at saves. run_keeps: keys that a load leaves as the run has them (`Contract.run_keeps`)."""
    found = live_by_op(observed, SETTING)
    expected: Logical = {}
    must: dict[str, Value] = {}
    forced: dict[str, Value] = {}  # what the class of the optimizer sets itself, whatever it loads
    saved: dict[int, dict[str, Value]] = {}  # by number of the checkpoint; what is kept in memory has none
    for op in ops:
        if op.kind == "build":
            must = found.get(op.index, {})
            forced = {
                name: line
                for name, line in must.items()
                if _is_forced(name, line) or name.rpartition(".")[2] in run_keeps
            }
        elif op.kind == "add_group":
            must = found.get(op.index, {}) | must
        elif op.kind in TAKES:
            saved[op.checkpoint] = must
        elif op.kind == "save_kept":
            saved[op.checkpoint] = saved[NO_CHECKPOINT]
        elif op.kind in ("load", "load_optimizer_only", "recall"):
            must = saved[op.checkpoint] | forced
        expected |= {Key(op.index, LIVE, SETTING, name): value for name, value in must.items()}
    return expected


def _is_forced(name: str, line: Value) -> bool:
    """Whether a setting is AdamW's own, which a load of Adam's groups leaves as it is (torch/optim/adamw.py)."""
    return name.endswith(".decoupled_weight_decay") and line.data == b"bool True"
