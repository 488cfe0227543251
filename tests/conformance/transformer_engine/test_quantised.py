"""Matrices stored in fp8e4m3: the emulated extension and the oracle, which share no code, agree bit for bit.

*Verifies*: casts, scales and inverses on values of every magnitude, ties and overflows too; what a forward reads; that
a checkpoint's Float8Tensor is read as its bytes and its scale, and a damaged one refused.
*Does not verify* the device's own cast: the GPU tests run the same scenarios over the real extension.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from shardproof.emulation import te_quantize
from shardproof.observe.logical import Key, Value
from shardproof.observe.record import LIVE
from shardproof.readers.errors import CheckpointError
from shardproof.readers.symbolic import PERSISTENT, Name, Node
from shardproof.readers.values import PARAMETER, SIZE, TENSOR, Quantised, decode
from shardproof.scenario import Scenario
from shardproof.systems.transformer_engine.contract import CONTRACT
from shardproof.systems.transformer_engine.quantised import quantised
from shardproof.systems.transformer_engine.switches import FP8_BOUND
from shardproof.systems.transformer_engine.vocabulary import FLOAT8_DTYPES, VOCABULARY

SHAPE = (12, 6)
FQN = "qkv.weight"
(FLOAT8,) = VOCABULARY.tensors
E4M3 = SimpleNamespace(name="kFloat8E4M3")


class Float8CurrentScalingQuantizer(SimpleNamespace):
    """Named as the library's, by which the emulation goes."""


class Float8Quantizer(SimpleNamespace):
    """Named as the library's."""


def stored(master: torch.Tensor, options: str) -> tuple[bytes, float, bytes]:
    """What the oracle makes of a master: bytes, inverse scale, what a forward reads next."""
    scenario = Scenario(system="transformer-engine", model="te_no_bias", program="build step").with_axes(
        {"dtype": "bf16/master=fp32", "options": options, "optimizer": "adamw/impl=multi_tensor"}
    )
    truth = {}
    for op in (0, 1):
        for fqn, shape in (("qkv.weight", SHAPE), ("proj.weight", (6, 4)), ("mlp.fc1_weight", (10, 6)),
                           ("mlp.fc2_weight", (6, 10))):  # fmt: skip
            own = master if fqn == FQN else torch.ones(shape)
            truth[Key(op, LIVE, "master", fqn)] = Value("fp32", shape, own.numpy().tobytes())
            truth[Key(op, LIVE, "compute_param", fqn)] = Value("bf16", shape, b"")
    found = quantised(truth, scenario, CONTRACT)
    inverse = np.frombuffer(found[Key(1, LIVE, "quant_scale", f"{FQN}.param")].data, np.float32)
    assert len(set(inverse.tolist())) == 1
    return (
        found[Key(1, LIVE, "param", FQN)].data,
        float(inverse[0]),
        found[Key(1, LIVE, "compute_param", FQN)].data,
    )


def values(exponent: int) -> torch.Tensor:
    """Of every sign and many magnitudes, ties of e4m3 among them."""
    steps = torch.arange(SHAPE[0] * SHAPE[1], dtype=torch.float32) - 30
    return (steps * 1.0625 * 2.0**exponent).reshape(SHAPE)


@pytest.mark.parametrize("exponent", [-140, -20, -3, 0, 5, 100])
def test_a_current_scale_is_the_oracles(exponent: int) -> None:
    master = values(exponent)
    quantizer = Float8CurrentScalingQuantizer(
        dtype=E4M3, with_amax_reduction=False, force_pow_2_scales=False, amax_epsilon=0.0
    )
    if exponent == -140:  # the quotient is beyond fp32: upstream takes the largest fp32
        assert float(te_quantize._scale(master, quantizer)) == torch.finfo(torch.float32).max
        return
    scale = te_quantize._scale(master, quantizer)
    data, inverse, read = stored(master, "fp8_current")
    assert float(scale.reciprocal()) == inverse
    cast = te_quantize._cast(master, scale, E4M3)
    assert cast.numpy().tobytes() == data
    tensor = SimpleNamespace(_data=cast, _scale_inv=scale.reciprocal(), _fp8_dtype=E4M3)
    wide: torch.Tensor = te_quantize.dequantize(tensor, SimpleNamespace(name="kBFloat16"))
    assert wide.view(torch.uint8).numpy().tobytes() == read


def test_a_delayed_scale_is_the_quantizers_and_the_largest_magnitude_is_noted() -> None:
    master = values(4)
    quantizer = Float8Quantizer(dtype=E4M3, scale=torch.ones(1), amax=torch.zeros(1))
    scale = te_quantize._scale(master, quantizer)
    assert float(quantizer.amax) == float(master.abs().max())
    assert te_quantize._cast(master, scale, E4M3).numpy().tobytes() == stored(master, "fp8_delayed")[0]


def test_zeros_have_a_scale_of_one() -> None:
    assert stored(torch.zeros(SHAPE), "fp8_current")[:2] == (bytes(72), 1.0)


def float8(number: int = 7, scales: int = 1) -> Any:
    """A pickled Float8Tensor as release 2.20.2 writes it."""

    def tensor(kind: str, key: str, count: int) -> Node:
        storage = Node(PERSISTENT, (("storage", Name("torch", kind), key, "cpu", count),))
        return Node(TENSOR, (storage, 0, (count,), (1,), False, None))

    dtype, shape = Node(FLOAT8_DTYPES[0], (number,)), Node(SIZE, ((4,),))
    data, scale = tensor("ByteStorage", "0", 4), tensor("FloatStorage", "1", scales)
    return Node(FLOAT8, (data, dtype, scale, Name("torch", "bfloat16"), shape, None))


def test_a_stored_float8_tensor_is_its_bytes_and_its_scale() -> None:
    found = decode(float8(), "here")
    assert isinstance(found, Quantised)
    assert (found.data.dtype, found.scale_inv.dtype, found.dtype) == ("uint8", "fp32", "bf16")
    assert decode(Node(PARAMETER, (float8(), True, None)), "here") == found


@pytest.mark.parametrize("damaged", [{"number": 8}, {"scales": 2}], ids=str)
def test_another_float8_tensor_is_refused(damaged: dict[str, int]) -> None:
    with pytest.raises(CheckpointError, match=r"tensor of transformer_engine.*float8_tensor"):
        decode(float8(**damaged), "here")


def test_the_largest_initial_value_has_a_power_of_two_for_its_scale() -> None:
    assert math.frexp(448 / FP8_BOUND)[0] == 0.5
