"""A Hugging Face model class of a ModelSpec: its real loader builds it, our probe drives it. Rank side.

The modules are those of `shardproof.mechanisms.probe_module`, under containers whose forward runs their children in
order, so that every FSDP unit that the library makes of them is entered through its own hooks. Registered with
transformers' AutoConfig and AutoModelForCausalLM, as code of a user's own is.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    NemotronHConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3_5TextConfig,
)

from shardproof.mechanisms.probe_module import TORCH_DTYPE, Probe, ProbeModule, initial_buffer
from shardproof.probe import element_keys, initial_values
from shardproof.program import Op
from shardproof.systems.automodel import models
from shardproof.systems.automodel.pretrained import PINNED, PINNED_SOFT, file_dtype, file_name

MODEL_TYPE = "shardproof_probe"
ARCHITECTURE = "ShardproofProbeForCausalLM"


class ProbeConfig(PretrainedConfig):  # type: ignore[misc]
    """The model's configuration. init_seed: number of the build, from which buffers that no checkpoint holds get
    their values."""

    model_type = MODEL_TYPE

    def __init__(self, init_seed: int = 0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.init_seed = init_seed


class _Branch(nn.Module):
    """A container. forward: (1,) → (1,), through the children in order; those of a module list one by one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return through(self.children(), x)


def through(children: Any, x: torch.Tensor) -> torch.Tensor:
    """Call modules in sequence on a tensor; the members of a ModuleList or ModuleDict are called in order."""
    for child in children:
        held = child.values() if isinstance(child, nn.ModuleDict) else child
        for module in held if isinstance(child, nn.ModuleList | nn.ModuleDict) else (child,):
            x = module(x)
    return x


def model_class(probe: Probe) -> type[PreTrainedModel]:
    """The class that builds the probe's model, registered for `MODEL_TYPE`; its pins are the scenario's."""
    spec, options = probe.spec, probe.scenario.options
    pins = sorted({p.spec.name for p in spec.params if p.spec.island})

    class ShardproofProbeForCausalLM(PreTrainedModel):  # type: ignore[misc]
        config_class = ProbeConfig
        _supports_sdpa = True
        _keep_in_fp32_modules = pins if PINNED_SOFT in options else None
        _keep_in_fp32_modules_strict = pins if PINNED in options else None

        def __init__(self, config: ProbeConfig) -> None:
            super().__init__(config)
            for module in spec.modules:
                _attach(self, module.path.split("."), _leaf(module, probe, config.init_seed))
            self.post_init()

        def _init_weights(self, module: nn.Module) -> None:
            """Give values to what no checkpoint holds: buffers that are made anew. Everything else is about to be
            loaded."""
            if isinstance(module, ProbeModule):
                for buffer in module.spec.buffers:
                    if not buffer.persistent:
                        value = _buffer(module, buffer.name, probe, self.config.init_seed)
                        with torch.no_grad():
                            getattr(module, buffer.name).copy_(value)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return through(self.children(), x)

    AutoConfig.register(MODEL_TYPE, ProbeConfig, exist_ok=True)
    AutoModelForCausalLM.register(ProbeConfig, ShardproofProbeForCausalLM, exist_ok=True)
    return ShardproofProbeForCausalLM


def write_pretrained(probe: Probe, op: Op, folder: Path) -> None:
    """A checkpoint as the hub has it: config.json and model.safetensors, every tensor in the dtype of the file."""
    scenario, tensors = probe.scenario, {}
    for named in probe.spec.unique_params:
        values = torch.tensor(initial_values(element_keys(named.fqn, named.spec.shape, scenario.seed), op.init_seed))
        name = file_name(probe.spec.name, named.fqn)
        tensors[name] = values.reshape(named.spec.shape).to(TORCH_DTYPE[file_dtype(scenario, named.spec)])
    for fqn, buffer in probe.spec.buffers():
        if buffer.persistent:
            tensors[fqn] = initial_buffer(fqn, buffer, scenario.seed, op.init_seed)
    folder.mkdir(parents=True)
    _config(probe.spec.name, op.init_seed).save_pretrained(folder)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def _config(model: str, init_seed: int) -> PretrainedConfig:
    if model not in models.REAL:
        return ProbeConfig(init_seed, architectures=[ARCHITECTURE], dtype="bfloat16")
    width = models.HIDDEN // models.HEADS
    sizes = {
        "vocab_size": models.VOCABULARY, "hidden_size": models.HIDDEN, "intermediate_size": models.FEED_FORWARD,
        "num_attention_heads": models.HEADS, "num_key_value_heads": models.HEADS, "head_dim": width,
        "tie_word_embeddings": False, "dtype": "bfloat16",
    }  # fmt: skip
    if model == models.REAL_LLAMA:
        return LlamaConfig(architectures=["LlamaForCausalLM"], num_hidden_layers=models.LAYERS, **sizes)
    if model == models.REAL_NEMOTRON:
        return NemotronHConfig(
            architectures=["NemotronHForCausalLM"], layers_block_type=["mamba", "attention"], expand=1, n_groups=1,
            mamba_num_heads=models.HEADS, mamba_head_dim=width, ssm_state_size=models.STATE,
            conv_kernel=models.KERNEL, **sizes,
        )  # fmt: skip
    return Qwen3_5TextConfig(
        architectures=["Qwen3_5ForCausalLM"], num_hidden_layers=models.LAYERS, linear_conv_kernel_dim=models.KERNEL,
        linear_key_head_dim=width, linear_value_head_dim=width, linear_num_key_heads=models.HEADS,
        linear_num_value_heads=models.HEADS, layer_types=["linear_attention", "full_attention"], **sizes,
    )  # fmt: skip


def drive(root: nn.Module, probe: Probe) -> None:
    """Replace the forward of every module of a real model by the probe's: (1,) → (1,), its own parameters' terms, then
    its children. Called after the library has wrapped them, so that its hooks stay around each forward."""
    for path, module in root.named_modules():
        if not isinstance(module, nn.ModuleList | nn.ModuleDict):
            module.forward = partial(_driven, module, path, probe)


def _driven(module: nn.Module, path: str, probe: Probe, x: torch.Tensor) -> torch.Tensor:
    for name, param in module.named_parameters(recurse=False):
        x = x + probe.term(f"{path}.{name}", param).to(x.dtype)
    return through(module.children(), x)


def _leaf(spec: Any, probe: Probe, init_seed: int) -> ProbeModule:
    module = ProbeModule(spec, probe)
    for param in spec.params:
        module.register_parameter(param.name, nn.Parameter(torch.empty(param.shape)))
    for buffer in spec.buffers:
        module.register_buffer(buffer.name, _buffer(module, buffer.name, probe, init_seed), buffer.persistent)
    return module


def _buffer(module: ProbeModule, name: str, probe: Probe, init_seed: int) -> torch.Tensor:
    spec = next(b for b in module.spec.buffers if b.name == name)
    return initial_buffer(f"{module.spec.path}.{name}", spec, probe.scenario.seed, init_seed)


def _attach(root: nn.Module, path: Sequence[str], leaf: nn.Module) -> None:
    """Put a module where its path says; names that are numbers lie in a module list."""
    node: nn.Module = root
    for index, name in enumerate(path):
        last = index == len(path) - 1
        if not hasattr(node, name):
            child = leaf if last else nn.ModuleList() if path[index + 1].isdigit() else _Branch()
            node.append(child) if isinstance(node, nn.ModuleList) else node.add_module(name, child)
        node = getattr(node, name)
