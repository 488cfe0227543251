"""The base of a system's checkpoint reader: the records that a checkpoint holds, and the values that it must hold.

*Verifies*: that the files are sound (see the modules below), and what every chunk holds, with its box, so that
assembly finds gaps and overlaps. *Does not verify*: what the conventions do not name (see `roles`).
"""

from __future__ import annotations

from pathlib import Path

from shardproof.models import ModelSpec
from shardproof.observe.logical import Key, Logical
from shardproof.observe.record import LIVE, WRITTEN, Record
from shardproof.observe.settings import SETTING
from shardproof.readers.pieces import pieces
from shardproof.readers.roles import records_of

STORED_ROLES = frozenset(
    {
        "param",
        "master",
        "exp_avg",
        "exp_avg_sq",
        "momentum",
        "step",
        "hyperparameter",
        SETTING,
        "buffer",
        "scheduler",
        "scaler",
    }
)


def read_checkpoint(path: Path, op: int, model: ModelSpec) -> list[Record]:
    """The `written` records of a checkpoint; a chunk's rank is the one whose file it lies in.

    Args:
        path: a distributed checkpoint's folder, a torch.save file, or a folder with `full.pt`.
        op: index of the save. model: says which names are buffers.

    Raises:
        CheckpointError: missing, truncated, foreign, inconsistent or hostile.
        UnfamiliarError: tensors in a section of another name, of which nothing would be read.
    """
    return list(records_of(pieces(path), op, model, str(path)))


def expected_written(live: Logical, model: ModelSpec, *, flat: bool) -> Logical:
    """What a checkpoint must hold, from the oracle's live values after the save.

    Gradients, compute parameters and non-persistent buffers are not stored; tied parameters are, under every name.

    Args:
        flat: each parameter has its own copy of its group's hyperparameters, named `{parameter}.{key}`, and there are
            no groups (torch StateDictOptions.flatten_optimizer_state_dict).
    """
    transient = {name for name, buffer in model.buffers() if not buffer.persistent}
    written: Logical = {}
    for key, value in live.items():
        stored = key.role in STORED_ROLES and not (key.role == "buffer" and key.fqn in transient)
        if stored and key.where == LIVE:
            written[Key(key.op, WRITTEN, key.role, key.fqn)] = value
    return _flattened(written) if flat else written


def _flattened(written: Logical) -> Logical:
    """Hyperparameters and settings of a group handed down to the group's parameters."""
    flat: Logical = {key: value for key, value in written.items() if key.role not in _OF_GROUPS}
    groups: dict[tuple[int, str], list[Key]] = {}
    for key in written:
        if key.role in _OF_GROUPS:
            groups.setdefault((key.op, key.fqn.partition(".")[0]), []).append(key)
    for (op, group), members in groups.items():
        params = Key(op, WRITTEN, "hyperparameter", f"{group}.params")
        for fqn in filter(None, written[params].data.decode().split("\n")):
            for key in members:
                if key != params:
                    flat[key._replace(fqn=f"{fqn}.{key.fqn.partition('.')[2]}")] = written[key]
    return flat


_OF_GROUPS = ("hyperparameter", SETTING)
