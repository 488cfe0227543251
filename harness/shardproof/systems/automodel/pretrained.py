"""What the dtype contract says of a scenario whose builds load a pretrained checkpoint.

The scenario's storage dtype is what is requested of the loader, `mixed` being `auto`; the file's dtypes and the model's
pins are options.
"""

from __future__ import annotations

from shardproof.models import ModuleSpec, ParamSpec
from shardproof.scenario import DTypePolicy, Mesh, Scenario
from shardproof.systems.automodel import dtype_contract
from shardproof.systems.automodel.dtype_contract import (
    AUTO,
    RECIPE_PIPELINE,
    RECIPE_POLICY,
    RECIPE_STORAGE,
    Dtypes,
    Policy,
    Tensor,
)

FILE_BF16, FILE_FP32, FILE_FP16 = "file_bf16", "file_fp32", "file_fp16"
PINNED, PINNED_SOFT = "pinned", "pinned_soft"
BY_DTYPE = "by_dtype"
CONSOLIDATED = "consolidated"
REPLICATED = "replicated_tower"
NATIVE: dict[str, tuple[tuple[str, str], ...]] = {
    "qwen3_5": (("._fp32_params.", "."),),
    "nemotron_h": (
        ("model.norm.", "backbone.norm_f."),
        ("model.embed_tokens.", "backbone.embeddings."),
        ("model.", "backbone."),
        ("._fp32_params.", "."),
    ),
}
"""Models that Automodel has a class of its own for, which pins its islands and shards its layers by dtype; and what in
its names a checkpoint file has in another way."""

CONFIG_DTYPE = "bf16"
"""What a checkpoint's config says."""
RECIPES = (RECIPE_PIPELINE, RECIPE_POLICY, RECIPE_STORAGE)


def file_dtype(scenario: Scenario, spec: ParamSpec) -> str:
    """The dtype of a parameter in the checkpoint file: one for all, or bf16 with islands in fp32."""
    return scenario.fact("options", _file_of_one) or ("fp32" if spec.island else "bf16")


def _file_of_one(options: tuple[str, ...]) -> str:
    """The dtype that every parameter has in a file of one dtype; empty for a file of several."""
    dtypes = ((FILE_BF16, "bf16"), (FILE_FP32, "fp32"), (FILE_FP16, "fp16"))
    return next((dtype for option, dtype in dtypes if option in options), "")


def native(scenario: Scenario) -> bool:
    """Whether the model is a class of Automodel's own."""
    return scenario.fact("model", NATIVE.__contains__)


def file_name(model: str, fqn: str) -> str:
    """The name of a parameter in a checkpoint file; Automodel's own classes have others, and a holder of islands."""
    for ours, theirs in NATIVE.get(model, ()):
        fqn = fqn.replace(ours, theirs, 1)
    return fqn


def exported(scenario: Scenario, spec: ParamSpec) -> str:
    """The dtype that a parameter is exported in: that of the file it was loaded from, and fp32 where Automodel's own
    class keeps it (components/checkpoint/checkpointing.py, _maybe_build_original_dtype_mapping)."""
    return "fp32" if spec.island and native(scenario) else file_dtype(scenario, spec)


def requested(scenario: Scenario) -> str:
    """What the loader is asked for: one dtype, or what mirrors the file."""
    storage = scenario.fact("dtype", _storage)
    return AUTO if storage.startswith("mixed") else storage


def _storage(policy: DTypePolicy) -> str:
    return policy.storage


def trained_storage(scenario: Scenario, spec: ParamSpec) -> str:
    """The storage dtype of a parameter that is trained, in a model that is no class of Automodel's own: it depends on
    what the file holds and on what is asked for, and on nothing else."""
    return dtype_contract.dtypes(
        Tensor(file_dtype(scenario, spec)), requested(scenario), Policy(), by_dtype=False
    ).storage


def managed(scenario: Scenario, spec: ParamSpec, mesh: Mesh) -> bool:
    """Whether FSDP2 manages a parameter. Automodel does not shard in a world of one rank, and may leave a frozen
    tower out, which then lies whole on every rank."""
    return mesh.world > 1 and not (REPLICATED in scenario.options and spec.trainable == "no")


def parameter(scenario: Scenario, spec: ParamSpec, mesh: Mesh) -> Dtypes:
    """The dtypes that the contract gives a parameter."""
    tensor = Tensor(
        file_dtype(scenario, spec),
        pinned=spec.island and (PINNED in scenario.options or native(scenario)),
        kept=spec.island and PINNED_SOFT in scenario.options,
        frozen=spec.trainable == "no",
        sharded=managed(scenario, spec, mesh),
        native=native(scenario),
    )
    return _contract(scenario, tensor, by_dtype=spec.layer and (BY_DTYPE in scenario.options or native(scenario)))


def buffer(scenario: Scenario, dtype: str, module: ModuleSpec, mesh: Mesh) -> str:
    """The dtype that the contract gives a floating-point buffer, which its module makes, and a checkpoint holds, in
    `dtype`."""
    frozen = bool(module.params) and all(p.trainable == "no" for p in module.params)
    tensor = Tensor(dtype, frozen=frozen, buffer=True, sharded=mesh.world > 1)
    return _contract(scenario, tensor, by_dtype=False).storage


def recipe(scenario: Scenario) -> dict[str, str]:
    """What the recipe's texts of a scenario must come to, by name; nothing without an option that asks."""
    policy = Policy(scenario.dtype.param, scenario.dtype.reduce)
    return {
        f"{option}.{name}": value
        for option in RECIPES
        if option in scenario.options
        for name, value in dtype_contract.recipe(option, policy, scenario.dtype.output).items()
    }


def _contract(scenario: Scenario, tensor: Tensor, *, by_dtype: bool) -> Dtypes:
    policy = Policy(scenario.dtype.param, scenario.dtype.reduce)
    asked = requested(scenario)
    if asked == AUTO and tensor.native:
        asked = CONFIG_DTYPE
    return dtype_contract.dtypes(tensor, asked, policy, by_dtype=by_dtype)
