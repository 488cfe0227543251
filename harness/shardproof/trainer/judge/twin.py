"""The twin of a trainer: the optimizers of torch that were found on it, on whole tensors, in one process.

The other arms put a trainer beside itself, so that what is wrong in the same way in all of them stays unseen. Where the
model comes from `Trainer.probe`, the gradients are known: the mean of what the ranks contribute. Where the optimizer is
one of `torch.optim` that treats every element alone, its result on whole tensors is what every sharding must come to,
bit for bit. So the twin starts from the parameters and the state that were observed first, takes the steps of the
uninterrupted run with the settings that were observed in the param groups, and is put beside what the ranks observed.

A learning-rate schedule may set the rate before the optimizer's step or behind it. The twin takes the settings that
stand before a step and, where these come to other bits, those that stand after it.

*Verifies*: averaging over ranks, the arithmetic of the optimizer on shards, the dtype in which it steps.
*Does not verify*: optimizers outside of torch; ones that look at whole matrices; gradients that a trainer clips, scales
or accumulates (`Trainer.probe(..., twin=False)` says so).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from shardproof.models import is_idle
from shardproof.observe.logical import Value
from shardproof.observe.record import Record
from shardproof.oracle.contract import Contract
from shardproof.oracle.inputs import Parameter
from shardproof.oracle.steppers import TORCH_DTYPE, state_of
from shardproof.oracle.twin import value_of
from shardproof.oracle.values import exact_gradient
from shardproof.program import Op
from shardproof.scenario import DTypePolicy, Scenario
from shardproof.trainer.arms import TOLD
from shardproof.trainer.values.every_mesh import ROLES, STATE, of_every_mesh

ELEMENTWISE = ("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
"""The optimizers of `torch.optim` that treat every element alone, so that sharding changes no bit."""

FP32 = "fp32"

NO_PROBE = (
    "the model does not come from self.probe, whose right gradients are known; so a mistake that every run makes "
    "alike, such as gradients that are summed twice, cannot be seen"
)

Name = tuple[str, str]
Values = Mapping[Name, Value]


@dataclass(frozen=True)
class Told:
    """What rank 0 says after one operation.

    * models: name and dtype of each model that came from `probe`. declined: whether one of them came with
      `twin=False`.
    * optimizers: each one's `class` with its module, and its `groups`: settings, and as `params` the names of those
      parameters that have a gradient.
    """

    models: Sequence[tuple[str, str]]
    declined: bool
    optimizers: Sequence[Mapping[str, Any]]

    @property
    def stepped(self) -> list[tuple[str, list[Any]]]:
        """Each optimizer's class, and the parameters of its groups."""
        return [(each["class"], [group["params"] for group in each["groups"]]) for each in self.optimizers]

    @classmethod
    def by_op(cls, records: Sequence[Record]) -> dict[int, Told]:
        """The records of role `told` by their operation, as `Told`."""
        return {record.op: cls(**json.loads(record.data)) for record in records if record.role == TOLD}


class NoTwin(Exception):  # noqa: N818 (it is no error, but the reason why there is nothing to compare)
    """A trainer that the twin does not apply to, and why."""


def stepped(
    scenario: Scenario, ops: Sequence[Op], told: Mapping[int, Told], observed: Mapping[int, Values]
) -> Iterator[tuple[Op, Values, Values]]:
    """The steps of a session, each with what the twin comes to and with what the ranks had, of the same names.

    Args:
        ops: the operations of the session that were observed. observed: operation → (role, name) → value.

    Raises:
        NoTwin: why the twin does not apply.
    """
    first = told.get(ops[0].index)
    if first is None or not first.models:
        raise NoTwin(NO_PROBE)
    known = _parameters(scenario, ops[0], first, observed[ops[0].index])
    if any(told[op.index].stepped != first.stepped for op in ops):
        raise NoTwin("the optimizers, or the parameters that they step, change along the way")
    twin = _Twin(known, first, observed[ops[0].index])
    for before, op in pairwise(ops):
        if op.kind != "step":
            continue
        (there, _), start = of_every_mesh(observed[op.index]), twin.kept()
        for settings in (told[before.index], told[op.index]):
            twin.put_back(start)
            twin.step(op.iteration, settings, scenario.seed)
            expected = twin.values()
            if all(there.get(name) == value for name, value in expected.items()):
                break
        yield op, expected, {name: there[name] for name in expected if name in there}


