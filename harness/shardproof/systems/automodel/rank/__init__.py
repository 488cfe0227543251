"""NeMo Automodel on one rank: a pretrained checkpoint through its loader, its FSDP2 strategy and its checkpointer.

Each build writes a small checkpoint as the hub has it, on rank 0, and has `from_pretrained` load and shard it.
Stepping and observing are those of `torch-fsdp2`, over whatever FSDP units the library made.

*Verifies* nothing by itself. *Does not exercise* kernels, Automodel's own model implementations, its recipes, tensor,
pipeline or expert parallelism.
"""

from __future__ import annotations

import logging
import os
import tempfile
import warnings
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor.parallel import ParallelStyle

from shardproof.emulation import cpu_for_cuda, names
from shardproof.emulation.used_symbols import used_symbols
from shardproof.layout import Box as ShardBox
from shardproof.mechanisms.param_scheduler import OWN_SCHEDULES, asked
from shardproof.mechanisms.probe_module import TORCH_DTYPE
from shardproof.models import NamedParam, draws
from shardproof.observe.generators import KEEP, SEED_OF_A_BUILD
from shardproof.observe.record import Record
from shardproof.program import Op
from shardproof.protocol.features import lacks
from shardproof.protocol.system import RankContext
from shardproof.scenario import Optimizer, Scenario
from shardproof.systems.automodel.accepts import CLIPS
from shardproof.systems.automodel.models import REAL, REAL_LLAMA
from shardproof.systems.automodel.pretrained import BY_DTYPE, CONSOLIDATED, RECIPES, REPLICATED, managed, requested
from shardproof.torch_loop.loop import ProbeParallel, TorchRank, TrainState, context_of, rehearse

QUIET = (
    # Automodel's copy of torch's checkpoint writer reads a tensor's storage in a deprecated way.
    "TypedStorage is deprecated",
    # Real models draw random weights on a mesh of CPUs before they are loaded.
    "DTensor random operators may not have complete support on cpu device mesh",
    # Releases before 0.5 slice a mesh in a way that torch deprecates.
    "Slicing a flattened dim from root mesh will be deprecated",
)
"""Warnings of a sound run that are of no consequence. Any other is a difference."""


@cache
def library() -> Any:
    """Import Automodel, once a process. Transformers is made to read tensors in this thread, since a pool of threads
    does not survive a fork. The kernels are not tuned: one of Automodel 0.7.0's is to be tuned by a name that is none
    of its arguments (nemo_automodel/components/_peft/lora_kernel.py), which triton 3.9 refuses."""
    os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"
    with names.untuned():
        from shardproof.systems.automodel.rank import api

    return api


