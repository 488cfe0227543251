"""NeMo Automodel's public API, the same for every release: setup, loader, sharding strategy, checkpointer. Rank side.

Releases differ in names only: 0.4 takes meshes and a strategy config apart, later ones a DistributedSetup; from 0.7 on
a model owns its parallelizer, before that strategies are registered under the model's class name.
"""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from nemo_automodel._transformers.auto_model import NeMoAutoModelForCausalLM
from nemo_automodel.components.checkpoint.checkpointing import Checkpointer, CheckpointingConfig
from nemo_automodel.components.distributed import config as strategies
from nemo_automodel.components.distributed import parallelizer, parallelizer_utils
from nemo_automodel.components.distributed.config import FSDP2Config
from nemo_automodel.components.optim.scheduler import OptimizerParamScheduler as OptimizerParamScheduler
from nemo_automodel.components.training.rng import StatefulRNG
from nemo_automodel.components.training.utils import clip_grad_norm as clip_grad_norm
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as fsdp_fully_shard
from torch.distributed.tensor.parallel import ParallelStyle

from shardproof.scenario import Mesh
from shardproof.systems.automodel.generators import KEY


@dataclasses.dataclass(frozen=True)
class Setup:
    """What `from_pretrained` is given of the distributed world, under the names of the release."""

    arguments: dict[str, Any]


def setup(
    mesh: Mesh,
    policy: MixedPrecisionPolicy,
    *,
    offload: bool,
    reshard: bool | None,
    replicated: bool,
    plan: dict[str, ParallelStyle],
) -> Setup:
    """Mesh and FSDP2 strategy of a world. replicated: leave frozen towers out of FSDP2. plan: of tensor parallelism,
    by module."""
    options: dict[str, Any] = {"mp_policy": policy, "tp_plan": plan or None}
    if replicated:
        options["multimodal"] = strategies.MultimodalDistributedConfig(frozen_sharding="replicate")
    if offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    fields = {f.name for f in dataclasses.fields(FSDP2Config)}
    if "backend" in fields:
        options["backend"] = "gloo"
    if reshard is not None:
        options["reshard_after_forward"] = reshard  # 0.4.0 has no such field, and says so
    strategy = FSDP2Config(**options)
    sizes = {"dp_size": mesh.dp, "dp_replicate_size": mesh.dp_replicate, "tp_size": mesh.tp}
    if not hasattr(strategies, "DistributedSetup"):
        from nemo_automodel.components.distributed.mesh_utils import create_device_mesh

        device_mesh, moe_mesh = create_device_mesh(strategy, **sizes, world_size=mesh.world)
        return Setup({"device_mesh": device_mesh, "moe_mesh": moe_mesh, "distributed_config": strategy})
    from nemo_automodel.components.distributed.mesh import ParallelismSizes

    built = strategies.DistributedSetup.build(strategy, ParallelismSizes(**sizes), world_size=mesh.world)
    return Setup({"distributed_setup": built})


def from_pretrained(
    folder: Path, requested: str | torch.dtype, world: Setup, *, freeze_tower: bool, theirs: bool
) -> nn.Module:
    """The model of a checkpoint folder, loaded and sharded by the library, in training mode. Runs on all ranks.

    Args:
        freeze_tower: freeze the vision tower. theirs: take transformers' class where Automodel has one of its own.
    """
    frozen = {"freeze_config": {"freeze_vision_tower": True}} if freeze_tower else {}
    model: nn.Module = NeMoAutoModelForCausalLM.from_pretrained(
        str(folder), torch_dtype=requested, use_liger_kernel=False, use_sdpa_patching=False,
        attn_implementation="sdpa", force_hf=theirs, **world.arguments, **frozen,
    )  # fmt: skip
    return model.train()


def shard_by_dtype(cls: type[nn.Module], *, reshard: bool | None) -> None:
    """Have the library shard a model class's layers with `fully_shard_by_dtype`, as it does for its own models with
    parameters of several dtypes; the root is left to its default. reshard: of the layers; None leaves it to torch."""
    pins = tuple(getattr(cls, "_keep_in_fp32_modules_strict", None) or ())
    takes_pins = "fp32_compute_module_names" in inspect.signature(parallelizer_utils.fully_shard_by_dtype).parameters
    more: dict[str, Any] = {"fp32_compute_module_names": pins} if takes_pins else {}
    if reshard is not None:
        more["reshard_after_forward"] = reshard

    def shard(module: nn.Module, mesh: Any, mp_policy: Any, offload_policy: Any = None, *_: Any, **__: Any) -> None:
        if isinstance(module, nn.ModuleList):
            for layer in module:
                parallelizer_utils.fully_shard_by_dtype(layer, mesh, mp_policy, offload_policy, **more)
        else:
            for child in module.children():
                shard(child, mesh, mp_policy, offload_policy)

    if hasattr(parallelizer, "ModelParallelizer"):

        class ByDtype(parallelizer.ModelParallelizer):  # type: ignore[misc]
            _apply_fsdp_sharding = staticmethod(shard)

        cls.parallelizer = ByDtype()  # type: ignore[attr-defined]
        return

    class Strategy(parallelizer.DefaultParallelizationStrategy):  # type: ignore[misc]
        def parallelize(self, model: nn.Module, device_mesh: Any, mp_policy: Any = None, offload_policy: Any = None,
                        **_: Any) -> nn.Module:  # fmt: skip
            names = ("dp_replicate", "dp_shard_cp")
            find = getattr(parallelizer, "get_fsdp_dp_mesh", None)
            mesh = find(device_mesh, *names) if find else device_mesh[names]
            shard(model, mesh, mp_policy, offload_policy)
            policies = {"mp_policy": mp_policy, "offload_policy": offload_policy}
            fsdp_fully_shard(model, mesh=mesh, reshard_after_forward=False, **policies)  # in place
            return model

    parallelizer.PARALLELIZATION_STRATEGIES[cls.__name__] = Strategy()


def checkpointer(folder: Path, form: str, *, mesh: Mesh, exported_as: Path | None) -> Checkpointer:
    """The library's checkpointer. form: `safetensors` or `torch_save`. exported_as: the checkpoint that was loaded, if
    each save is to export the model in that form too."""
    config = CheckpointingConfig(
        enabled=True, checkpoint_dir=str(folder), model_save_format=form, model_cache_dir="",
        model_repo_id=str(exported_as or ""), save_consolidated=exported_as is not None, is_peft=False,
    )  # fmt: skip
    rank = dist.get_rank()
    return Checkpointer(config, dp_rank=mesh.dp_index(rank), tp_rank=mesh.coordinate(rank)[2], pp_rank=0)


def generators(seed: int) -> StatefulRNG:
    """The generators of this rank, seeded as a recipe has them."""
    return StatefulRNG(seed, ranked=True)


def save_generators(keeper: Checkpointer, own: StatefulRNG, path: Path) -> None:
    """Save them, as the recipe of the release does."""
    save = getattr(keeper, "save_on_global_ranks", keeper.save_on_dp_ranks)
    save(own, KEY, str(path))


def load_generators(keeper: Checkpointer, own: StatefulRNG, path: Path) -> None:
    """Load what `save_generators` wrote, as the recipe of the release does."""
    load = getattr(keeper, "load_on_global_ranks", keeper.load_on_dp_ranks)
    load(own, KEY, str(path))
