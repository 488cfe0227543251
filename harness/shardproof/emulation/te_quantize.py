"""The kernels of TransformerEngine's extension that make and read FP8 tensors, and that choose their scales.

The cast is IEEE: a value times its scale in fp32, rounded to nearest even, saturating. A current scale is the dtype's
largest value over the largest magnitude, reduced over the quantizer's process group where it asks for that; a delayed
one is the quantizer's own, and the largest magnitude is noted beside it, from which the next scale is made
(`fused_amax_and_scale_update_after_reduction`). A block-scaled tensor has a scale for each square of 128 by 128
elements, or for each 128 elements of a row; its transpose is quantized from the values again, with blocks of its own.
The tensors are the library's own Python objects. MXFP8 and NVFP4 are not emulated.

Sources: `transformer_engine/pytorch/csrc/quantizer.cpp`, `transformer_engine/common/recipe/recipe_common.cuh`,
`transformer_engine/common/recipe/delayed_scaling.cu`, `transformer_engine/common/multi_tensor/adam.cu`,
`transformer_engine/common/transpose/quantize_transpose_square_blockwise.cu` and `_vector_blockwise.cu`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist

from shardproof.emulation import memory
from shardproof.emulation.te_multi_tensor import scale_of
from shardproof.emulation.used_symbols import touch
from shardproof.ownership import refused

NAME = "transformer_engine_torch"

FP8 = {"kFloat8E4M3": torch.float8_e4m3fn, "kFloat8E5M2": torch.float8_e5m2}
WIDE = {"kFloat32": torch.float32, "kFloat16": torch.float16, "kBFloat16": torch.bfloat16}
DELAYED, CURRENT, BLOCKS = "Float8Quantizer", "Float8CurrentScalingQuantizer", "Float8BlockQuantizer"
_PARTS = (
    "_data", "_transpose", "_scale_inv", "_rowwise_data", "_columnwise_data", "_rowwise_scale_inv",
    "_columnwise_scale_inv",
)  # fmt: skip
_BLOCK = 128


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
    """`tensor` as a new Float8Tensor or Float8BlockwiseQTensor, or its values in `output`, which stays unchanged where
    the flag `noop` is set."""
    _known(quantizer)
    source = tensor.detach().contiguous()
    if output is None:
        output = create_empty_quantized_tensor(quantizer, source.shape, source.dtype, source.device, False)
    if source.numel() == 0 or (noop is not None and int(noop) == 1):
        return output
    if _by_blocks(quantizer):
        _fill_blocks(source, quantizer, output)
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
    """A Float8Tensor or Float8BlockwiseQTensor without values yet."""
    _known(quantizer)
    on_device = torch.device(device).type == "cuda"
    device = torch.device("cpu") if on_device else device  # where the values really are
    make = _empty_blocks if _by_blocks(quantizer) else _empty
    made = make(quantizer, tuple(shape), dtype, device)
    if on_device:
        _put(made, memory.Side.DEVICE)
    return made


def _empty(quantizer: Any, size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Any:
    from transformer_engine.pytorch.tensor.float8_tensor import Float8Tensor  # type: ignore[import-not-found]

    columns = _transposed_size(size)
    return Float8Tensor(
        shape=size,
        dtype=dtype,
        data=torch.empty(size, dtype=torch.uint8, device=device) if quantizer.rowwise_usage else None,
        data_transpose=torch.empty(columns, dtype=torch.uint8, device=device) if quantizer.columnwise_usage else None,
        fp8_scale_inv=torch.ones(1, device=device),
        fp8_dtype=quantizer.dtype,
        quantizer=quantizer,
        device=device,
    )


def _empty_blocks(quantizer: Any, size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Any:
    from transformer_engine.pytorch.tensor import float8_blockwise_tensor  # type: ignore[import-not-found]

    data: dict[str, torch.Tensor | None] = {}
    directions = (("rowwise", quantizer.rowwise_usage, size),
                  ("columnwise", quantizer.columnwise_usage, _transposed_size(size)))  # fmt: skip
    for name, used, own in directions:
        scales = quantizer.get_scale_shape(size, name == "columnwise")
        data[f"{name}_data"] = torch.empty(own, dtype=torch.uint8, device=device) if used else None
        data[f"{name}_scale_inv"] = torch.zeros(scales, device=device) if used else None
    return float8_blockwise_tensor.Float8BlockwiseQTensor(
        shape=size, dtype=dtype, fp8_dtype=quantizer.dtype, quantizer=quantizer,
        is_2D_scaled=quantizer.block_scaling_dim == 2, device=device, **data,
    )  # fmt: skip


def _transposed_size(size: tuple[int, ...]) -> tuple[int, ...]:
    """The last dim becomes the first."""
    return (size[-1], *size[:-1]) if size else ()


def _put(made: Any, side: memory.Side) -> None:
    """Say that a tensor of the library's, and all that it consists of, lies on a side."""
    parts = (made, *(getattr(made, name, None) for name in _PARTS))
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
    """Refuse the others. Before 2.12 a quantizer of blocks knows another layout too, for gathers, which is not here."""
    if type(quantizer).__name__ not in (DELAYED, CURRENT, BLOCKS) or hasattr(quantizer, "all_gather_usage"):
        raise NotImplementedError(f"quantize of {type(quantizer).__name__} is not emulated: it needs a GPU")


