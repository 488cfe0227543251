"""Any optimizer by the import path of its class, whole and sharded, through `state_dict` and through DCP.

The axis `optimizer` takes a class and, in brackets, arguments of its constructor, such as
`torch.optim.SGD(momentum=0.9)`. `way` is where its parameters lie: on every rank as whole tensors, as whole tensors
that are first cut into the rows that the ranks would hold or turned around, or sharded by `fully_shard`. All of them
must come to the same.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from shardproof.trainer import Cell, Trainer, Unsupported
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # compiled steps may add up in another order for every shape

USUAL_LR, WEIGHT_DECAY = 0.01, 0.25
"""The learning rate of an optimizer that has none by default, and the weight decay of the second param group."""


NO_STATE = "it keeps no state"


class Optimizers(Trainer):
    """Any torch.optim.Optimizer, on whole tensors and under FSDP2."""

    axes = {
        "mesh": ["2", "4", ...],
        "optimizer": ["torch.optim.AdamW", ...],
        "model": ["optimizer_layers", "optimizer_matrices", "optimizer_few_rows"],
        "way": ["whole", "cut", "reversed", "sharded"],
        "offload": [False, True],
        "dtype": ["fp32", "bf16"],
        "groups": ["one", "two"],
        "apart": [False, True],
        "lr": ["number", "tensor"],
        "halved": [False, True],
    }
    alike = {"way": "rounding", "offload": "rounding", "apart": "rounding", "lr": "rounding"}
    steps = (2, 1)

    def build(self, cell: Cell) -> None:
        """The model, and an optimizer of its parameters or of what the way makes of them."""
        self.cell = cell
        self.loaded = False
        self.sharded = cell.way == "sharded"
        if (cell.offload and not self.sharded) or (cell.apart and (self.sharded or cell.groups != "two")):
            raise Unsupported("only sharded parameters are offloaded, and only two groups of whole ones stepped apart")
        self.cls, self.arguments = read(cell.optimizer)
        self.model = self.probe(cell.model, cell, dtype=cell.dtype)
        self.parts = {name: list(self.arranged(p)) for name, p in self.model.named_parameters()}
        if self.sharded:
            names = ("replicate", "shard")[-len(cell.sizes) :]
            mesh = init_device_mesh(cell.device, cell.sizes, mesh_dim_names=names)
            policy = CPUOffloadPolicy(pin_memory=cell.device == "cuda") if cell.offload else OffloadPolicy()
            for module in (*self.model.children(), self.model):
                fully_shard(module, mesh=mesh, offload_policy=policy)
        stepped = [part for parts in self.parts.values() for part in parts]
        if cell.way in ("whole", "sharded"):
            stepped = list(self.model.parameters())
        groups = [stepped[::2], stepped[1::2]] if cell.groups == "two" else [stepped]
        described = [self.group(number, group) for number, group in enumerate(groups)]
        if cell.apart:
            self.optimizers = [self.cls([group], **self.options()) for group in described]
        else:
            self.optimizers = [self.cls(described if cell.groups == "two" else stepped, **self.options())]
        self.enter("train")

    def arranged(self, parameter: nn.Parameter) -> Iterator[nn.Parameter]:
        """The pieces of a whole parameter that the optimizer is given in its place."""
        if self.cell.way == "cut":
            rows = parameter.detach().chunk(self.cell.sizes[-1])
            yield from (nn.Parameter(piece.clone()) for piece in rows)
        elif self.cell.way == "reversed":
            yield nn.Parameter(parameter.detach().flip(tuple(range(parameter.dim()))))

    def group(self, number: int, params: list[nn.Parameter]) -> dict[str, Any]:
        """A param group; the second has settings of its own, as far as the class has them."""
        own = {"lr": self.lr() / 2, "weight_decay": WEIGHT_DECAY} if number else {}
        return {"params": params, **{name: value for name, value in own.items() if name in taken(self.cls)}}

    def options(self) -> dict[str, Any]:
        """What the constructor gets besides parameters."""
        return {**self.arguments, **({"lr": self.lr()} if "lr" in taken(self.cls) else {})}

    def lr(self) -> Any:
        """A new learning rate: ranks that load have twice that of those that saved, so that its load is seen."""
        given = self.arguments.get("lr", taken(self.cls)["lr"].default if "lr" in taken(self.cls) else None)
        if "lr" in self.arguments and not isinstance(given, int | float):
            return given  # which the constructor refuses
        lr = (given if isinstance(given, int | float) else USUAL_LR) * (1 + self.cell.seed % 2)
        return torch.tensor(lr) if self.cell.lr == "tensor" else lr

    def step(self, index: int) -> None:
        """One update with the mean of the ranks' gradients; before the second one the rate is halved, if it is."""
        for group in (group for each in self.optimizers for group in each.param_groups if self.cell.halved):
            if index == 1 and isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(group["lr"].item() / 2)  # as torch's schedulers set it
            elif index == 1:
                group["lr"] /= 2
        self.enter("train")
        self.model(index).backward()
        for name, parameter in self.model.named_parameters():
            if not self.sharded:
                dist.all_reduce(parameter.grad)
                parameter.grad /= self.cell.world
            for part, gradient in zip(self.parts[name], self.arranged(nn.Parameter(parameter.grad)), strict=True):
                part.grad = gradient.detach()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.model.zero_grad()
        for name, parameter in self.model.named_parameters() if self.cell.way in ("cut", "reversed") else ():
            whole = torch.cat([part.detach() for part in self.parts[name]])
            turned = tuple(range(whole.dim())) if self.cell.way == "reversed" else ()
            parameter.data.copy_(whole.flip(turned))

    def save(self, folder: Path) -> None:
        """`torch.save` of whole tensors, DCP of sharded ones."""
        if self.cell.apart or self.cell.way in ("cut", "reversed"):
            raise Unsupported("nobody trains like this: only the steps are compared")
        [optimizer] = self.optimizers
        if not self.loaded and not any(optimizer.state.values()) and not keeps_tensors(optimizer.param_groups):
            raise Unsupported(NO_STATE)
        self.enter("eval")
        if self.sharded:
            dcp.save(self.state_dict(), checkpoint_id=folder)
        elif self.cell.rank == 0:
            torch.save({"model": self.model.state_dict(), "optimizer": optimizer.state_dict()}, folder / "whole.pt")
        dist.barrier()

    def load(self, folder: Path) -> None:
        """The same the other way round, with `torch.load` as it is by default."""
        [optimizer] = self.optimizers
        if self.sharded:
            kept = self.state_dict()
            dcp.load(kept, checkpoint_id=folder)
            found = {"model_state_dict": kept["model"], "optim_state_dict": kept["optimizer"]}
            set_state_dict(self.model, optimizer, **found)
        else:
            kept = torch.load(folder / "whole.pt")
            self.model.load_state_dict(kept["model"])
            optimizer.load_state_dict(kept["optimizer"])
        self.loaded = True

    def state_dict(self) -> dict[str, Any]:
        """What DCP writes, and reads into."""
        model, optimizer = get_state_dict(self.model, self.optimizers[0])
        return {"model": model, "optimizer": optimizer}

    def enter(self, mode: str) -> None:
        """Call the `train` or `eval` that schedule-free optimizers have, as users do before steps and saves. Each
        computes parameters anew, with rounding: called after a save too, it would part a run from the resumed one."""
        for optimizer in self.optimizers:
            if callable(change := getattr(optimizer, mode, None)):
                change()

    def state(self) -> dict[str, Any]:
        """The optimizer too, unless it steps other tensors than the model's own."""
        apart = self.cell.way in ("cut", "reversed")
        return {"model": self.model, **({} if apart else {"optimizers": self.optimizers})}


