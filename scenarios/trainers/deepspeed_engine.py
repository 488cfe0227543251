"""DeepSpeed's engine with the optimizers that it builds itself from its configuration, Muon above all.

The system `deepspeed` hands the engine an optimizer of torch. Here the configuration names one. `Muon` moves matrices
in the direction that Newton-Schulz gives of their momentum, and the rest by Adam, and every stage of ZeRO runs it at
another place: on the weights (0), while gradients are cut into partitions (1, 2), in groups of sub-modules (3), before
clipping where the optimizer is offloaded. In fp32 they must come to the same values, which the arm `alike stage` asks.
In bf16 (`deepspeed_engine.py:Resumes`) they accumulate gradients otherwise, and are not compared with each other. There
`resumed` and `again` fail in dtype alone, without offload: momentum that was bf16 comes back from a checkpoint in fp32,
which DeepSpeed has made trainable since (#7746), and not undone.

What is looked at are whole tensors: masters as `safe_get_full_fp32_param` gives them, and the optimizer's state. ZeRO's
own checkpoints belong to one number of ranks.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from shardproof.trainer import Cell, Trainer, Unsupported

os.environ["DS_ACCELERATOR"] = "cpu"
os.environ["TORCHDYNAMO_DISABLE"] = "1"  # Muon's kernels are compiled, which takes longer than all that they compute
import deepspeed
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled; gloo does without
deepspeed.utils.logger.setLevel("ERROR")

MOMENTUM = "momentum_buffer"


class Resumes(Trainer):
    """A small network under ZeRO, stepped by an optimizer of DeepSpeed's own, in fp32 and in bf16."""

    axes = {
        "mesh": ["2", "4"],
        "stage": [1, 2, 3, 0],
        "offload": [False, True],
        "optimizer": ["Muon", "Muon-standard", "AdamW"],
        "precision": ["fp32", "bf16"],
        "accumulation": [1, 2],
        "clip": [0.0, 0.1],
        "groups": ["one", "no_decay"],
        "lr": [0.01, 0.003],
    }
    requires = (
        "deepspeed==0.19.8", "annotated-types==0.8.0", "einops==0.8.2", "hjson==3.1.0", "msgpack==1.2.4",
        "ninja==1.13.2", "packaging==26.3", "psutil==7.2.2", "py-cpuinfo==9.0.0", "pydantic==2.14.3",
        "pydantic-core==2.50.4", "tqdm==4.70.1", "typing-inspection==0.4.5",
    )  # fmt: skip
    altered = {"lr": "checkpoint"}

    def build(self, cell: Cell) -> None:
        """The engine, as `deepspeed.initialize` makes it of a configuration."""
        self.cell, self.loaded = cell, False
        self.refuse(cell)
        torch.manual_seed(cell.seed)
        numbers: dict[str, Any] = {"lr": cell.lr, "weight_decay": 0.1}
        kind, _, standard = cell.optimizer.partition("-")
        if kind == "Muon":
            numbers |= {"momentum": 0.9, "ns_method": standard or "gram"}
        zero: dict[str, Any] = {"stage": cell.stage, "reduce_scatter": False}
        if cell.offload:
            zero["offload_optimizer"] = {"device": "cpu", "pin_memory": False}
        if cell.stage == 3:
            zero["stage3_param_persistence_threshold"] = 0
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": cell.accumulation,
            "gradient_clipping": cell.clip,
            "zero_optimization": zero,
            "optimizer": {"type": kind, "params": numbers | {"torch_adam": True}},
            "zero_force_ds_cpu_optimizer": False,
            "bf16": {"enabled": cell.precision == "bf16"},
        }
        model = network()
        groups = [{"params": [*model.parameters()]}]
        if cell.groups == "no_decay":
            flat = [parameter for parameter in model.parameters() if parameter.dim() < 2]
            whole = [parameter for parameter in model.parameters() if parameter.dim() > 1]
            groups = [{"params": whole}, {"params": flat, "weight_decay": 0.0}]
        self.engine, *_ = deepspeed.initialize(
            model=model, model_parameters=groups, config=config, dist_init_required=False
        )
        self.dtype = torch.bfloat16 if cell.precision == "bf16" else torch.float32

    def refuse(self, cell: Cell) -> None:
        """Leave out what DeepSpeed does not have, and one wrapper that `state` cannot read."""
        if cell.stage == 0 and (cell.offload or cell.precision != "fp32"):
            raise Unsupported("stage 0 offloads nothing, and keeps masters of bf16 in another wrapper")

    def step(self, index: int) -> None:
        """One step of the optimizer, of as many batches as are accumulated."""
        for part in range(self.cell.accumulation):
            seed = torch.Generator().manual_seed(1000 * index + 10 * self.cell.rank + part)
            batch = torch.randn(2, 6, generator=seed).to(self.dtype)
            self.engine.backward(self.engine(batch).square().mean())
            self.engine.step()

    def save(self, folder: Path) -> None:
        """The engine's own checkpoint."""
        self.engine.save_checkpoint(str(folder), tag="kept")
        folder.joinpath("world").write_text(str(self.cell.world))

    def load(self, folder: Path) -> None:
        """The engine's own load, on as many ranks as have saved."""
        if int(folder.joinpath("world").read_text()) != self.cell.world:
            raise Unsupported("ZeRO's own checkpoints belong to one number of ranks")
        self.engine.load_checkpoint(str(folder), tag="kept")
        self.loaded = True

    def state(self) -> dict[str, Any]:
        """A whole model of the masters, and a whole optimizer beside it."""
        with torch.random.fork_rng(devices=[]):
            whole = network()
        names = {id(held): name for name, held in self.engine.module.named_parameters()}
        params = dict(whole.named_parameters())
        state: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
        flat = self.state_of_partitions() if self.cell.stage in (1, 2) else {}
        for name, held in self.engine.module.named_parameters():
            master = safe_get_full_fp32_param(held) if self.cell.stage else held
            params[name].data = master.detach().clone()
            state[params[name]] = flat[id(held)] if self.cell.stage in (1, 2) else self.state_of(held)
        groups = [
            {**group, "params": [params[names[id(held)]] for held in held_by]}
            for group, held_by in zip(self.engine.optimizer.param_groups, self.members(), strict=True)
        ]
        return {"model": whole, "optimizer": WholeOptimizer(state, groups)}

    def members(self) -> list[list[torch.nn.Parameter]]:
        """The parameters of each param group, which ZeRO replaces by flat ones."""
        zero = self.engine.optimizer
        if self.cell.stage == 0:
            return [group["params"] for group in zero.param_groups]
        return list(zero.bit16_groups if self.cell.stage < 3 else zero.fp16_groups)

    def state_of(self, held: torch.nn.Parameter) -> dict[str, torch.Tensor]:
        """A parameter's state in the optimizer, under stages 0 and 3."""
        if not self.cell.stage:
            kept = self.engine.optimizer.state.get(held, {})
            return {key: value for key, value in kept.items() if isinstance(value, torch.Tensor)}
        if not (self.engine.global_steps or self.loaded):
            return {}
        if getattr(held, "use_muon", False):
            every = self.engine.optimizer.optimizer.state.values()
            lies_in = next(kept[MOMENTUM].dtype for kept in every if MOMENTUM in kept)  # it is handed out in fp32
            return {MOMENTUM: safe_get_full_optimizer_state(held, MOMENTUM).to(lies_in)}
        return {key: safe_get_full_optimizer_state(held, key) for key in ("exp_avg", "exp_avg_sq")}

    def state_of_partitions(self) -> dict[int, dict[str, torch.Tensor]]:
        """Parameter, by identity → its state under stages 1 and 2.

        Adam's moments lie in a partition on each rank, and so does Muon's momentum where it is offloaded. Otherwise
        every rank keeps the whole momentum of each matrix that touches its partition, so that a matrix on a border has
        copies; one that differs is shown beside the first.
        """
        zero, found = self.engine.optimizer, {}
        for index, partition in enumerate(zero.single_partition_of_fp32_groups):
            params, own = zero.bit16_groups[index], zero.optimizer.state.get(partition, {})
            places = {id(parameter): place for place, parameter in enumerate(params)}
            touching = [places[id(parameter)] for parameter in zero.params_in_partition[index]]
            of_ranks: list[Any] = [None] * self.cell.world
            tensors = {key: value for key, value in own.items() if isinstance(value, torch.Tensor) and value.dim()}
            dist.all_gather_object(of_ranks, (touching, tensors))
            found |= {id(parameter): {} for parameter in params}
            for key in {key: None for _, kept in of_ranks for key in kept}:
                for place, copy in self.copies(key, of_ranks, [parameter.numel() for parameter in params]):
                    held, copy = found[id(params[place])], copy.view(params[place].shape)
                    if not torch.equal(held.setdefault(key, copy), copy):
                        held[f"{key} of another rank"] = copy
        return found

    def copies(self, key: str, of_ranks: list[Any], sizes: list[int]) -> Iterator[tuple[int, torch.Tensor]]:
        """`(place of a parameter, its flat state)` of all ranks."""
        if key != MOMENTUM or self.cell.offload:
            whole = torch.cat([kept[key] for _, kept in of_ranks])
            yield from enumerate(whole[: sum(sizes)].split(sizes))
            return
        for touching, kept in of_ranks:
            if key in kept:
                yield from zip(touching, kept[key].split([sizes[place] for place in touching]), strict=True)


class DeepSpeedEngine(Resumes):
    """A small network under ZeRO in fp32, in which all stages are alike."""

    axes = {
        "mesh": ["2", "4"],
        "stage": [1, 2, 3, 0],
        "offload": [False, True],
        "optimizer": ["Muon", "Muon-standard", "AdamW"],
        "precision": ["fp32"],
        "accumulation": [1, 2],
        "clip": [0.0, 0.1],
        "groups": ["one", "no_decay"],
        "lr": [0.01, 0.003],
    }
    alike = {"stage": "rounding"}


def network() -> torch.nn.Module:
    """Two matrices and a bias. On two ranks the second matrix lies in one partition, and the first on its border."""
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4, bias=False))


class WholeOptimizer:
    """Whole state and the settings of groups, for shardproof to look at."""

    def __init__(self, state: dict[torch.Tensor, dict[str, torch.Tensor]], groups: list[dict[str, Any]]) -> None:
        self.state, self.param_groups = state, groups