def _parameters(scenario: Scenario, op: Op, told: Told, values: Values) -> dict[str, Parameter]:
    """Observed name of a parameter → the model's own parameter, of those that an optimizer steps.

    Raises:
        NoTwin: the twin does not apply.
    """
    if told.declined:
        raise NoTwin("the trainer calls self.probe with twin=False")
    if scenario.device != "cpu":
        raise NoTwin("the twin steps on a CPU, whose kernels round in another way than those of a GPU")
    if len(told.models) > 1:
        raise NoTwin("there is more than one model from self.probe")
    if not told.optimizers:
        raise NoTwin("no optimizer was found after the first operation")
    for optimizer in told.optimizers:
        module, _, name = optimizer["class"].rpartition(".")
        if not module.startswith("torch.optim") or name not in ELEMENTWISE:
            raise NoTwin(f"{name} is no optimizer of torch.optim that treats every element alone")
        if odd := [key for group in optimizer["groups"] for key, value in group.items() if isinstance(value, dict)]:
            raise NoTwin(f"the setting {odd[0]} of {name} is no plain value")
    ((name, dtype),) = told.models
    model = Contract().parameters(replace(scenario, model=name, dtype=DTypePolicy.parse(dtype)), op.mesh)
    names = [name for optimizer in told.optimizers for group in optimizer["groups"] for name in group["params"]]
    found = {}
    for name in names:
        of = [p for p in model for fqn in p.names if name == fqn or name.endswith(f".{fqn}")]
        value = values.get(("param", name))
        if len(of) != 1 or value is None or tuple(value.shape) != of[0].shape:
            raise NoTwin(f"{name} is no parameter of the model that self.probe gave, as it was found")
        if value.dtype != FP32:
            raise NoTwin(f"{name} is kept in {value.dtype}, and the twin steps in fp32")
        found[name] = of[0]
    return found


class _Twin:
    """Whole tensors, and the optimizers that step them."""

    def __init__(self, known: Mapping[str, Parameter], told: Told, values: Values) -> None:
        self.known = known
        self.tensors = {name: torch.nn.Parameter(_tensor(values["param", name])) for name in known}
        self.optimizers = [self._made(each) for each in told.optimizers]
        for optimizer in self.optimizers:
            for name in self._names(optimizer):
                if state := _state(name, values):
                    optimizer.state[self.tensors[name]] = state

    def _made(self, told: Mapping[str, Any]) -> torch.optim.Optimizer:
        groups = [{**group, "params": [self.tensors[name] for name in group["params"]]} for group in told["groups"]]
        made: torch.optim.Optimizer = getattr(torch.optim, told["class"].rpartition(".")[2])(groups)
        return made

    def _names(self, optimizer: torch.optim.Optimizer) -> list[str]:
        held = {id(tensor) for group in optimizer.param_groups for tensor in group["params"]}
        return [name for name, tensor in self.tensors.items() if id(tensor) in held]

    def kept(self) -> list[Any]:
        """Copies of the tensors and of the optimizers' state."""
        copies: list[Any] = [{name: tensor.detach().clone() for name, tensor in self.tensors.items()}]
        for optimizer in self.optimizers:
            copies.append({name: deepcopy(optimizer.state.get(self.tensors[name], {})) for name in self.known})
        return copies

    def put_back(self, copies: Sequence[Any]) -> None:
        """Give tensors and state the values of copies from `kept`."""
        with torch.no_grad():
            for name, tensor in self.tensors.items():
                tensor.copy_(copies[0][name])
        for optimizer, states in zip(self.optimizers, copies[1:], strict=True):
            optimizer.state.clear()
            optimizer.state.update({self.tensors[name]: deepcopy(state) for name, state in states.items() if state})

    def step(self, iteration: int, told: Told, seed: int) -> None:
        """One update with the settings of a moment."""
        for name, parameter in self.known.items():
            self.tensors[name].grad = None
            if parameter.gradient is not None and not is_idle(parameter.idle, iteration, 0):
                at = (seed, iteration, (0,))
                gradient = exact_gradient(parameter.uses, parameter.shape, parameter.gradient, FP32, at)
                self.tensors[name].grad = gradient.clone()
        for optimizer, found in zip(self.optimizers, told.optimizers, strict=True):
            for group, settings in zip(optimizer.param_groups, found["groups"], strict=True):
                group.update({key: value for key, value in settings.items() if key != "params"})
            optimizer.step()

    def values(self) -> dict[Name, Value]:
        """Parameters and state, under the names that observations have. A parameter that only some forwards use is left
        out: whether its gradient is then zero or absent is the trainer's choice."""
        found: dict[Name, Value] = {}
        for name, parameter in self.known.items():
            if parameter.idle:
                continue
            found["param", name] = value_of(self.tensors[name])
            for optimizer in self.optimizers:
                for key, value in state_of(optimizer, self.tensors[name]):
                    role = ROLES.get(key, STATE)
                    found[role, name if role != STATE else f"{name}.{key}"] = value_of(value)
        return found


def _tensor(value: Value) -> torch.Tensor:
    flat = np.frombuffer(bytearray(value.data), np.uint8)
    return torch.from_numpy(flat).view(TORCH_DTYPE[value.dtype]).reshape(value.shape)


def _state(name: str, values: Values) -> dict[str, torch.Tensor]:
    """The state of a parameter as it was observed."""
    found = {key: _tensor(values[role, name]) for key, role in ROLES.items() if (role, name) in values}
    for (role, fqn), value in values.items():
        if role == STATE and fqn.rpartition(".")[0] == name and value.dtype in TORCH_DTYPE:
            found[fqn.rpartition(".")[2]] = _tensor(value)
    return found
