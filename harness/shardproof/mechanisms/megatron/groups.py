"""Which parameters a stored param group of Megatron-Core holds.

No checkpoint says it. The library groups parameters by their multipliers of weight decay and learning rate, stores the
group's numbers, and finds a group again by the same numbers; so does this module, with the model's own groups.
Hyperparameters, the step and every key with its type are then recorded parameter by parameter, as the live records have
them.

Source: megatron.core.optimizer._get_param_groups (0.13 to 0.19).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from shardproof.mechanisms.megatron.flat_buffers import trained
from shardproof.mechanisms.megatron.switches import hyperparameters
from shardproof.models import GroupSpec, NamedParam, model_spec
from shardproof.observe.record import Record
from shardproof.program import Op
from shardproof.readers.pieces import ObjectPiece, Piece
from shardproof.readers.roles import GROUP_NUMBERS, Target, hyperparameter_records, number_record, setting_records
from shardproof.scenario import Optimizer, Scenario

Entry = Mapping[str, Piece]
"""A stored param group: field → its piece."""


class _Label(NamedTuple):
    """What tells groups apart: the multiplier of the weight decay, and the highest learning rate."""

    wd_mult: float
    max_lr: float


def members(entry: Entry, op: Op, scenario: Scenario) -> list[NamedParam]:
    """The parameters of a stored group, in the library's order; empty where no group of the model has its fields."""
    experts = _value(entry, "is_expert_parallel") is True
    label = _Label(_number(entry, "wd_mult"), _number(entry, "max_lr") * _number(entry, "lr_mult"))
    model = model_spec(scenario.model)
    one = scenario.optimizer.groups == "one"
    groups = model.groups[:1] if one else model.groups
    for build in (op.init_seed, 0):  # after a load the groups have the numbers of the first build
        ask = hyperparameters(scenario, build)
        found = {index for index, group in enumerate(groups) if _label(group, ask) == label}
        held = [p for p in trained(scenario, experts=experts) if (0 if one else p.spec.group) in found]
        if held:  # a group without a parameter is never stored, and may have another build's numbers of one that is
            return held
    return []


def group_records(target: Target, entry: Entry, index: int, op: Op, scenario: Scenario) -> Iterator[Record]:
    """Hyperparameters, step and settings of each of a group's parameters. A group that the model lacks is recorded
    under its index, which nobody expects.

    Raises:
        CheckpointError: one of them is no number.
    """
    owners = [p.fqn for p in members(entry, op, scenario)] or [f"group{index}"]
    for owner in owners:
        for name in ("betas", *GROUP_NUMBERS):
            if name in entry and _value(entry, name) is not None:
                yield from hyperparameter_records(target, entry[name], owner, name)
        if _value(entry, "step") is not None:
            yield number_record(target, entry["step"], "step", owner, "fp32")
        for name, piece in entry.items():
            yield from setting_records(target, piece, owner, name)


def _label(group: GroupSpec, ask: Optimizer) -> _Label:
    decay = group.weight_decay
    wd_mult = 1.0 if decay is None or decay == ask.weight_decay else decay / (ask.weight_decay or 1.0)
    return _Label(wd_mult, ask.lr * group.lr_scale)


def _number(entry: Entry, name: str) -> float:
    value = _value(entry, name)
    return value if isinstance(value, float) else float(value) if isinstance(value, int) else float("nan")


def _value(entry: Entry, name: str) -> object:
    """A field's plain value; a tensor's piece itself."""
    piece = entry.get(name)
    return piece.value if isinstance(piece, ObjectPiece) else piece
