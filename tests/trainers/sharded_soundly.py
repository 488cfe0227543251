"""Sound trainers that shard in two ways: torch's ZeRO, and experts that every rank has for itself, as DTensors."""

import torch
import torch.distributed as dist
from shardproof.trainer import Trainer
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel


class ShardedSoundly(Trainer):
    """DDP with ZeRO's optimizer, or FSDP2 over a mesh of one rank for each rank's own experts."""

    axes = {"how": ["zero", "experts"]}
    steps = (1, 1)
    local = ["*.experts.*"]

    def build(self, cell):
        self.cell = cell
        torch.manual_seed(cell.seed)
        layers = {"dense": torch.nn.Linear(8, 8), "experts": torch.nn.Linear(8, 4)}
        model = torch.nn.Sequential()
        for name, layer in layers.items():
            model.add_module(name, layer)
        if cell.how == "zero":
            layers["experts"].requires_grad_(requires_grad=False)
            self.model = DistributedDataParallel(model)
            trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
            self.optimizer = ZeroRedundancyOptimizer(trained, torch.optim.AdamW, lr=0.01)
            return
        torch.manual_seed(cell.seed + 10 * cell.rank)
        layers["experts"].reset_parameters()
        mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("all", "ep"))
        fully_shard(layers["experts"], mesh=init_device_mesh("cpu", (dist.get_world_size(), 1),
                                                             mesh_dim_names=("ep", "own"))["own"])  # fmt: skip
        fully_shard(model, mesh=mesh["ep"])
        self.model, self.optimizer = model, torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)

    def step(self, index):
        batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * index + self.cell.rank))
        self.optimizer.zero_grad()
        self.model(batch).square().mean().backward()
        self.optimizer.step()

    def save(self, folder):
        if self.cell.how == "zero":
            self.optimizer.consolidate_state_dict(0)
        last = self.cell.how == "zero" and self.cell.rank > 0
        kept = {"model": self.model.state_dict(), "optimizer": None if last else self.optimizer.state_dict()}
        torch.save(kept, folder / f"{self.cell.rank}.pt")
        dist.barrier()

    def load(self, folder):
        rank = 0 if self.cell.how == "zero" else self.cell.rank
        kept = torch.load(folder / f"{rank}.pt", weights_only=False)
        self.model.load_state_dict(kept["model"])
        self.optimizer.load_state_dict(kept["optimizer"])