def _by_blocks(quantizer: Any) -> bool:
    """Whether it makes tensors of several scales."""
    return type(quantizer).__name__ == BLOCKS


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
    return scale_of(amax, largest, quantizer.amax_epsilon, pow_2=quantizer.force_pow_2_scales)


def _note(quantizer: Any, amax: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Take note of a scale and give it back. Before 2.16 a quantizer of current scales keeps buffers of scale and
    magnitude, which the kernels fill."""
    if hasattr(quantizer, "scale"):
        quantizer.amax.copy_(amax)
        quantizer.scale.copy_(scale)
    return scale


def _fill_blocks(source: torch.Tensor, quantizer: Any, output: Any) -> None:
    """Quantize by blocks, the values as they lie and transposed, as far as the output has room for either."""
    matrix = source.reshape(-1, source.shape[-1] if source.dim() else 1)
    for values, data, scale_inv in (
        (matrix, output._rowwise_data, output._rowwise_scale_inv),
        (matrix.t(), output._columnwise_data, output._columnwise_scale_inv),
    ):
        if data is not None:
            stored, inverse = _blocks(values, quantizer)
            data.copy_(stored.view(data.shape))
            scale_inv[:, : inverse.shape[1]].copy_(inverse)  # the kernels leave what pads them to a multiple of 4


def _blocks(values: torch.Tensor, quantizer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The bytes of a matrix, and the inverse scales of its blocks: a matrix of them for squares, its transpose for
    parts of rows, as the library's matrix products want them. A NaN is no magnitude: the kernels take fmaxf."""
    height, width = values.shape
    rows = _BLOCK if quantizer.block_scaling_dim == 2 else 1
    padded = torch.nn.functional.pad(values.float(), (0, -width % _BLOCK, 0, -height % rows))
    tiles = padded.view(padded.shape[0] // rows, rows, padded.shape[1] // _BLOCK, _BLOCK)
    amax = torch.where(tiles.isnan(), torch.zeros_like(tiles), tiles.abs()).amax(dim=(1, 3))
    largest = torch.finfo(FP8[quantizer.dtype.name]).max
    scale = scale_of(amax, largest, quantizer.amax_epsilon, pow_2=quantizer.force_pow_2_scales, of=values.dtype)
    data = _cast(tiles, scale[:, None, :, None], quantizer.dtype).view(padded.shape)[:height, :width]
    inverse = scale.reciprocal()
    return data.contiguous(), inverse if rows > 1 else inverse.t()


@_kernel
def fused_amax_and_scale_update_after_reduction(
    reduced: torch.Tensor, histories: Sequence[torch.Tensor], scales: Sequence[torch.Tensor], algorithm: str,
    dtype: Any, margin: float,
) -> None:  # fmt: skip
    """Bring delayed scales up to date, in place.

    Args:
        reduced: the largest magnitudes of all tensors, one after another; 0 where the history's own first row counts.
        histories: for each group of n tensors its last magnitudes, (length, n): row 0 is the newest, which moves to the
            end. A tensor that has seen no magnitude keeps history and scale. scales: (n,) each. algorithm: `max` of the
            history, or its `most_recent`. margin: the scale is smaller by that power of two.

    Raises:
        RuntimeError: another algorithm.
    """
    if algorithm not in ("max", "most_recent"):
        raise refused(RuntimeError(f"Unsupported amax compute algorithm ({algorithm})"))
    largest = torch.finfo(FP8[dtype.name]).max * 2.0**-margin
    parts = torch.split(reduced, [history.shape[1] for history in histories])
    for part, history, scale in zip(parts, histories, scales, strict=True):
        last = torch.where(part != 0, part, history[0])
        seen = torch.cat([history[1:], last[None]])
        amax = torch.where(seen.isnan(), torch.zeros_like(seen), seen).amax(0) if algorithm == "max" else last
        amax = torch.where(last != 0, amax, torch.zeros_like(amax))
        rolled = torch.cat([torch.zeros_like(seen[:1]), seen[1:]])
        history.copy_(torch.where(last != 0, rolled, history))
        new = torch.where(amax.isfinite() & (amax > 0), torch.full_like(amax, largest).div(amax), scale)
        scale.copy_(torch.where(new.isinf(), torch.full_like(new, torch.finfo(torch.float32).max), new))


def _cast(values: torch.Tensor, scale: torch.Tensor, dtype: Any) -> torch.Tensor:
    """Values times their scale, as bytes in FP8."""
    kind = FP8[dtype.name]
    largest = torch.finfo(kind).max
    return (values.float() * scale).clamp(-largest, largest).to(kind).view(torch.uint8)


def _transposed(data: torch.Tensor) -> torch.Tensor:
    return data.reshape(-1, data.shape[-1]).t().contiguous().view(data.shape[-1], *data.shape[:-1])
