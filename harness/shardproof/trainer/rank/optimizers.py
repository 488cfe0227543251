"""The state and the settings of an optimizer of any class.

An optimizer is what has `param_groups` and a mapping `state`: those of `torch.optim`, those that others wrote after
them, and those of a training script itself. Its state is read as it lies there. Nothing is asked for by key, since the
mapping makes an entry for every key that it is asked for; and `state_dict` is not called, since some make the state
that is not there yet.

State of a parameter is named as the parameter is, which is found by identity. `exp_avg`, `exp_avg_sq`, `step` and
`momentum_buffer` have roles of their own; whatever else there is has the role `state` and the name
`{parameter}.{name}`. A tensor in the parameter's local shape lies where the parameter lies.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from shardproof.observe.record import Record
from shardproof.observe.settings import SETTING
from shardproof.trainer.rank.leaves import leaf_records, leaves, line, text
from shardproof.trainer.rank.modules import Modules
from shardproof.trainer.rank.pieces import (
    At,
    Held,
    Unreadable,
    held,
    owned,
    records_beside,
    records_of,
)
from shardproof.trainer.rank.walk import Met
from shardproof.trainer.values.every_mesh import ROLES, STATE
from shardproof.trainer.values.notes import OF_BEFORE


@dataclass
class Optimizer:
    """One optimizer that was found: path, the object, and what comes before the names of its settings."""

    path: str
    target: Any
    prefix: str = ""
    taken: set[tuple[str, str]] = field(default_factory=set)
    unread: dict[str, str] = field(default_factory=dict)
    names: dict[int, list[str]] = field(default_factory=dict)

    def told(self) -> dict[str, Any]:
        """The class and the settings, once `records` was called, in JSON types: what is no plain value is a mapping of
        one entry, its type. Only those parameters are named that have a gradient."""
        groups = []
        for index, group in self._groups():
            trained = [p.requires_grad for p in _params(group)]
            settings = {key: _plain(value) for key, value in group.items() if key != "params"}
            groups.append({**settings, "params": self._trained(index, trained)})
        return {"class": f"{type(self.target).__module__}.{type(self.target).__qualname__}", "groups": groups}

    def misses(self, modules: Modules) -> str:
        """`OF_BEFORE` where the optimizer steps none of the modules' parameters, and whole ones of their shapes though
        the modules' are sharded; else empty."""
        stepped = [parameter for _, group in self._groups() for parameter in _params(group)]
        sharded = any(not parameter.whole for parameter in modules.params)
        own = {id(parameter) for parameter in stepped} & modules.parameters.keys()
        shapes = sorted(cut.shape for parameter in modules.params for cut in parameter.cuts)
        return OF_BEFORE if sharded and not own and sorted(tuple(p.shape) for p in stepped) == shapes else ""

    def _trained(self, index: int, trained: list[bool]) -> list[str]:
        names = self.names.get(index, [])
        if len(names) != len(trained):  # a flat parameter has many names
            return names if all(trained) else []
        return [name for name, has_gradient in zip(names, trained, strict=True) if has_gradient]

    def records(self, at: At, modules: Modules, elsewhere: Mapping[int, str]) -> Iterator[Record]:
        """All records; what cannot be read is in `unread` afterwards.

        Args:
            modules: whose parameters it steps. elsewhere: identity → path of tensors that hang on the trainer, for
                parameters that are in no module.
        """
        parameters = {**self._own_parameters(modules, elsewhere), **modules.parameters}
        for identity, parameter in parameters.items():
            if identity not in modules.parameters:
                yield from self._read(parameter.names[0][0], records_of(at, "param", parameter))
        yield from self._settings(at, parameters, modules)
        for key, values in list(self.target.state.items()):
            parameter_of = _looked_up(key, parameters, modules)
            if isinstance(key, torch.Tensor) and parameter_of is None:
                self.unread[f"{self.path}.state"] = (
                    "it is kept for a tensor that is in none of the param groups; add that tensor in `state()`"
                )
            elif parameter_of is not None:
                yield from self._beside(at, parameter_of, values)
            elif isinstance(key, str) and _is_attribute(self.target, key, values):
                continue
            elif isinstance(key, (str, int)):
                yield from self._alone(at, f"{self.path}.state.{key}", values)
            else:
                self.unread[f"{self.path}.state"] = (
                    f"it is kept by keys of type {type(key).__name__}, which say no parameter; "
                    "give what it holds by name in `state()`"
                )

    def _groups(self) -> Iterator[tuple[int, Mapping[str, Any]]]:
        for index, group in enumerate(self.target.param_groups):
            if isinstance(group, Mapping):
                yield index, group
            else:
                self.unread[f"{self.path}.group{index}"] = (
                    f"it is an object of {type(group).__name__} and no mapping; give its settings in `state()`"
                )

    def _own_parameters(self, modules: Modules, elsewhere: Mapping[int, str]) -> dict[int, Held]:
        """Parameters of the groups that are in no module, by their path from the trainer, or their place."""
        found: dict[int, Held] = {}
        for index, group in self._groups():
            for position, tensor in enumerate(_params(group)):
                if id(tensor) in modules.parameters or not isinstance(tensor, torch.Tensor):
                    continue
                name = elsewhere.get(id(tensor), f"{self.path}.group{index}.{position}")
                try:
                    pieces = held(tensor, (name,), own=True)
                except Unreadable as reason:
                    self.unread[name] = str(reason)
                    continue
                found |= {id(tensor): piece for piece in pieces[:1]}
        return found

    def _settings(self, at: At, parameters: Mapping[int, Held], modules: Modules) -> Iterator[Record]:
        """Every key of every param group, with its type, and the names of the group's parameters. Some optimizers
        keep state there, such as a copy of each parameter."""
        for index, group in self._groups():
            for key, value in group.items():
                name = f"{self.prefix}group{index}.{key}"
                name = owned(at.rank, name) if modules.is_local(name) else name
                if key == "params":
                    self.names[index] = list(_names(_params(group), parameters))
                    yield text(at, SETTING, name, "\n".join(self.names[index]))
                    continue
                if self._is_state(key, value):
                    yield from self._alone(at, name, value)
                    continue
                try:
                    words = line(value)
                except Unreadable:
                    words = type(value).__name__
                yield text(at, SETTING, name, words)

    def _is_state(self, key: str, value: Any) -> bool:
        """Whether an entry of a param group is no setting: it holds tensors, and more than the one number of a learning
        rate, or one that nobody gives to the constructor."""
        tensors = [leaf for _, leaf in leaves(value, "") if isinstance(leaf, torch.Tensor)]
        given = key in getattr(self.target, "defaults", (key,)) or key == "initial_lr"
        return bool(tensors) and (not given or any(tensor.numel() > 1 for tensor in tensors))

    def _beside(self, at: At, parameter: Held, values: Any) -> Iterator[Record]:
        """The state of one parameter."""
        for name, value in leaves(values, "") if isinstance(values, Mapping) else [("", values)]:
            role = ROLES.get(name, STATE)
            suffix = f".{name}" if role == STATE and name else ""
            yield from self._read(f"{parameter.names[0][0]}{suffix}", self._value(at, role, parameter, value, suffix))

    def _value(self, at: At, role: str, parameter: Held, value: Any, suffix: str) -> Iterator[Record]:
        first = self._first(role, parameter, suffix)
        if isinstance(value, torch.Tensor) and not (role == "step" and _scalar(value)):
            yield from records_beside(at, role, value, first, suffix)
            return
        for names in first.names:  # a count of steps, or a plain value: the same on every rank that owns elements
            if first.nothing_of(names):
                continue
            name = names[0] + suffix
            fqn = owned(at.rank, name) if first.own else name
            yield from leaf_records(at, role, fqn, value)

    def _first(self, role: str, parameter: Held, suffix: str) -> Held:
        """The parameter, under another name where an earlier optimizer has state of this name for it."""
        names = {these[0] for these in parameter.names}
        if not any((role, name + suffix) in self.taken for name in names):
            return parameter
        return parameter.renamed(prefix=f"{self.path}.")

    def _alone(self, at: At, path: str, values: Any) -> Iterator[Record]:
        """State under a name that is no parameter's, for this rank alone."""
        for name, value in leaves(values, path):
            fqn = name if isinstance(value, torch.Tensor) else owned(at.rank, name)
            yield from self._read(name, leaf_records(at, STATE, fqn, value, own=True))

    def _read(self, name: str, records: Iterator[Record]) -> Iterator[Record]:
        try:
            yield from records
        except Unreadable as reason:
            self.unread[name] = str(reason)


