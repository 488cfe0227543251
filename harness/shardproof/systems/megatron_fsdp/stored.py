"""What Megatron-FSDP's checkpoints hold: torch's distributed format, with numbers in place of names in the optimizer's
part.

The model's keys begin with the wrapper's `module.`. The optimizer's state and groups number the parameters in the order
in which the optimizer was given them. Where there are main parameters, the model's part holds those: under the name of
a bf16 parameter lies its fp32 master.

*Does not verify*: keys outside of the three sections.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any

from shardproof.mechanisms.fused_adam_stored import IN_FP32, in_fp32, remainder
from shardproof.models import ModelSpec, model_spec
from shardproof.observe.logical import Key, Logical, Value
from shardproof.observe.record import Record
from shardproof.program import Op
from shardproof.readers.pieces import KeyPath, ObjectPiece, Piece, key_of, pieces
from shardproof.readers.roles import (
    STATE_ROLE,
    Target,
    extra_records,
    hyperparameter_records,
    number_record,
    setting_records,
    tensor_records,
)
from shardproof.readers.stored import TorchStored
from shardproof.scenario import Scenario
from shardproof.systems.megatron_fsdp.contract import CONTRACT

WRAPPER = "module."


class MegatronFsdpStored(TorchStored):
    """Torch's distributed format, with numbers for names in the optimizer's part, and masters under the names of
    parameters."""

    def read(self, path: Path, op: Op, scenario: Scenario) -> list[Record]:
        return list(_records(path, op, scenario))

    def must_hold(self, live: Logical, op: Op, scenario: Scenario) -> Logical:
        """What a save must have written.

        Under every name of a parameter that has a main parameter, the file holds that master, in fp32, and not the bf16
        parameter. Where a precision-aware FusedAdam keeps the master inside its own state, there are no main
        parameters: the file holds the model's own parameter, and in the optimizer's part the 16 low bits of its master
        as int16.
        """
        written = super().must_hold(live, op, scenario)
        if CONTRACT.masters_in_state(scenario):
            half_away = {p.fqn for p in CONTRACT.parameters(scenario, op.mesh) if p.half_away}
            return {key: _as_state(key, value, half_away) for key, value in written.items()}
        model = model_spec(scenario.model)
        kept = {key: value for key, value in written.items() if key.role != "master"}
        for key in [key for key in kept if key.role == "param" and stored_as(model, key.fqn, scenario) == "master"]:
            own = key._replace(role="master")
            kept[own] = written[own._replace(fqn=model.param(key.fqn).spec.tied_to or key.fqn)]
            del kept[key]
        return kept


def _as_state(key: Key, value: Value, half_away: AbstractSet[str]) -> Value:
    """A value as FusedAdam's state dict has it; nothing is scaled here."""
    if key.role == "master" and key.fqn in half_away:
        return remainder(value)
    return in_fp32(value) if key.role in IN_FP32 else value


def _records(path: Path, op: Op, scenario: Scenario) -> Iterator[Record]:
    model = model_spec(scenario.model)
    target = Target(op.index, model, str(path))
    found = list(pieces(path))
    groups = _groups(model, scenario, found)
    names = [fqn for group in groups for fqn in group]
    for piece in found:
        section, rest = (piece.path[0], piece.path[1:]) if len(piece.path) > 1 else ("", ())
        match section:
            case "model":
                yield from _model(target, piece, key_of(rest).removeprefix(WRAPPER), scenario)
            case "optimizer":
                yield from _optimizer(target, piece, rest, groups, names)
            case "extra":
                yield from extra_records(target, piece, rest)


def _model(target: Target, piece: Piece, fqn: str, scenario: Scenario) -> Iterator[Record]:
    if fqn in {name for name, _ in target.model.buffers()}:
        yield from tensor_records(target, piece, "buffer", fqn)
    else:
        yield from tensor_records(target, piece, stored_as(target.model, fqn, scenario), fqn)


def stored_as(model: ModelSpec, fqn: str, scenario: Scenario) -> str:
    """The role of what the model's section holds under a parameter's name: `master` where there is one."""
    known = {p.fqn: p for p in model.params}
    if fqn not in known:
        return "param"
    spec = model.param(known[fqn].spec.tied_to or fqn).spec
    mastered = CONTRACT.stages(scenario, spec, scenario.mesh).master and not CONTRACT.masters_in_state(scenario)
    return "master" if spec.trainable == "yes" and mastered else "param"


def _groups(model: ModelSpec, scenario: Scenario, found: Iterable[Piece]) -> list[list[str]]:
    """The names of each param group's parameters, in the order in which the optimizer was given them.

    `fully_shard(model, optimizer)` makes one group of all parameters, frozen ones too (megatron-fsdp-one-call-groups).
    Whether it has is told by how many parameters the checkpoint's groups list.
    """
    held = [p for p in model.unique_params if p.spec.trainable == "yes"]
    groups = [[p.fqn for p in held if p.spec.group == index] for index in range(len(model.groups))]
    if scenario.optimizer.groups == "one":
        groups = [[p.fqn for p in held]]
    if "one_call" in scenario.options and sorted(map(len, _listed(found))) != sorted(map(len, groups)):
        return [[p.fqn for p in model.unique_params]]
    return groups


def _listed(found: Iterable[Piece]) -> Iterator[list[Any]]:
    """The numbers of the parameters of each group."""
    for piece in found:
        listing = piece.path[:2] == ("optimizer", "param_groups") and piece.path[-1] == "params"
        if listing and isinstance(piece, ObjectPiece) and isinstance(piece.value, list):
            yield piece.value


def _optimizer(
    target: Target, piece: Piece, rest: KeyPath, groups: list[list[str]], names: list[str]
) -> Iterator[Record]:
    section, number, name = rest[0], _number(rest[1:2]), key_of(rest[2:])
    if section == "state" and 0 <= number < len(names):
        yield from tensor_records(target, piece, STATE_ROLE.get(name, name), names[number])
    elif section == "state":
        yield from tensor_records(target, piece, name, key_of(rest))  # a state of no parameter: no oracle expects it
    elif section == "param_groups" and name != "params" and 0 <= number < len(groups):
        for fqn in (fqn for fqn in groups[number] if target.model.param(fqn).spec.trainable == "yes"):
            if name == "step":  # FusedAdam counts steps by group
                yield number_record(target, piece, "step", fqn, "fp32")
            else:
                yield from hyperparameter_records(target, piece, fqn, name)
                yield from setting_records(target, piece, fqn, name)


def _number(path: KeyPath) -> int:
    text = str(path[0]) if path else ""
    return int(text) if text.isdecimal() else -1


STORED = MegatronFsdpStored()
