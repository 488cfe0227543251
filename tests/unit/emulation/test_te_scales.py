"""TransformerEngine's block scales and its delayed scales, emulated, against formulations in NumPy, element by element.

The formulations follow the sources another way than the emulation: no padding, no tiles, a loop over blocks and over
tensors, and the powers of two by frexp. Upstream's own comparison with its reference quantizer is the suite
`transformer-engine/block-scaling` (docs/emulation.md).
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from shardproof.emulation import te_quantize

E4M3, E5M2 = SimpleNamespace(name="kFloat8E4M3"), SimpleNamespace(name="kFloat8E5M2")
NUMPY = {E4M3.name: ml_dtypes.float8_e4m3fn, E5M2.name: ml_dtypes.float8_e5m2}


class Float8BlockQuantizer(SimpleNamespace):
    """Named as the library's, by which the emulation goes."""


class Float8BlockwiseQTensor(SimpleNamespace):
    """The four parts that the kernels fill."""


def quantized(values: torch.Tensor, quantizer: Any) -> Any:
    """A tensor of the library's, filled; what pads its scales is 7."""
    height, width = values.shape[:-1].numel(), values.shape[-1]
    across, down = -(-width // 128), -(-height // 128)
    square = quantizer.block_scaling_dim == 2
    shapes = [(down, across), (across, down)] if square else [(across, height), (down, width)]
    rows, columns = (torch.full((first, -(-second // 4) * 4), 7.0) for first, second in shapes)
    made = Float8BlockwiseQTensor(
        _rowwise_data=torch.zeros(values.shape, dtype=torch.uint8), _rowwise_scale_inv=rows,
        _columnwise_data=torch.zeros(width, *values.shape[:-1], dtype=torch.uint8), _columnwise_scale_inv=columns,
    )  # fmt: skip
    return te_quantize.quantize(values, quantizer, made)


def formulated(values: np.ndarray[Any, Any], quantizer: Any, limit: float) -> tuple[Any, Any]:
    """Bytes and inverse scales, (blocks down, blocks across), of a matrix, one block after the other."""
    rows = 128 if quantizer.block_scaling_dim == 2 else 1
    largest = np.float32(ml_dtypes.finfo(NUMPY[quantizer.dtype.name]).max)
    data = np.zeros(values.shape, np.uint8)
    inverse = np.zeros((-(-values.shape[0] // rows), -(-values.shape[1] // 128)), np.float32)
    for down, across in np.ndindex(inverse.shape):
        part = np.s_[down * rows : (down + 1) * rows, across * 128 : (across + 1) * 128]
        amax = np.fmax.reduce(np.abs(values[part]), axis=None, initial=np.float32(quantizer.amax_epsilon))
        with np.errstate(all="ignore"):
            scale = largest / amax if 0 < amax < np.inf else np.float32(1)
            scale = np.float32(limit) if np.isinf(scale) else scale
            if quantizer.force_pow_2_scales:
                scale = np.ldexp(np.float32(1), np.frexp(scale)[1] - 1)
            scaled = np.clip(values[part] * scale, -largest, largest)
            data[part] = scaled.astype(NUMPY[quantizer.dtype.name]).view(np.uint8)
            data[part][np.isnan(scaled)] = 0x7F  # the device's NaN, in both formats
            inverse[down, across] = np.float32(1) / scale
    return data, inverse


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [E4M3, E5M2])
@pytest.mark.parametrize(
    ("dim", "pow_2", "epsilon"), [(1, True, 0.0), (1, False, 0.5), (2, True, 0.5), (2, False, 0.0)]
)
def test_blocks(dtype: torch.dtype, kind: Any, dim: int, pow_2: bool, epsilon: float) -> None:
    torch.manual_seed(0)
    values = torch.randn(3, 50, 200) * torch.logspace(-6, 6, 200)
    values[0, :5, 3] = torch.tensor([float("inf"), float("nan"), 3e38, 1e-44, -0.0])
    values[:, :, 128:190] = 1e-38  # magnitudes whose scale fp32 cannot hold, alone in their blocks
    values[:, :, 190:] = 0
    values = values.to(dtype)
    quantizer = Float8BlockQuantizer(
        block_scaling_dim=dim, dtype=kind, force_pow_2_scales=pow_2, amax_epsilon=epsilon, rowwise_usage=True,
        columnwise_usage=True,
    )  # fmt: skip
    made, matrix = quantized(values, quantizer), values.float().numpy().reshape(150, 200)
    for own, data, scale_inv in (
        (matrix, made._rowwise_data, made._rowwise_scale_inv),
        (matrix.T, made._columnwise_data, made._columnwise_scale_inv),
    ):
        expected, inverse = formulated(own, quantizer, torch.finfo(dtype).max)
        np.testing.assert_array_equal(data.numpy().reshape(own.shape), expected)
        wanted = inverse if dim == 2 else inverse.T
        np.testing.assert_array_equal(scale_inv[:, : wanted.shape[1]].numpy(), wanted)
        assert (scale_inv[:, wanted.shape[1] :] == 7).all()


def test_blocks_stay_where_the_flag_says_so() -> None:
    quantizer = Float8BlockQuantizer(
        block_scaling_dim=2, dtype=E4M3, force_pow_2_scales=True, amax_epsilon=0.0, rowwise_usage=True,
        columnwise_usage=False,
    )  # fmt: skip
    data, scale_inv = torch.ones(2, 2, dtype=torch.uint8), torch.ones(1, 4)
    made = Float8BlockwiseQTensor(
        _rowwise_data=data, _rowwise_scale_inv=scale_inv, _columnwise_data=None, _columnwise_scale_inv=None
    )
    te_quantize.quantize(torch.full((2, 2), 3.0), quantizer, made, torch.ones(1))
    assert data.tolist() == [[1, 1], [1, 1]]
    te_quantize.quantize(torch.full((2, 2), 3.0), quantizer, made, torch.zeros(1))
    assert data.view(torch.float8_e4m3fn).float().tolist() == [[384.0] * 2] * 2
    assert scale_inv[0, 0] == 1 / 128


def stepped(history: list[float], reduced: float, scale: float, algorithm: str, largest: float) -> tuple[Any, Any]:
    """History and scale of one tensor after an update."""
    with np.errstate(all="ignore"):
        last = np.float32(reduced if reduced != 0 else history[0])
        if last == 0:
            return history, scale
        after = [0.0, *history[2:], last][: len(history)] if len(history) > 1 else [0.0]
        amax = last
        for earlier in history[1:] if algorithm == "max" else ():
            amax = np.fmax(amax, np.float32(earlier))
        new = np.float32(largest) / amax if np.isfinite(amax) and amax > 0 else np.float32(scale)
    return after, np.finfo(np.float32).max if np.isinf(new) else new


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
@pytest.mark.parametrize("length", [1, 2, 5])
@pytest.mark.parametrize("margin", [0, 2])
def test_delayed_scales(algorithm: str, length: int, margin: int) -> None:
    torch.manual_seed(0)
    seen = [0.0, 0.5, 3.0, 1e-40, float("inf"), float("nan")]
    histories = [torch.rand(length, len(seen)), torch.rand(length, len(seen))]
    histories[1][:, 2:4] = 0
    if length > 1:
        histories[0][1, 1:3] = torch.tensor([float("nan"), float("inf")])
    reduced = torch.tensor([*seen, *([0.0] * 3 + [2.0] * 3)])
    scales = [torch.full((len(seen),), 5.0), torch.full((len(seen),), 6.0)]
    before = [each.clone() for each in histories], [each.clone() for each in scales]
    te_quantize.fused_amax_and_scale_update_after_reduction(reduced, histories, scales, algorithm, E4M3, margin)
    for number, (history, scale) in enumerate(zip(*before, strict=True)):
        for column in range(len(seen)):
            after, new = stepped(
                history[:, column].tolist(), float(reduced[number * len(seen) + column]), float(scale[column]),
                algorithm, 448 / 2**margin,
            )  # fmt: skip
            np.testing.assert_array_equal(histories[number][:, column].numpy(), np.array(after, np.float32))
            assert scales[number][column].item() == np.float32(new)


def test_another_algorithm_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"Unsupported amax compute algorithm \(mean\)"):
        te_quantize.fused_amax_and_scale_update_after_reduction(torch.zeros(0), [], [], "mean", E4M3, 0)
