"""Emulated `apex` and `amp_C`, and the optimizers of TransformerEngine, for libraries that import them by name.

`install()` puts modules of ours into `sys.modules`, so that a library takes the path that its users run. Only what
Megatron-Core imports exists. TransformerEngine itself stays absent: `import transformer_engine` fails, and no layer,
fp8 or CUDA-graph path is switched on; only `transformer_engine.pytorch.optimizers` can be imported, on request.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from typing import Any

import torch

from shardproof.emulation import kernels
from shardproof.emulation.fused import FusedAdam, FusedSGD
from shardproof.emulation.used_symbols import touch

__all__ = ["FusedAdam", "FusedSGD", "install", "te_version_known"]

CHUNK_SIZE = 2048 * 32


def multi_tensor_applier(op: Any, noop_flag: torch.Tensor, tensor_lists: list[list[torch.Tensor]], *args: Any) -> Any:
    """Call a kernel on lists of tensors."""
    local = [[getattr(tensor, "_local_tensor", tensor) for tensor in tensors] for tensors in tensor_lists]
    return op(CHUNK_SIZE, noop_flag, local, *args)


@torch.no_grad()
def multi_tensor_scale(chunk: int, noop_flag: torch.Tensor, lists: list[list[torch.Tensor]], scale: float) -> None:
    """Multiply the first list's tensors into the second's: lists are [sources, targets]. The flag is set to 1 where
    a source is not finite."""
    touch("amp_C.multi_tensor_scale")
    sources, targets = lists
    for source, target in zip(sources, targets, strict=True):
        if kernels.scale(source, target, scale):
            noop_flag.fill_(1)


@torch.no_grad()
def multi_tensor_l2norm(
    chunk: int, noop_flag: torch.Tensor, lists: list[list[torch.Tensor]], per_tensor: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm of everything, shape (1,), and the norms by tensor, shape (n,); the latter empty unless asked for."""
    touch("amp_C.multi_tensor_l2norm")
    (tensors,) = lists
    norms = [kernels.l2norm([tensor]) for tensor in tensors] if per_tensor else []
    return kernels.l2norm(tensors), torch.cat(norms) if norms else torch.empty(0)


class FusedLayerNormAffineFunction:
    """Stands for apex's autograd function; the arithmetic is torch's layer norm, whose backward differs in bits."""

    @staticmethod
    def forward(
        ctx: Any, values: Any, weight: Any, bias: Any, normalized_shape: Any, eps: float, memory_efficient: bool = False
    ) -> torch.Tensor:
        """Layer norm over the last dims. normalized_shape: a shape."""
        touch("apex.normalization.FusedLayerNormAffineFunction")
        return torch.nn.functional.layer_norm(values, torch.Size(normalized_shape), weight, bias, eps)

    @classmethod
    def apply(cls, *args: Any) -> torch.Tensor:
        """Call it as libraries call an autograd function; torch's own layer norm makes the graph."""
        return cls.forward(None, *args)


def _module(name: str, **contents: Any) -> types.ModuleType:
    module = types.ModuleType(name, f"Emulated by shardproof: {__name__}.")
    module.__spec__ = ModuleSpec(name, None, is_package="__path__" in contents)  # importlib.util.find_spec wants one
    module.__dict__.update(contents)
    return module


def install(*, te_optimizers: bool = False) -> None:
    """Make `apex` and `amp_C` importable; with te_optimizers also `transformer_engine.pytorch.optimizers`.

    Raises RuntimeError where the real packages are loaded already: a process is emulated or it is not.
    """
    optimizers = {"FusedAdam": FusedAdam, "FusedSGD": FusedSGD}
    kernels_ = {"multi_tensor_l2norm": multi_tensor_l2norm, "multi_tensor_scale": multi_tensor_scale}
    applier = {"multi_tensor_applier": multi_tensor_applier}
    norm = {"FusedLayerNormAffineFunction": FusedLayerNormAffineFunction}
    modules = [
        _module("apex", __path__=[], __version__="0.0+shardproof"),
        _module("amp_C", **kernels_),
        _module("apex.optimizers", **optimizers),
        _module("apex.multi_tensor_apply", **applier),
        _module("apex.normalization", __path__=[]),
        _module("apex.normalization.fused_layer_norm", **norm),
    ]
    if te_optimizers:
        modules.append(_module("transformer_engine.pytorch.optimizers", **optimizers, **kernels_, **applier))
    for module in modules:
        loaded = sys.modules.get(module.__name__)
        if loaded is not None and not (loaded.__doc__ or "").startswith("Emulated by shardproof"):
            raise RuntimeError(f"the real {module.__name__} is loaded already; emulate it in a process without it")
    for module in modules:
        sys.modules[module.__name__] = module
        parent, _, child = module.__name__.rpartition(".")
        if parent in sys.modules:
            setattr(sys.modules[parent], child, module)


@contextmanager
def te_version_known(version: str) -> Iterator[None]:
    """Inside, `transformer_engine.__version__` answers, for a library that reads it once and remembers it.

    Megatron-Core's `megatron.core.utils.get_te_version()` does; its precision-aware optimizer compares that version.
    Keep every other import of the library outside: `import transformer_engine` would succeed in it.
    """
    name = "transformer_engine"
    if name in sys.modules:
        raise RuntimeError("the real transformer_engine is loaded already; emulate it in a process without it")
    touch("transformer_engine.__version__")
    sys.modules[name] = _module(name, __version__=version)
    try:
        yield
    finally:
        del sys.modules[name]
