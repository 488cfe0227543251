"""One rank: torch's training loop with another optimizer, and a checkpoint of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from shardproof.layout import Box
from shardproof.mechanisms.probe_module import Slot
from shardproof.models import NamedParam
from shardproof.observe.numbers import numbers_of
from shardproof.observe.record import Record
from shardproof.observe.settings import SETTING, settings_of
from shardproof.program import Op
from shardproof.readers.pieces import FULL_FILE
from shardproof.torch_loop.loop import STATE_ROLES, TorchRank
from shardproof.torch_loop.optimizers import OPTIMIZERS
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel


class Rank(TorchRank):
    """The `RankSystem` of `torch-zero`."""

    def shard(self, root: nn.Module) -> None:
        self.parallel = DistributedDataParallel(root)

    def make_optimizer(self, init_seed: int) -> ZeroRedundancyOptimizer:
        ask = self.contract.at_build(self.scenario, init_seed)
        options: dict[str, Any] = {"lr": ask.lr, "weight_decay": ask.weight_decay, "foreach": ask.impl == "foreach"}
        if ask.kind == "sgd":
            options |= {"momentum": ask.momentum, "nesterov": ask.nesterov}
        else:
            options |= {"betas": (ask.beta1, ask.beta2), "eps": ask.eps}
        return ZeroRedundancyOptimizer(self.param_groups(ask), OPTIMIZERS[ask.kind], **options)

    def backward(self, op: Op, *, overflow: bool) -> None:
        self.start_step()
        last = self.scenario.microbatches - 1
        for microbatch in range(self.scenario.microbatches):
            self.probe.slot = Slot(op.iteration, microbatch, overflow)
            with nullcontext() if microbatch == last else self.parallel.no_sync():
                self.backward_of(self.parallel(torch.ones(1, requires_grad=True)).sum())

    def capture_gradients(self) -> None:
        """A rank's optimizer sees the gradients of its own parameters: of the others this rank has an empty piece."""
        own = {id(p) for group in self.optimizer.optim.param_groups for p in group["params"]}
        self.gradients = {
            fqn: p.grad.detach().clone() if id(p) in own else p.grad.detach()[:0]
            for fqn, p in self.params.items()
            if p.grad is not None
        }

    # Checkpoints: one file of whole tensors

    def save(self, op: Op) -> None:
        self.optimizer.consolidate_state_dict(to=0)
        if self.context.rank == 0:
            path = self.context.checkpoint_path(op)
            path.mkdir(parents=True, exist_ok=True)
            optim = self.optimizer.state_dict()
            content = {"model": self.state.model.state_dict(), "optim": optim, "extra": self.state.extra()}
            torch.save(content, path / FULL_FILE)
        dist.barrier()

    def load(self, op: Op) -> None:
        content = self._read(op)
        self.state.model.load_state_dict(content["model"])
        self.optimizer.load_state_dict(content["optim"])
        self.state.set_extra(content["extra"])

    def load_model_only(self, op: Op) -> None:
        self.state.model.load_state_dict(self._read(op)["model"])

    def _read(self, op: Op) -> dict[str, Any]:
        content: dict[str, Any] = torch.load(self.context.checkpoint_path(op) / FULL_FILE, weights_only=True)
        return content

    def _order(self) -> list[str]:
        """The parameters' names in the order of the groups, which numbers them in a state dict."""
        names = {id(parameter): fqn for fqn, parameter in self.params.items()}
        return [names[id(p)] for group in self.optimizer.param_groups for p in group["params"]]

    # Observation

    def own_box(self, named: NamedParam) -> Box:
        return Box((0,) * len(named.spec.shape), named.spec.shape)

    def optimizer_records(self, op: Op) -> Iterator[Record]:
        """What this rank's part of the optimizer keeps, where the library keeps it."""
        local = self.optimizer.optim
        own = {id(parameter) for group in local.param_groups for parameter in group["params"]}
        order = iter(self._order())
        for group in self.optimizer.param_groups:
            for parameter, fqn in zip(group["params"], order, strict=False):
                if id(parameter) not in own:
                    continue
                for name, number in numbers_of(group):
                    yield self.number(op, "hyperparameter", f"{fqn}.{name}", number)
                for name, line in settings_of(group):
                    yield self.text(op, SETTING, f"{fqn}.{name}", line)
                for name, value in local.state.get(parameter, {}).items():
                    if value is not None:
                        yield self.whole(op, STATE_ROLES[name], fqn, torch.as_tensor(value))

    @property
    def optimizer(self) -> ZeroRedundancyOptimizer:
        assert isinstance(self.state.optimizer, ZeroRedundancyOptimizer)
        return self.state.optimizer
