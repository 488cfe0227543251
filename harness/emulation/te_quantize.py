"""The kernels of TransformerEngine's extension that make and read FP8 tensors with one scale for each tensor.

The cast is IEEE: a value times its scale in fp32, rounded to nearest even, saturating. A current scale is the dtype's
largest value over the largest magnitude, reduced over the quantizer's process group where it asks for that; a delayed
one is the quantizer's own, and the largest magnitude is noted beside it. Block scales are not emulated. The tensors
are the library's own Python objects.

Sources: `transformer_engine/pytorch/csrc/quantizer.cpp`, `transformer_engine/common/recipe/recipe_common.cuh`,
`transformer_engine/common/multi_tensor/adam.cu`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist

from harness.emulation import memory
from harness.emulation.touched import touch

NAME = "transformer_engine_torch"

FP8 = {"kFloat8E4M3": torch.float8_e4m3fn, "kFloat8E5M2": torch.float8_e5m2}
WIDE = {"kFloat32": torch.float32, "kFloat16": torch.float16, "kBFloat16": torch.bfloat16}
DELAYED, CURRENT = "Float8Quantizer", "Float8CurrentScalingQuantizer"


def _kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that goes by addresses: neither autograd nor the sides of the emulated device concern it."""

    @wraps(function)
    def call(*args: Any, **named: Any) -> Any:
        touch(f"{NAME}.{function.__name__}")
        side = next((side for given in memory.tensors_in(args) if (side := memory.tag_of(given))), None)
        with torch.no_grad(), torch._C.DisableTorchFunction():
            result = function(*args, **named)
            if side is not None:
                _put(result, side)
            return result

    return call


@_kernel
def quantize(tensor: torch.Tensor, quantizer: Any, output: Any = None, noop: torch.Tensor | None = None) -> Any:
    """`tensor` as a new Float8Tensor, or its values in `output`, which stays unchanged where the flag `noop` is set."""
    _known(quantizer)
    source = tensor.detach().contiguous()
    if output is None:
        output = create_empty_quantized_tensor(quantizer, source.shape, source.dtype, source.device, False)
    if source.numel() == 0 or (noop is not None and int(noop) == 1):
        return output
    scale = _scale(source, quantizer)
    output._scale_inv.copy_(scale.reciprocal())
    data = _cast(source, scale, quantizer.dtype)
    if output._data is not None:
        output._data.copy_(data.view(output._data.shape))
    if output._transpose is not None:
        output._transpose.copy_(_transposed(data).view(output._transpose.shape))
        output._transpose_invalid = False
    return output


@_kernel
def dequantize(tensor: Any, otype: Any) -> torch.Tensor:
    """The values of a Float8Tensor, in another dtype."""
    stored: torch.Tensor = tensor._data.view(FP8[tensor._fp8_dtype.name])
    values: torch.Tensor = stored.float() * tensor._scale_inv
    return values.to(WIDE[otype.name])


@_kernel
def fp8_transpose(data: torch.Tensor, dtype: Any, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """The bytes of an FP8 matrix, transposed; leading dims are taken as one."""
    transposed = _transposed(data)
    return transposed if out is None else out.copy_(transposed.view(out.shape))


@_kernel
def create_empty_quantized_tensor(
    quantizer: Any, shape: Iterable[int], dtype: torch.dtype, device: torch.device, pin_memory: bool
) -> Any:
    """A Float8Tensor without values yet."""
    _known(quantizer)
    on_device = torch.device(device).type == "cuda"
    device = torch.device("cpu") if on_device else device  # where the values really are
    from transformer_engine.pytorch.tensor.float8_tensor import Float8Tensor  # type: ignore[import-not-found]

    size = tuple(shape)
    columns = (size[-1], *size[:-1]) if size else ()
    made = Float8Tensor(
        shape=size,
        dtype=dtype,
        data=torch.empty(size, dtype=torch.uint8, device=device) if quantizer.rowwise_usage else None,
        data_transpose=torch.empty(columns, dtype=torch.uint8, device=device) if quantizer.columnwise_usage else None,
        fp8_scale_inv=torch.ones(1, device=device),
        fp8_dtype=quantizer.dtype,
        quantizer=quantizer,
        device=device,
    )
    if on_device:
        _put(made, memory.Side.DEVICE)
    return made


def _put(made: Any, side: memory.Side) -> None:
    """Say that a tensor of the library's, and all that it consists of, lies on a side."""
    parts = (made, *(getattr(made, name, None) for name in ("_data", "_transpose", "_scale_inv")))
    for part in parts:
        if isinstance(part, torch.Tensor):
            memory.put(part, side)


@torch.no_grad()
def store(master: torch.Tensor, param: torch.Tensor, meta: Sequence[torch.Tensor], dtype: Any) -> None:
    """Store a stepped master as the FP8 kernel of Adam does. param: its bytes. meta: scale, largest magnitude,
    inverse of the scale."""
    scale, amax, scale_inv = meta
    amax.copy_(torch.maximum(amax, master.abs().max()))
    scale_inv.copy_(scale.reciprocal())
    param.copy_(_cast(master, scale, dtype))


def _known(quantizer: Any) -> None:
    if type(quantizer).__name__ not in (DELAYED, CURRENT):
        raise NotImplementedError(f"quantize of {type(quantizer).__name__} is not emulated: it needs a GPU")


def _scale(source: torch.Tensor, quantizer: Any) -> torch.Tensor:
    """The scale of a tensor, shape (1,)."""
    amax = source.abs().max().float().view(1)
    if type(quantizer).__name__ == DELAYED:
        quantizer.amax.copy_(torch.maximum(quantizer.amax, amax))
        own: torch.Tensor = quantizer.scale.detach().clone()
        return own
    if quantizer.with_amax_reduction:
        dist.all_reduce(amax, dist.ReduceOp.MAX, group=quantizer.amax_reduction_group)
    return _note(quantizer, amax, _current(amax, quantizer))


def _current(amax: torch.Tensor, quantizer: Any) -> torch.Tensor:
    """The scale for values of that largest magnitude; 1 where there is none that fits."""
    largest = torch.finfo(FP8[quantizer.dtype.name]).max
    amax = amax.clamp(min=quantizer.amax_epsilon)
    if not torch.isfinite(amax) or amax == 0:
        return torch.ones_like(amax)
    scale = torch.full_like(amax, largest).div(amax).clamp(max=torch.finfo(torch.float32).max)
    return (scale.view(torch.int32) & -0x800000).view(torch.float32) if quantizer.force_pow_2_scales else scale


def _note(quantizer: Any, amax: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Take note of a scale and give it back. Before 2.16 a quantizer of current scales keeps buffers of scale and
    magnitude, which the kernels fill."""
    if hasattr(quantizer, "scale"):
        quantizer.amax.copy_(amax)
        quantizer.scale.copy_(scale)
    return scale


def _cast(values: torch.Tensor, scale: torch.Tensor, dtype: Any) -> torch.Tensor:
    """Values times their scale, as bytes in FP8."""
    kind = FP8[dtype.name]
    largest = torch.finfo(kind).max
    return (values.float() * scale).clamp(-largest, largest).to(kind).view(torch.uint8)


def _transposed(data: torch.Tensor) -> torch.Tensor:
    return data.reshape(-1, data.shape[-1]).t().contiguous().view(data.shape[-1], *data.shape[:-1])
