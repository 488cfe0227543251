"""The models that Megatron-Core trains here: trees of hand-registered parameters, and a real GPTModel. Rank side.

Both kinds have the names and shapes of the zoo, cut as `local_box` says. Both run the probe's forward through the
library's own hooks, and have the `sharded_state_dict` that distributed checkpoints ask for. Importing this module
imports the library, so that ranks do it on the emulated device.

*Verifies* nothing by itself. *Does not exercise* the library's layers: their parameters are real, the forward is ours.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import (
    set_defaults_if_not_set_tensor_model_parallel_attributes,
    set_tensor_model_parallel_attributes,
)
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module, MegatronModule
from torch import nn

from shardproof.mechanisms.megatron.rank.state import fused_shape, local_box, release
from shardproof.mechanisms.megatron.switches import GPT_MODEL
from shardproof.mechanisms.megatron.zoo import GDN_IN_PROJ
from shardproof.mechanisms.probe_module import TORCH_DTYPE, Probe, ProbeModule, attach, initial_buffer
from shardproof.models import ModelSpec, ParamSpec, model_spec, storage_dtype
from shardproof.oracle.contract import half_dtype
from shardproof.probe import element_keys, initial_values, with_rare
from shardproof.scenario import Mesh, Scenario

GPT_HIDDEN, GPT_HEADS, GPT_FFN, GPT_VOCABULARY, GPT_POSITIONS = 8, 2, 16, 16, 4

ShardOffset = tuple[int, int, int]
"""`(dim, index of the shard, number of shards)`."""


def transformer_config(scenario: Scenario, mesh: Mesh) -> Any:
    """The configuration that modules, DDP and gradient finalisation read."""
    half = half_dtype(scenario.dtype)
    experts: dict[str, Any] = (
        {"num_moe_experts": count, "moe_ffn_hidden_size": GPT_FFN} if (count := _experts(scenario)) else {}
    )
    return TransformerConfig(
        num_layers=1,
        hidden_size=GPT_HIDDEN,
        num_attention_heads=GPT_HEADS * (1 if mesh.tp <= GPT_HEADS else mesh.tp),
        ffn_hidden_size=GPT_FFN,
        tensor_model_parallel_size=mesh.tp,
        sequence_parallel=mesh.tp > 1 and any(p.spec.partial for p in model_spec(scenario.model).params),
        expert_model_parallel_size=scenario.expert_parallel,
        params_dtype=torch.float32,
        bf16=half == "bf16",
        fp16=half == "fp16",
        perform_initialization="no_initialization" not in scenario.options,
        add_bias_linear=not experts,
        **experts,
        **_whole_layer_graphs(),
    )


def _experts(scenario: Scenario) -> int:
    """How many experts the model has, 0 for a dense one. Since 0.19 Megatron-FSDP makes the mesh of experts where the
    configuration has a number of them, and asks for that mesh at every parameter in whose name `experts` stands."""
    params = model_spec(scenario.model).params
    stacks = [p.spec for p in params if p.spec.ep_dim is not None or "experts" in p.fqn.split(".")]
    return max((spec.shape[spec.ep_dim or 0] for spec in stacks), default=0)


def _whole_layer_graphs() -> dict[str, Any]:
    """The argument that the training script passes in place of a default, of which the library itself warns from
    0.16 on."""
    if release() < (0, 16, 0):
        return {}
    known = {field.name for field in dataclasses.fields(TransformerConfig)}
    return {"cuda_graph_modules" if "cuda_graph_modules" in known else "cuda_graph_scope": []}


def build(probe: Probe, init_seed: int) -> nn.Module:
    """The model with initial values, on the device, in the dtypes of the scenario.

    Where something is stored in half precision a Float16Module goes around it, which rounds everything; the parameters
    that stay in fp32, and the inputs of their modules, are put back to fp32 afterwards.
    """
    scenario = probe.scenario
    config = transformer_config(scenario, probe.mesh)
    root = _gpt(config, probe) if probe.spec.name == GPT_MODEL else _tree(config, probe, init_seed)
    _initialise(root, probe, init_seed)
    for parameter in root.parameters():
        set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
    if half_dtype(scenario.dtype) is None:
        return root
    wrapped: nn.Module = Float16Module(config, root)
    _promote(root, probe, init_seed)
    return wrapped


class _ProbeRoot(MegatronModule):  # type: ignore[misc]  # the library is untyped
    """The root of a hand-registered model: calls its modules in the spec's order."""

    def __init__(self, config: Any, probe: Probe) -> None:
        super().__init__(config)
        self.spec, self.mesh = probe.spec, probe.mesh
        self.rank, self.expert_parallel = probe.rank, probe.scenario.expert_parallel
        self.paths = _called(probe.spec)
        self.register_load_state_dict_pre_hook(self._tie)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for path in self.paths:
            x = self.get_submodule(path)(x)
        return x

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[ShardOffset, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Every parameter and persistent buffer under its fully qualified name; a tied parameter under its own name
        only."""
        shards = {}
        params = {named.fqn: named.spec for named in self.spec.params}
        for fqn, tensor in self.state_dict(keep_vars=True).items():
            spec = params.get(fqn)
            if spec is not None and spec.tied_to is not None:
                continue
            offsets, replica = _placement(spec, self.mesh, self.rank, self.expert_parallel)
            key = f"{prefix}{fqn}"
            shards[key] = ShardedTensor.from_rank_offsets(
                key, tensor, *sharded_offsets, *offsets, replica_id=(0, *replica), prepend_axis_num=len(sharded_offsets)
            )
        return shards

    def _tie(self, _module: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
        """Give a tied alias, before a load, the value of the parameter that it is, as a GPTModel does for its output
        layer."""
        for named in self.spec.params:
            if named.spec.tied_to is not None and f"{prefix}{named.spec.tied_to}" in state:
                state.setdefault(f"{prefix}{named.fqn}", state[f"{prefix}{named.spec.tied_to}"])


def _placement(
    spec: ParamSpec | None, mesh: Mesh, rank: int, expert_parallel: int
) -> tuple[list[ShardOffset], tuple[int, int]]:
    """How a tensor is cut over ranks, and which of the equal copies over (tp, dp) this rank has. A buffer is never
    cut."""
    tp_index, dp_index = mesh.coordinate(rank)[2], mesh.dp_index(rank)
    if spec is not None and spec.ep_dim is not None and expert_parallel > 1:
        return [(spec.ep_dim, dp_index % expert_parallel, expert_parallel)], (0, dp_index // expert_parallel)
    if spec is not None and spec.tp_dim is not None and mesh.tp > 1:
        return [(spec.tp_dim, tp_index, mesh.tp)], (0, dp_index)
    return [], (tp_index, dp_index)


def _called(spec: ModelSpec) -> tuple[str, ...]:
    """The paths of the modules that the forward pass calls: modules with a buffer or with at least one used
    parameter."""
    return tuple(m.path for m in spec.modules if m.buffers or any(p.used for p in m.params))


def _tree(config: Any, probe: Probe, init_seed: int) -> nn.Module:
    """A tree of probe modules whose parameters are on the device, cut as the mesh says, without values yet."""
    root = _ProbeRoot(config, probe)
    for module_spec in probe.spec.modules:
        attach(root, module_spec.path, ProbeModule(module_spec, probe))
    for named in probe.spec.unique_params:
        spec = named.spec
        box = local_box(spec, probe.mesh, probe.rank, probe.scenario.expert_parallel)
        shape = fused_shape(spec, box.size)
        parameter = nn.Parameter(torch.empty(shape, device="cuda"), requires_grad=spec.trainable == "yes")
        if spec.tp_dim is not None and probe.mesh.tp > 1:
            set_tensor_model_parallel_attributes(parameter, True, spec.tp_dim - spec.stacked, 1)
        if spec.partial and probe.mesh.tp > 1:
            parameter.sequence_parallel = True  # type: ignore[attr-defined]  # as a norm's parameters have it
        if spec.ep_dim is not None and probe.scenario.expert_parallel > 1:
            parameter.allreduce = False  # type: ignore[attr-defined]  # how the library knows expert parameters
        root.get_submodule(named.module.path).register_parameter(spec.name, parameter)
    for named in probe.spec.params:
        if named.spec.tied_to is not None:
            shared = root.get_parameter(named.spec.tied_to)
            root.get_submodule(named.module.path).register_parameter(named.spec.name, shared)
    for fqn, buffer_spec in probe.spec.buffers():
        path, _, name = fqn.rpartition(".")
        value = initial_buffer(fqn, buffer_spec, probe.scenario.seed, init_seed).cuda()
        root.get_submodule(path).register_buffer(name, value, persistent=buffer_spec.persistent)
    _mark_delta_nets(root, probe)
    return root


def _mark_delta_nets(root: nn.Module, probe: Probe) -> None:
    """Give modules that hold a gated delta net's fused projection the attributes of GatedDeltaNet, by which the
    library finds them."""
    for named in probe.spec.params:
        if named.spec.sections == GDN_IN_PROJ:
            sizes, module = dict(GDN_IN_PROJ), root.get_submodule(named.module.path.rpartition(".")[0])
            module.qk_dim, module.v_dim, module.num_value_heads = sizes[".query"], sizes[".value"], sizes[".beta"]  # type: ignore[assignment]
            module.in_proj_dim, module.tp_size = sum(sizes.values()), probe.mesh.tp  # type: ignore[assignment]


class _ProbeGpt(GPTModel):  # type: ignore[misc]
    """A GPTModel whose forward calls in sequence every module that owns parameters, so that the gradient of each
    parameter is known beforehand."""

    paths: tuple[str, ...] = ()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for path in self.paths:
            x = self.get_submodule(path)(x)
        return x


def _gpt(config: Any, probe: Probe) -> nn.Module:
    """A GPTModel with tied embeddings. Its modules keep their parameters and hooks and get the probe's forward."""
    with torch.random.fork_rng(devices=[]):  # layers draw initial values, which are replaced below
        model_parallel_cuda_manual_seed(probe.scenario.seed)
        root: nn.Module = _ProbeGpt(
            config,
            get_gpt_layer_local_spec(),
            vocab_size=GPT_VOCABULARY,
            max_sequence_length=GPT_POSITIONS,
            share_embeddings_and_output_weights=True,
        )
    root.cuda()
    root.paths = _called(probe.spec)  # type: ignore[assignment]
    for module_spec in probe.spec.modules:
        module = root.get_submodule(module_spec.path)
        stand_in = ProbeModule(module_spec, probe)
        for spec in module_spec.params:
            stand_in.register_parameter(spec.name, module.get_parameter(spec.name))
        module.forward = stand_in.forward
    names = [name for name, _ in root.named_parameters()]
    assert sorted(names) == sorted(p.fqn for p in probe.spec.params), f"the zoo's gpt is another model: {names}"
    return root


def _initialise(root: nn.Module, probe: Probe, init_seed: int) -> None:
    for named in probe.spec.unique_params:
        parameter = root.get_parameter(named.fqn)
        value = _initial_value(probe, named.fqn, init_seed)
        assert parameter.shape == value.shape, f"{named.fqn} has shape {tuple(parameter.shape)}, not {value.shape}"
        parameter.data.copy_(value)


def _initial_value(probe: Probe, fqn: str, init_seed: int) -> torch.Tensor:
    """This rank's piece of a parameter's initial value, in fp32, on the host."""
    spec = probe.spec.param(fqn).spec
    drawn = initial_values(element_keys(fqn, spec.shape, probe.scenario.seed), init_seed)
    whole = (with_rare(drawn, init_seed) if spec.rare else drawn).reshape(spec.shape)
    start, size = local_box(spec, probe.mesh, probe.rank, probe.scenario.expert_parallel)
    piece = torch.tensor(whole[tuple(slice(s, s + n) for s, n in zip(start, size, strict=True))])
    return piece.reshape(fused_shape(spec, size))


def _promote(root: nn.Module, probe: Probe, init_seed: int) -> None:
    """Give the islands their fp32 values back, which Float16Module rounded, and their modules inputs in fp32."""
    for named in probe.spec.unique_params:
        if storage_dtype(probe.scenario.dtype, named.spec) != "fp32":
            continue
        root.get_parameter(named.fqn).data = _initial_value(probe, named.fqn, init_seed).cuda()
        root.get_submodule(named.module.path).register_forward_pre_hook(_input_in(TORCH_DTYPE["fp32"]))


def _input_in(dtype: torch.dtype) -> Callable[[nn.Module, tuple[torch.Tensor, ...]], tuple[torch.Tensor, ...]]:
    def hook(_module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return tuple(tensor.to(dtype) for tensor in inputs)

    return hook