def as_one(mets: Sequence[Met]) -> list[Met]:
    """Optimizers, with each of torch's ZeRO, which gives every rank some of the parameters, and the one inside of it as
    one: the settings of all parameters, and the state of those that this rank steps."""
    zeros = [met for met in mets if any(kind.__name__ == _ZERO for kind in type(met.value).__mro__)]
    inside = {id(met.value.optim): met for met in zeros if hasattr(met.value, "optim")}
    as_they_are = {id(met.value) for met in mets} - inside.keys() - {id(outer.value) for outer in inside.values()}
    found = [met for met in mets if id(met.value) in as_they_are]
    for outer in inside.values():
        whole = object.__new__(type(outer.value.optim))
        vars(whole).update(vars(outer.value.optim), param_groups=outer.value.param_groups)
        found.append(replace(outer, value=whole))
    return found


_ZERO = "ZeroRedundancyOptimizer"


def taken_by(records: list[Record]) -> set[tuple[str, str]]:
    """Role and name of what an optimizer has recorded, which the next one must not record again."""
    return {(record.role, record.fqn) for record in records}


def _looked_up(key: object, parameters: Mapping[int, Held], modules: Modules) -> Held | None:
    if isinstance(key, str):
        return modules.names.get(key)
    return parameters.get(id(key))


def _is_attribute(target: Any, name: str, value: Any) -> bool:
    """Whether a plain value in an optimizer's state is a copy of its attribute of that name. A state dict that carries
    such an attribute leaves the copy behind where it is loaded; a fresh optimizer has none, and nothing reads it."""
    return type(value) in (bool, int, float, str) and getattr(target, "__dict__", {}).get(name) == value


def _plain(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return [_plain(part) for part in value]
    return value if value is None or type(value) in (bool, int, float, str) else {"type": type(value).__name__}


def _scalar(value: torch.Tensor) -> bool:
    return not isinstance(value, DTensor) and value.numel() == 1


def _params(group: Mapping[str, Any]) -> list[Any]:
    params = group.get("params", ())
    return [params] if isinstance(params, torch.Tensor) else list(params)


def _names(params: list[Any], parameters: Mapping[int, Held]) -> Iterator[str]:
    for tensor in params:
        known = parameters.get(id(tensor))
        if known is None:
            yield "?"
        else:
            yield from (names[0] for names in known.names)


def state_of(optimizer: Any) -> Any:
    """An optimizer's mapping from parameters to their state; None if it has none."""
    try:
        state, groups = getattr(optimizer, "state", None), getattr(optimizer, "param_groups", None)
    except Exception:  # a property of foreign code
        return None
    return state if isinstance(state, Mapping) and isinstance(groups, (list, tuple)) else None
