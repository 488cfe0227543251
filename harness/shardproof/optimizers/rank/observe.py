"""Records the parameters and state of an arbitrary optimizer, without knowing the optimizer's class.

Four roles of its own, beside `param`:

    state     a tensor of its parameter's shape, logical: the ranks' pieces are joined. `up.weight|exp_avg`
    own       any other tensor or number in the state of a parameter; each rank's own. `up.weight|step`
    setting   a number, text or switch in a param group; each rank's own. `group0.betas.1`
    opaque    something that is neither: a closure, an object of the library's. It is named, and not looked into.

Where a DTensor of another shape lies is asked of the library (`full_tensor`), since no arithmetic of ours can know it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardproof.mechanisms.probe_module import DTYPE_NAME, Box, tensor_bytes
from shardproof.observe.record import LIVE, Record, whole

Place = tuple[int, int]
"""Index of an operation, and a rank."""


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """`(path, value)` of everything in nested dictionaries and lists that is neither. A key that is no text or number,
    such as a parameter, is told by its place among the others."""
    if isinstance(value, Mapping):
        for place, (key, inner) in enumerate(value.items()):
            name = str(key) if isinstance(key, str | int) else f"#{place}"
            yield from leaves(inner, f"{path}.{name}" if path else name)
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from leaves(inner, f"{path}.{index}" if path else str(index))
    else:
        yield path, value


def settings(at: Place, groups: Sequence[Mapping[str, Any]], first: int = 0) -> Iterator[Record]:
    """Records of param groups. first: number of the first of them."""
    for index, group in enumerate(groups, first):
        for path, value in leaves({name: own for name, own in group.items() if name != "params"}):
            yield from plain(at, "setting", f"group{index}.{path}", value)


def plain(at: Place, role: str, name: str, value: Any) -> Iterator[Record]:
    """The record of a value that belongs to a rank."""
    op, rank = at
    if value is None:
        return
    if isinstance(value, torch.Tensor):
        kept = dense(value.full_tensor() if isinstance(value, DTensor) else value)
        yield whole(op, rank, role, name, DTYPE_NAME[kept.dtype], tuple(kept.shape), tensor_bytes(kept))
    elif isinstance(value, bool | int | float):
        kept = torch.tensor(float(value), dtype=torch.float64)
        yield whole(op, rank, role, name, "fp64", (), tensor_bytes(kept))
    elif isinstance(value, str | torch.dtype | torch.device):
        data = str(value).encode()
        yield whole(op, rank, role, name, "utf8", (len(data),), data)
    else:
        data = type(value).__qualname__.encode()
        yield whole(op, rank, "opaque", name, "utf8", (len(data),), data)


def state(
    at: Place,
    fqn: str,
    parameter: nn.Parameter,
    shape: tuple[int, ...],
    box: Box,
    kept: Any,
    *,
    backwards: bool = False,
) -> Iterator[Record]:
    """Records of what an optimizer keeps of one parameter.

    Args:
        shape: of the logical tensor. box: the piece of it that this rank's parameter is. kept: `optimizer.state` of it.
        backwards: the piece's elements lie in reversed order.
    """
    for path, value in leaves(kept):
        name = f"{fqn}|{path}"
        local = piece(value, parameter, shape, box)
        if local is None:
            yield from plain(at, "own", name, value)
        else:
            values = dense(local)
            data = tensor_bytes(values.flip(tuple(range(values.dim()))) if backwards else values)
            yield Record(at[0], at[1], LIVE, "state", name, DTYPE_NAME[values.dtype], shape, *box, data)


def piece(value: Any, parameter: nn.Parameter, shape: tuple[int, ...], box: Box) -> torch.Tensor | None:
    """The part of a logical tensor of the parameter's shape that a value holds; None where it is something else."""
    if not isinstance(value, torch.Tensor):
        return None
    if isinstance(value, DTensor):
        held = isinstance(parameter, DTensor) and value.placements == parameter.placements
        return value.to_local() if held and tuple(value.shape) == shape and shape else None
    return value if tuple(value.shape) == box[1] and shape else None


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor as one whose bits can be recorded: what is quantised is dequantised, dtypes without a name widened."""
    tensor = tensor.detach()
    if type(tensor) not in (torch.Tensor, nn.Parameter) and hasattr(tensor, "dequantize"):
        tensor = tensor.dequantize()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    known = tensor if tensor.dtype in DTYPE_NAME else tensor.to(torch.float64)
    return known.clone(memory_format=torch.contiguous_format)  # `contiguous` leaves a single element its stride
