"""A model on the meta device whose modules can fill themselves, as `init_model_with_meta_device` asks for them.

*Verifies* nothing by itself. *Does not exercise* random initial values: every module knows those that it must get.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardproof.mechanisms.probe_module import local_part


def to_meta(root: nn.Module) -> None:
    """Move parameters and buffers to the meta device; a tied parameter stays one object. Every module that has some
    of its own gets a `reset_parameters` that gives them back their values, once they have memory."""
    moved: dict[torch.Tensor, nn.Parameter] = {}
    for module in root.modules():
        parameters, buffers = dict(module.named_parameters(recurse=False)), dict(module.named_buffers(recurse=False))
        if not parameters and not buffers:
            continue
        values = {name: local_part(own.detach()).clone() for name, own in (*parameters.items(), *buffers.items())}
        for name, parameter in parameters.items():
            if parameter not in moved:
                moved[parameter] = nn.Parameter(_on_meta(parameter), requires_grad=parameter.requires_grad)
            module.register_parameter(name, moved[parameter])
        for name, buffer in buffers.items():
            setattr(module, name, _on_meta(buffer))
        module.__dict__["reset_parameters"] = partial(_reset, module, values)


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    own = torch.empty_like(local_part(tensor.detach()), device="meta")
    if not isinstance(tensor, DTensor):
        return own
    mesh, placements = tensor.device_mesh, tensor.placements
    return DTensor.from_local(own, mesh, placements, run_check=False, shape=tensor.size(), stride=tensor.stride())


def _reset(module: nn.Module, values: Mapping[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, value in values.items():
            local_part(getattr(module, name)).copy_(value)
