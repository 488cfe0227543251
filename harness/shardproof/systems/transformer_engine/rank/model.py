"""Models made of TransformerEngine's own layers, whose parameters a forward of ours drives.

A layer is the library's class, constructed by the library. Its own forward needs kernels that a CPU has not. So the
forward of the instance is replaced by one that fetches the parameters as the layer's own would and hands them to the
probe. Every hook of FSDP2, every wrapper class, and every parameter that lost its requires_grad is still on the way.

*Verifies* nothing by itself. *Does not exercise* the layers' arithmetic.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardproof.emulation import cuda
from shardproof.mechanisms.probe_module import TORCH_DTYPE, Probe, attach
from shardproof.models import ModuleSpec, storage_dtype
from shardproof.probe import element_keys, initial_values
from shardproof.scenario import Scenario
from shardproof.systems.transformer_engine.layers import ATTENTION, LAYERS, NORMS, Layer
from shardproof.systems.transformer_engine.switches import (
    CALIBRATING,
    FP8_BOUND,
    FP8_CURRENT,
    FP8_DELAYED,
    is_quantised,
)

_UNQUANTISED = "You are using quantized weights without quantized compute"
"""What the library says of a forward that computes with dequantised weights, as ours does on purpose."""


class Root(nn.Module):
    """Calls the outermost units in order."""

    def __init__(self, paths: tuple[str, ...]) -> None:
        super().__init__()
        self.paths = paths

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for path in self.paths:
            x = self.get_submodule(path)(x)
        return x


def build(probe: Probe, mesh: DeviceMesh, *, meta: bool) -> Root:
    """The model of `probe.spec`, with the library's own initial values, on a CPU or on the meta device.

    mesh: of all ranks; its dim `tp`, if it has one, is handed to the layers.
    """
    from transformer_engine.pytorch.utils import is_non_tn_fp8_gemm_supported  # type: ignore[import-not-found]

    layers = LAYERS[probe.spec.name]
    recipe = _recipe(probe.scenario)
    dtype = TORCH_DTYPE[storage_dtype(probe.scenario.dtype, probe.spec.params[0].spec)]
    root = Root(tuple(layers))
    tp = mesh["tp"] if "tp" in (mesh.mesh_dim_names or ()) else None
    with quietly(), device(probe.scenario), recipe:
        # asked here once, for it remembers the answer, and FSDP2's hooks ask outside of this block
        is_non_tn_fp8_gemm_supported()
        for path, layer in layers.items():
            attach(root, path, _construct(layer, dtype, tp, "meta" if meta else probe.scenario.device))
    for spec in probe.spec.modules:
        below = f"{spec.path}."
        inner = [m.path.removeprefix(below) for m in probe.spec.modules if m.path.startswith(below)]
        module = root.get_submodule(spec.path)
        module.__dict__["forward"] = _through(module, inner) if inner else _driven(module, spec, probe)
    return root


def fill(root: nn.Module, probe: Probe, init_seed: int, box: Callable[[str], tuple[slice, ...]]) -> None:
    """Give every parameter this rank's part of its initial value, and whether it is trained."""
    with torch.no_grad():
        for named in probe.spec.unique_params:
            keys = element_keys(named.fqn, named.spec.shape, probe.scenario.seed)
            values = initial_values(keys, init_seed).reshape(named.spec.shape)[box(named.fqn)]
            initial = torch.from_numpy(np.ascontiguousarray(values))
            if is_quantised(probe.scenario, named.spec):
                initial = initial.clamp(-FP8_BOUND, FP8_BOUND).to(torch.float8_e4m3fn).float()
            held(root.get_parameter(named.fqn)).copy_(initial)
            parameter = root.get_parameter(named.fqn)
            parameter.requires_grad_(named.spec.trainable == "yes")


def device(scenario: Scenario) -> AbstractContextManager[None]:
    """Inside, the library finds the GPU of the scenario, or the emulated one."""
    return nullcontext() if scenario.device == "cuda" else cuda.emulated()