def read(text: str) -> tuple[Any, dict[str, Any]]:
    """The class of `module.Class` or `module.Class(name=value,…)`, and its arguments: literals, or names of torch."""
    path, _, inside = text.partition("(")
    module, _, name = path.rpartition(".")
    call = ast.parse(f"f({inside or ')'}", mode="eval").body
    assert isinstance(call, ast.Call)
    return getattr(importlib.import_module(module), name), {k.arg or "": argument(k.value) for k in call.keywords}


def argument(node: ast.expr) -> Any:
    """The value of an argument: a literal, or a name of torch such as `torch.bfloat16`; any other word is a text."""
    text = ast.unparse(node)
    if text.startswith("torch."):
        return getattr(torch, text.removeprefix("torch."))
    return text if isinstance(node, ast.Name) else ast.literal_eval(node)


def taken(cls: type) -> dict[str, inspect.Parameter]:
    """What the constructor of a class takes behind the parameters."""
    return dict(list(inspect.signature(cls).parameters.items())[1:])


def keeps_tensors(value: Any) -> bool:
    """Whether param groups hold more than parameters and numbers: some optimizers keep their state there."""
    if isinstance(value, dict):
        return any(keeps_tensors(inner) for name, inner in value.items() if name != "params")
    if isinstance(value, list | tuple):
        return any(map(keeps_tensors, value))
    return isinstance(value, torch.Tensor) and value.numel() > 1
