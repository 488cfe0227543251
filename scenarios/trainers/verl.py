"""verl's checkpoints of FSDP workers: `FSDPCheckpointManager`, around a tiny language model of Transformers.

The manager writes a file for every rank and kind of state (model, optimizer, and as `extra` the schedule and the random
state), and next to them the configuration of the model; with `hf_model` it gathers the whole model too. It reads the
files of as many ranks as have written, so that no arm loads on another number of ranks. There is no asynchronous save.

What is emulated: the packages `verl`, `verl.utils`, `verl.utils.checkpoint` and `verl.trainer` are entered without
their own `__init__`, which imports Ray and libraries of data sets that have nothing to do with a checkpoint. The
modules below them are verl's own, unchanged. The model is sharded here, with the settings of verl's engine, since the
engine puts it on a GPU first. Because verl as a whole cannot be imported, the first package that is required, whose
release `--version` sets, is Transformers.

To save or load without `extra` is no axis: what that leaves out of a resumed run it leaves out by design.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from shardproof.trainer import Cell, Trainer, Unsupported
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from transformers import LlamaConfig, LlamaForCausalLM

ROOT = Path(next(iter(find_spec("verl").submodule_search_locations)))  # type: ignore[union-attr, arg-type]
for package in ("verl", "verl.utils", "verl.utils.checkpoint", "verl.trainer"):
    bare = ModuleType(package)
    bare.__path__ = [str(ROOT.joinpath(*package.split(".")[1:]))]
    sys.modules.setdefault(package, bare)

from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager  # noqa: E402
from verl.utils.torch_functional import (  # noqa: E402
    get_constant_schedule_with_warmup,
    get_cosine_schedule_with_warmup,
)

SAVED = ["model", "optimizer", "extra"]
"""What the manager saves and loads where nothing else is asked for."""


class Verl(Trainer):
    """A worker's model under FSDP1 or FSDP2, saved and loaded by `FSDPCheckpointManager`."""

    axes = {
        "sharding": ["fsdp2", "fsdp1-flat", "fsdp1-orig"],
        "optimizer": ["adamw", "sgd"],
        "saves": ["default", "hf_model"],
        "precision": ["fp32", "bf16"],
        "schedule": ["constant", "cosine"],
    }
    requires = (
        "transformers==5.10.4",
        "verl==0.9.1",
        "accelerate==1.15.0",
        "huggingface_hub==1.33.0",
        "tokenizers==0.22.2",
        "safetensors==0.8.0",
        "regex==2026.11.19",
        "pyyaml==6.0.4",
        "tqdm==4.70.1",
        "httpx==0.28.1",
        "httpcore==1.0.9",
        "anyio==4.16.0",
        "h11==0.16.0",
        "idna==3.20",
        "certifi==2026.10.18",
        "tensordict==0.10.0",
        "pyvers==0.2.3",
        "cloudpickle==3.1.3",
        "orjson==3.13.0",
        "peft==0.21.2",
        "omegaconf==2.3.0",
        "antlr4-python3-runtime==4.9.3",
    )
    steps = (3, 2)
    transient = ("buffer *inv_freq",)
    """What rotary embeddings compute from the configuration; Transformers registers them as not persistent."""

    def build(self, cell: Cell) -> None:
        """What verl's engine makes before its manager: the sharded model, an optimizer, a schedule with a warm-up."""
        if cell.world == 1:
            raise Unsupported("the files are named for the number of ranks that wrote them, and no other reads them")
        if cell.saves == "hf_model" and cell.sharding != "fsdp2" and cell.device == "cpu":
            raise Unsupported("FSDP1's full state dict is moved to the CPU, which frees parameters that live there")
        self.cell = cell
        torch.manual_seed(cell.seed)
        config = LlamaConfig(
            vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
            attention_dropout=0.1, tie_word_embeddings=False, architectures=["LlamaForCausalLM"],
        )  # fmt: skip
        self.model = self.sharded(LlamaForCausalLM(config), cell)
        if cell.optimizer == "adamw":
            self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        else:
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        if cell.schedule == "constant":
            self.scheduler = get_constant_schedule_with_warmup(self.optimizer, num_warmup_steps=4)
        else:
            self.scheduler = get_cosine_schedule_with_warmup(self.optimizer, num_warmup_steps=2, num_training_steps=20)
        self.manager = FSDPCheckpointManager(
            model=self.model,
            optimizer=self.optimizer,
            lr_scheduler=self.scheduler,
            checkpoint_config={
                "load_contents": SAVED,
                "save_contents": SAVED if cell.saves == "default" else [*SAVED, cell.saves],
            },
        )

    def sharded(self, model: torch.nn.Module, cell: Cell) -> torch.nn.Module:
        """The model as verl's engine shards it: each layer, then the rest."""
        model.train()
        mesh = init_device_mesh(cell.device, (cell.world,), mesh_dim_names=("fsdp",))
        low = torch.bfloat16 if cell.precision == "bf16" else torch.float32
        layers = model.get_submodule("model.layers")
        if cell.sharding == "fsdp2":
            policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32, cast_forward_inputs=True)
            for layer in [*layers.children(), model]:
                fully_shard(layer, mesh=mesh, mp_policy=policy)
            return model
        return FullyShardedDataParallel(
            model,
            auto_wrap_policy=ModuleWrapPolicy({type(layer) for layer in layers.children()}),
            mixed_precision=MixedPrecision(param_dtype=low, reduce_dtype=torch.float32, buffer_dtype=torch.float32),
            use_orig_params=cell.sharding == "fsdp1-orig",
            device_mesh=mesh,
            device_id=torch.device(cell.device),
        )

    def step(self, index: int) -> None:
        generator = torch.Generator().manual_seed(100 * index + self.cell.rank)
        tokens = torch.randint(32, (2, 8), generator=generator).to(self.cell.device)
        self.optimizer.zero_grad()
        self.model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        self.optimizer.step()
        self.scheduler.step()

    def save(self, folder: Path) -> None:
        self.manager.save_checkpoint(local_path=str(folder), global_step=self.scheduler.last_epoch)

    def load(self, folder: Path) -> None:
        self.manager.load_checkpoint(local_path=str(folder))

    def state(self) -> dict[str, Any]:
        """What a checkpoint is for; the manager only drives it."""
        return {name: getattr(self, name) for name in ("model", "optimizer", "scheduler")}