def held(parameter: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a parameter, of the library's own class where it is quantised."""
    return parameter._local_tensor if isinstance(parameter, DTensor) else parameter.detach()


def _recipe(scenario: Scenario) -> AbstractContextManager[None]:
    """Inside, layers create their parameters as the scenario's recipe stores them: quantised, or not."""
    import transformer_engine.pytorch as te  # type: ignore[import-not-found]
    from transformer_engine.common import recipe  # type: ignore[import-not-found]

    if FP8_CURRENT in scenario.options:
        return te.quantized_model_init(enabled=True, recipe=recipe.Float8CurrentScaling())  # type: ignore[no-any-return]
    if FP8_DELAYED in scenario.options:
        return te.quantized_model_init(enabled=True, recipe=recipe.DelayedScaling())  # type: ignore[no-any-return]
    return nullcontext()


def materialise(root: nn.Module, scenario: Scenario) -> None:
    """Give sharded parameters on the meta device memory, by the library's own means."""
    with quietly(), device(scenario):
        for module in root.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()  # type: ignore[operator]


@contextmanager
def quietly() -> Iterator[None]:
    """Inside, drawing random numbers leaves the generators as they were: a layer initialises itself, and its values
    are replaced by ours."""
    state = torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_rng_state(state)


def _construct(layer: Layer, dtype: torch.dtype, tp: DeviceMesh | None, place: str) -> nn.Module:
    import transformer_engine.pytorch as te

    options: dict[str, Any] = dict(layer.options)
    if layer.kind != ATTENTION:
        options |= {"device": place, "dtype" if layer.kind in NORMS else "params_dtype": dtype}
    if tp is not None and layer.kind not in NORMS:
        options |= {"tp_size": tp.size(), "tp_group": tp.get_group(), **layer.parallel}
    module: nn.Module = getattr(te, layer.kind)(*layer.sizes, **options)
    if layer.kind == ATTENTION:
        module = module.to(dtype)
    if tp is not None and hasattr(module, "set_device_mesh"):
        module.set_device_mesh(tp)  # type: ignore[operator]
    return module


def _through(module: nn.Module, paths: list[str]) -> Callable[[torch.Tensor], torch.Tensor]:
    """The forward of a layer that is made of others, which lie at `paths` below it."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        for path in paths:
            x = module.get_submodule(path)(x)
        return x

    return forward


def _driven(module: nn.Module, spec: ModuleSpec, probe: Probe) -> Callable[[torch.Tensor], torch.Tensor]:
    """A forward that adds ⟨p, g_p⟩ for every parameter."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        if CALIBRATING in probe.scenario.options and hasattr(module, "_get_weight_tensors"):
            with device(probe.scenario):
                module.init_fp8_metadata(num_gemms=_gemms(module))  # type: ignore[operator]
        for name, param in as_computed(module, [p.name for p in spec.params if p.used]).items():
            read = param.dequantize() if hasattr(param, "_scale_inv") else param
            x = x + probe.term(f"{spec.path}.{name}", read).to(x.dtype)
        return x

    return forward


def _gemms(module: nn.Module) -> int:
    """How many matrix products a layer's own forward makes, as the layer itself says."""
    return getattr(module, "num_gemms", 2 if hasattr(module, "fc2_weight") else 1)


def calibrating(scenario: Scenario) -> AbstractContextManager[None]:
    """The context that a scenario's forwards run in."""
    import transformer_engine.pytorch as te
    from transformer_engine.common import recipe

    if CALIBRATING not in scenario.options:
        return nullcontext()
    return te.autocast(enabled=False, calibrating=True, recipe=recipe.DelayedScaling())  # type: ignore[no-any-return]


def as_computed(module: nn.Module, names: list[str]) -> dict[str, torch.Tensor]:
    """Parameters as the layer's own forward takes them: weights of a linear layer through its accessor."""
    taken = {name: getattr(module, name) for name in names}
    weights = getattr(module, "weight_names", None) or [name for name in names if name in ("fc1_weight", "fc2_weight")]
    if weights:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", _UNQUANTISED)
            tensors = module._get_weight_tensors()  # type: ignore[operator]
        taken |= {name: tensor for name, tensor in zip(weights, tensors, strict=True) if name in taken}
    return taken
