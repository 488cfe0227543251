"""Experts under FSDP2 with a mesh of their own, beside layers that are sharded over all ranks, as trainers of mixtures
of experts build it (torchtitan and NeMo Automodel do).

The experts are cut over the ranks of `ep`, and each part over the ranks that hold the same experts. Tokens are gathered
over `ep`, every rank computes its experts for all of them, and each token gets its sum back. FSDP2 averages an expert's
gradients over the ranks of its own mesh, so that the divisor must be set to the number of all ranks. Gradients lie on
two meshes: `clip_grad_norm_` adds up norms of one mesh only, so that norms are taken mesh by mesh, and joined.

`experts=whole` computes the same with experts that are sharded like everything else, and must come to the same values.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from shardproof.trainer import Cell, Trainer, Unsupported
from torch.distributed._functional_collectives import all_gather_tensor_autograd, reduce_scatter_tensor_autograd
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

EXPERTS, WIDTH, TOKENS = 4, 4, 3


class Experts(torch.nn.Module):
    """Linear layers of which each token has one; where `group` is given, this rank has a part of them."""

    def __init__(self, group: Any = None) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / WIDTH)
        self.group = group

    def forward(self, tokens: torch.Tensor, expert: torch.Tensor) -> torch.Tensor:
        """What each token's expert makes of it, (tokens, width)."""
        weight = self.weight.to_local() if isinstance(self.weight, DTensor) else self.weight
        if self.group is None:
            return torch.einsum("tw,twv->tv", tokens, weight[expert])
        own, here = len(weight), dist.get_rank(self.group)
        every = all_gather_tensor_autograd(tokens.contiguous(), 0, self.group)
        chosen = all_gather_tensor_autograd(expert, 0, self.group) - here * own
        mine = (chosen >= 0) & (chosen < own)
        made = torch.einsum("tw,twv->tv", every, weight[chosen.clamp(0, own - 1)]) * mine[:, None]
        return reduce_scatter_tensor_autograd(made, "sum", 0, self.group)


class Mixture(torch.nn.Module):
    """A dense layer, experts, and a head."""

    def __init__(self, group: Any = None) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(WIDTH, WIDTH)
        self.experts = Experts(group)
        self.head = torch.nn.Linear(WIDTH, 2)

    def forward(self, tokens: torch.Tensor, expert: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.inner(tokens))
        return self.head(hidden + self.experts(hidden, expert))  # type: ignore[no-any-return]


class ExpertMesh(Trainer):
    """A mixture of experts under FSDP2, its experts on a mesh of their own."""

    axes = {
        "mesh": ["2", "4", "2x2"],
        "experts": ["whole", "cut"],
        "optimizer": ["adamw", "sgd"],
        "clip": [0.0, 0.1],
        "checkpoint": ["dcp", "full"],
        "lr": [0.01, 0.003],
    }
    altered = {"lr": "checkpoint"}
    alike = {"experts": "rounding"}

    def build(self, cell: Cell) -> None:
        """The last dimension of the mesh is that of the experts."""
        self.cell = cell
        torch.manual_seed(cell.seed)
        cut = cell.experts == "cut"
        mesh = init_device_mesh(cell.device, (cell.world,), mesh_dim_names=("fsdp",))
        ep = cell.sizes[-1]
        if cut and EXPERTS % ep:
            raise Unsupported(f"{EXPERTS} experts are not cut over {ep} ranks")
        of_experts = init_device_mesh(cell.device, (cell.world // ep, ep), mesh_dim_names=("edp", "ep"))
        self.model = Mixture(of_experts["ep"].get_group() if cut else None).to(cell.device)
        if cut:
            weight = distribute_tensor(self.model.experts.weight.detach(), of_experts["ep"], [Shard(0)])
            self.model.experts.weight = torch.nn.Parameter(weight)
            fully_shard(self.model.experts, mesh=of_experts["edp"], shard_placement_fn=lambda _: Shard(1))
            self.model.experts.set_force_sum_reduction_for_comms(True)  # gloo has no sum that divides
            self.model.experts.set_gradient_divide_factor(cell.world)
        fully_shard(self.model, mesh=mesh)
        kinds = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
        more = {"momentum": 0.9} if cell.optimizer == "sgd" else {}
        self.optimizer = kinds[cell.optimizer](self.model.parameters(), lr=cell.lr, foreach=False, **more)

    def step(self, index: int) -> None:
        seed = torch.Generator().manual_seed(100 * index + self.cell.rank)
        tokens = torch.randn(TOKENS, WIDTH, generator=seed).to(self.cell.device)
        expert = torch.randint(EXPERTS, (TOKENS,), generator=seed).to(self.cell.device)
        self.optimizer.zero_grad()
        self.model(tokens, expert).square().mean().backward()
        if self.cell.clip:
            self.clip()
        self.optimizer.step()

    def clip(self) -> None:
        """Clip by the norm of all gradients, of which those on one mesh are added up at a time."""
        meshes: dict[Any, list[torch.nn.Parameter]] = {}
        for parameter in self.model.parameters():
            if isinstance(parameter.grad, DTensor):
                meshes.setdefault(parameter.grad.device_mesh, []).append(parameter)
        norms = [torch.nn.utils.get_total_norm([p.grad for p in held], foreach=False) for held in meshes.values()]
        total = torch.stack([n.full_tensor() for n in norms if isinstance(n, DTensor)]).norm()
        for held in meshes.values():
            torch.nn.utils.clip_grads_with_norm_(held, self.cell.clip, total, foreach=False)

    def options(self) -> StateDictOptions:
        """A whole state dict is gathered on every rank, and read by every rank."""
        return StateDictOptions(full_state_dict=self.cell.checkpoint == "full")

    def save(self, folder: Path) -> None:
        model, optimizer = get_state_dict(self.model, self.optimizer, options=self.options())
        if self.cell.checkpoint == "dcp":
            dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder / "dcp")
            return
        if self.cell.rank == 0:
            torch.save({"model": model, "optimizer": optimizer}, folder / "whole.pt")
        dist.barrier()

    def load(self, folder: Path) -> None:
        if self.cell.checkpoint == "dcp":
            model, optimizer = get_state_dict(self.model, self.optimizer)
            dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=folder / "dcp")
        else:
            kept = torch.load(folder / "whole.pt")
            model, optimizer = kept["model"], kept["optimizer"]
        set_state_dict(
            self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer, options=self.options()
        )
