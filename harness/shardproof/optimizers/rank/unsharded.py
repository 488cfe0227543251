"""Runs the optimizer on whole tensors in one process, as the baseline for every sharded run.

Parameters start with the values, and get the mean gradients, that the ranks of the arm's mesh have. A position question
arranges the same elements in another way: cut into the rows that ranks would hold, each a parameter of its own, or with
the last element first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

from shardproof import probe
from shardproof.layout import shard_box
from shardproof.mechanisms.probe_module import DTYPE_NAME, Box, Probe, build_model, tensor_bytes
from shardproof.models import NamedParam
from shardproof.observe.record import LIVE, Record
from shardproof.optimizers.arms import HALVED_AT, Arm
from shardproof.optimizers.rank import construct, observe
from shardproof.program import Op
from shardproof.protocol.system import RankContext
from shardproof.scenario import Mesh

FILE = "whole.pt"


@dataclass(frozen=True)
class Part:
    """A parameter that the optimizer is given: all of a logical tensor, or a box of it."""

    named: NamedParam
    box: Box
    parameter: nn.Parameter


class Whole:
    """The `RankSystem` of an arm without sharding. `parts` are in the model's order."""

    def __init__(self, context: RankContext, arm: Arm) -> None:
        self.context, self.arm, self.scenario, self.spec = context, arm, context.scenario, context.model
        self.ranks = Mesh(*map(int, arm.ranks.split("x")))
        self.probe = Probe(context, lambda fqn: ((), ()))
        self.parts: list[Part] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        self.drew = False

    def build(self, op: Op) -> None:
        """Tensors with initial values, and the optimizer, or one for each group."""
        construct.seed(op.init_seed)
        root = build_model(self.probe, op.init_seed)
        self.parts = [
            Part(named, box, nn.Parameter(self._arranged(root.get_parameter(named.fqn).detach(), box)))
            for named in self.spec.unique_params
            for box in self._boxes(named)
        ]
        parameters = [part.parameter for part in self.parts]
        groups = [parameters] if self.arm.groups == "one" else [parameters[::2], parameters[1::2]]
        if self.arm.groups == "apart":
            made = [construct.optimizer_of(self.arm, [group], op.init_seed, n) for n, group in enumerate(groups)]
        else:
            made = [construct.optimizer_of(self.arm, groups, op.init_seed)]
        self.optimizers = made
        self._enter("train")

    def step(self, op: Op) -> None:
        """One step on the exact mean gradients."""
        for optimizer in self.optimizers:
            if self.arm.halves and op.iteration == HALVED_AT:
                construct.halve_lr(optimizer)
        for part in self.parts:
            part.parameter.grad = self._arranged(self._gradient(part.named, op.iteration), part.box)
        for optimizer in self.optimizers:
            before = torch.get_rng_state()
            optimizer.step()
            self.drew = self.drew or not torch.equal(before, torch.get_rng_state())
            optimizer.zero_grad()

    def save(self, op: Op) -> None:
        """The parameters and the optimizer's own state dict, in a file of torch.save."""
        self._enter("eval")
        parameters = [part.parameter.detach() for part in self.parts]
        torch.save([parameters, *(optimizer.state_dict() for optimizer in self.optimizers)], self._file(op))
        self._enter("train")

    def load(self, op: Op) -> None:
        """The same, read as torch.load reads by default, into the optimizer's `load_state_dict`."""
        parameters, *states = torch.load(self._file(op))
        with torch.no_grad():
            for part, value in zip(self.parts, parameters, strict=True):
                part.parameter.copy_(value)
        for optimizer, kept in zip(self.optimizers, states, strict=True):
            optimizer.load_state_dict(kept)
        self._enter("train")

    def observe(self, op: Op) -> Iterable[Record]:
        """Parameters, state and param groups, and whether random numbers were drawn."""
        at = (op.index, 0)
        backwards = self.arm.arrangement == "reversed"
        for part in self.parts:
            shape, values = part.named.spec.shape, self._arranged(part.parameter.detach(), None)
            data, dtype = tensor_bytes(values), DTYPE_NAME[values.dtype]
            yield Record(op.index, 0, LIVE, "param", part.named.fqn, dtype, shape, *part.box, data)
            for optimizer in self.optimizers:
                kept = optimizer.state.get(part.parameter, {})
                yield from observe.state(at, part.named.fqn, part.parameter, shape, part.box, kept, backwards=backwards)
        for number, optimizer in enumerate(self.optimizers):
            yield from observe.settings(at, optimizer.param_groups, number)
        yield from observe.plain(at, "fact", "draws random numbers", self.drew)

    def _enter(self, mode: str) -> None:
        for optimizer in self.optimizers:
            construct.enter(optimizer, mode)

    def _file(self, op: Op) -> Path:
        folder = self.context.checkpoint_path(op)
        folder.mkdir(parents=True, exist_ok=True)
        return folder / FILE

    def _boxes(self, named: NamedParam) -> Iterator[Box]:
        """The boxes into which a whole tensor is cut before its step: the whole tensor, or the row ranges that sharded
        ranks would hold."""
        shape = named.spec.shape
        ranks = range(self.ranks.dp_shard) if self.arm.arrangement == "cut" else range(1)
        sizes = (1, self.ranks.dp_shard if self.arm.arrangement == "cut" else 1, 1)
        for rank in ranks:
            box = shard_box(shape, sizes, (0, rank, 0))
            if box.volume:
                yield box.start, box.size

    def _arranged(self, tensor: torch.Tensor, box: Box | None) -> torch.Tensor:
        """A box of a tensor as the optimizer gets it; None for all of it, which turns an arranged one back."""
        if box is not None:
            tensor = tensor[tuple(slice(at, at + n) for at, n in zip(*box, strict=True))]
        reversed_ = self.arm.arrangement == "reversed"
        return tensor.flip(tuple(range(tensor.dim()))) if reversed_ else tensor.clone()

    def _gradient(self, named: NamedParam, iteration: int) -> torch.Tensor:
        """The exact mean over ranks of the gradients that FSDP2's ranks get, in the dtype of the parameter."""
        grid = self.context.contract.gradient_grid(self.scenario, named.spec, self.ranks)
        keys = probe.element_keys(named.fqn, named.spec.shape, self.scenario.seed)
        units = probe.mean_units(keys, iteration, 0, grid)
        exact = torch.from_numpy(np.ascontiguousarray(units * grid.unit)).reshape(named.spec.shape)
        return exact.to(next(part.parameter.dtype for part in self.parts if part.named is named))