class Rank(TorchRank):
    """The `RankSystem` of `automodel`."""

    def __init__(self, context: RankContext) -> None:
        library()
        for message in QUIET:
            warnings.filterwarnings("ignore", message)
        super().__init__(context)
        self.generators: Any = None

    def make_mesh(self) -> Any:
        """Nothing: the library makes the mesh."""
        return None

    def build(self, op: Op) -> None:
        from shardproof.systems.automodel.rank.model import drive, model_class, write_pretrained

        cls = model_class(self.probe)
        if BY_DTYPE in self.scenario.options:
            library().shard_by_dtype(cls, reshard=self._reshard())
        folder = self.folder = self.context.directory / f"pretrained{op.index}"
        if self.context.rank == 0:
            write_pretrained(self.probe, op, folder)
        dist.barrier()
        if draws(self.spec.name):
            seed = self.scenario.seed % 2**31 + SEED_OF_A_BUILD * op.init_seed
            self.generators, self.probe.dropout = library().generators(seed), _dropout
        asked = requested(self.scenario)
        frozen = any(p.spec.trainable == "no" for p in self.spec.params)
        real = self.spec.name in REAL
        # the library draws initial values before it loads
        with cpu_for_cuda.emulated(), torch.random.fork_rng(devices=[], enabled=real):
            root = library().from_pretrained(
                folder, TORCH_DTYPE.get(asked, asked), self._setup(), freeze_tower=frozen,
                theirs=self.spec.name == REAL_LLAMA,
            )  # fmt: skip
        if real:
            drive(root, self.probe)
        self.params = self.held_parameters(root)
        optimizer = self.make_optimizer(op.init_seed)
        self.state = TrainState(root, optimizer, self.make_scheduler(optimizer))

    def _setup(self) -> Any:
        dtype = self.scenario.dtype
        param, reduce, output = (TORCH_DTYPE[d] if d else None for d in (dtype.param, dtype.reduce, dtype.output))
        return library().setup(
            self.context.mesh, MixedPrecisionPolicy(param, reduce, output),
            offload=self.scenario.offload.fraction > 0, reshard=self._reshard(),
            replicated=REPLICATED in self.scenario.options, plan=self._plan(),
        )  # fmt: skip

    def _plan(self) -> dict[str, ParallelStyle]:
        """Tensor parallelism of the modules that a rank has a part of, for the library to apply."""
        if self.context.mesh.tp == 1:
            return {}
        style = ProbeParallel({})
        return {module.path: style for module in self.spec.modules if any(p.tp_dim is not None for p in module.params)}

    def own_box(self, named: NamedParam) -> ShardBox:
        if managed(self.scenario, named.spec, self.context.mesh):
            return super().own_box(named)
        return ShardBox((0,) * len(named.spec.shape), named.spec.shape)

    def _reshard(self) -> bool | None:
        return {"true": True, "false": False, "none": None}[self.scenario.reshard_after_forward]

    def param_groups(self, ask: Optimizer) -> list[dict[str, Any]]:
        """Under the library's own schedule groups carry multiples of the optimizer's settings, as its recipes make
        them (`param_group_overrides`)."""
        groups = super().param_groups(ask)
        if ask.schedule not in OWN_SCHEDULES or len(groups) == 1:
            return groups
        shares = [(g.lr_scale, 1.0 if g.weight_decay is None else 0.0) for g in self.spec.groups]
        return [
            {"params": group["params"]} | ({"lr_mult": rate, "wd_mult": decay} if index else {})
            for index, (group, (rate, decay)) in enumerate(zip(groups, shares, strict=True))
        ]

    def make_scheduler(self, optimizer: torch.optim.Optimizer) -> Any:
        """The library's own schedule, made as a recipe makes it: from the first group's settings."""
        if (name := self.scenario.optimizer.schedule) not in OWN_SCHEDULES:
            return super().make_scheduler(optimizer)
        first = optimizer.param_groups[0]
        return library().OptimizerParamScheduler(optimizer, **asked(name, first["lr"], first["weight_decay"]))

    def clip(self) -> None:
        """As a recipe does: gradients of all meshes by one norm."""
        ask = self.scenario.optimizer
        if lacks(self.scenario, CLIPS):
            super().clip()
        else:
            self.norm = library().clip_grad_norm(ask.clip, [self.state.model], foreach=ask.impl == "foreach")

    def step_schedule(self) -> None:
        if self.scenario.optimizer.schedule in OWN_SCHEDULES:
            own: Any = self.state.scheduler
            own.step(1)
        else:
            super().step_schedule()

    def schedule_records(self, op: Op) -> Iterator[Record]:
        if self.scenario.optimizer.schedule in OWN_SCHEDULES:
            own: Any = self.state.scheduler
            yield self.integer(op, "scheduler", "last_epoch", own.num_steps)
        else:
            yield from super().schedule_records(op)

    def save(self, op: Op) -> None:
        path = self.context.checkpoint_path(op)
        keeper = self._keeper(path)
        if self.generators:
            library().save_generators(keeper, self.generators, path)
        keeper.save_model(self.state.model, str(path))
        keeper.save_optimizer(self.state.optimizer, self.state.model, str(path), self._schedules())

    def load(self, op: Op) -> None:
        path = self.context.checkpoint_path(op)
        keeper = self._keeper(path)
        if self.generators:
            library().load_generators(keeper, self.generators, path)
        self.load_model_only(op)
        keeper.load_optimizer(self.state.optimizer, self.state.model, str(path), self._schedules())

    def _schedules(self) -> Any:
        """What the checkpointer is given: a recipe's list of the library's own schedules, or torch's schedule."""
        own, name = self.state.scheduler, self.scenario.optimizer.schedule
        return [own] if name in OWN_SCHEDULES else own

    def load_model_only(self, op: Op) -> None:
        path = self.context.checkpoint_path(op)
        self._keeper(path).load_model(self.state.model, str(path / "model"))

    def _keeper(self, path: Path) -> Any:
        exported_as = self.folder if CONSOLIDATED in self.scenario.options else None
        return library().checkpointer(path, self.scenario.checkpoint, mesh=self.context.mesh, exported_as=exported_as)

    def observe(self, op: Op) -> Iterable[Record]:
        yield from super().observe(op)
        if op.kind == "build":
            for name, value in self._resolved().items():
                yield self.text(op, "resolved", name, value)
        yield self.text(op, "emulated", "symbols", "\n".join(used_symbols()))

    def _resolved(self) -> dict[str, str]:
        from shardproof.systems.automodel.rank.recipe import resolved

        asked = [option for option in RECIPES if option in self.scenario.options]
        return {f"{o}.{name}": value for o in asked for name, value in resolved(o, self.scenario.dtype).items()}


def _dropout(_: str, numel: int) -> None:
    """One dropout of so many elements, whose mask is drawn and not applied."""
    torch.nn.functional.dropout(torch.ones(numel), 1 - KEEP)


def warm_up() -> None:
    """Import Automodel and run a small scenario in this process, for the ranks forked from it."""
    library()
    logging.disable(logging.WARNING)
    base = Scenario(system="automodel", model="hf_delta", program="build step save build load step",
                    checkpoint="safetensors", options=("file_bf16",), reshard_after_forward="none")  # fmt: skip
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        rehearse(Rank(context_of(base, Path(folder))), base)
        dist.destroy_process_group()
    for name, kept in vars(SavePlanner).items():
        if name.startswith("_cached"):
            kept.clear()  # a plan for one rank, which some releases would use for the forked ranks
