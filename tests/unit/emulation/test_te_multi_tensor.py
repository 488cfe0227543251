"""The emulated multi-tensor kernels of TransformerEngine against torch's optimizers and the formulas of its sources."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from shardproof.emulation import names, te_multi_tensor
from shardproof.emulation.te_extension import extension

FLAG = torch.zeros(1, dtype=torch.int32)


def test_every_kernel_is_in_the_extension() -> None:
    found = extension()
    for function in te_multi_tensor.FUNCTIONS:
        assert vars(found)[function.__name__] is function


@pytest.mark.parametrize(("momentum", "nesterov"), [(0.0, False), (0.5, False), (0.5, True)])
@pytest.mark.parametrize("decay", [0.0, 0.25])
def test_sgd_steps_as_torch_does(momentum: float, nesterov: bool, decay: float) -> None:
    values = [torch.arange(8.0) / 4 - 1, torch.arange(6.0).reshape(2, 3)]
    theirs = [torch.nn.Parameter(value.clone()) for value in values]
    options: dict[str, Any] = {"momentum": momentum, "nesterov": nesterov, "weight_decay": decay}
    reference = torch.optim.SGD(theirs, lr=0.125, foreach=False, **options)
    ours, buffers = [value.clone() for value in values], [torch.zeros_like(value) for value in values]
    for number in range(3):
        grads = [torch.full_like(value, 0.5 * (number + 1)) for value in values]
        for param, grad in zip(theirs, grads, strict=True):
            param.grad = grad.clone()
        reference.step()
        te_multi_tensor.multi_tensor_sgd(
            64, FLAG, [grads, ours, buffers], decay, momentum, 0.0, 0.125, nesterov, number == 0, False, 1.0
        )
    assert all(torch.equal(a, b) for a, b in zip(theirs, ours, strict=True))


def test_sgd_keeps_what_it_rounds_for_the_buffer_only() -> None:
    """An fp16 momentum is rounded when it is stored, after the weight took it."""
    grad, weight, buffer = (torch.tensor([value], dtype=torch.float16) for value in (1.0, 0.0, 2048.0))
    te_multi_tensor.multi_tensor_sgd(64, FLAG, [[grad], [weight], [buffer]], 0, 1.0, 0, 1.0, False, False, False, 0.5)
    assert (weight.item(), buffer.item()) == (-2048.0, 2048.0)  # of 2048.5
    copy = torch.zeros(1, dtype=torch.float16)
    master, kept = torch.zeros(1), torch.zeros(1)
    te_multi_tensor.multi_tensor_sgd(
        64, FLAG, [[grad], [master], [kept], [copy]], 0, 0, 0, 2.0, False, True, False, 1.0
    )
    assert (master.item(), copy.item(), kept.item()) == (-2.0, -2.0, 0.0)
    with pytest.raises(RuntimeError, match="Unsupported combination"):
        te_multi_tensor.multi_tensor_sgd(64, FLAG, [[grad], [master], [kept]], 0, 0, 0, 1.0, False, True, False, 1.0)


def test_scaled_norms_and_scales() -> None:
    values = [torch.tensor([3.0, 0.0]), torch.tensor([4.0])]
    whole, each = te_multi_tensor.multi_tensor_unscale_l2norm(64, FLAG, [values], torch.tensor([2.0]), True)
    assert (whole.tolist(), each.tolist()) == ([10.0], [6.0, 8.0])
    target = [torch.zeros(2), torch.zeros(1)]
    te_multi_tensor.multi_tensor_scale_tensor(64, FLAG.clone(), [values, target], torch.tensor([0.5]))
    assert [each.tolist() for each in target] == [[1.5, 0.0], [2.0]]


@pytest.mark.parametrize(("pow_2", "epsilon"), list(itertools.product([False, True], [0.0, 4.0])))
def test_scales_of_magnitudes(pow_2: bool, epsilon: float) -> None:
    amax = torch.tensor([0.0, 1.0, 3.0, 1e-45, float("inf"), float("nan")])
    scale, inverse = torch.zeros(6), torch.zeros(6)
    te_multi_tensor.multi_tensor_compute_scale_and_scale_inv(
        64, FLAG, [[amax], [scale], [inverse]], 448.0, pow_2, epsilon
    )
    largest = float(np.finfo(np.float32).max)
    expected = [1.0, 448.0, float(np.float32(448.0) / np.float32(3.0)), largest, 1.0, 1.0]
    if epsilon:
        expected[:4] = [112.0] * 4
    if pow_2:
        expected = [float(2.0 ** np.floor(np.log2(value))) for value in expected]
    assert scale.tolist() == expected
    assert torch.equal(inverse, scale.reciprocal())


def test_exponents_of_mxfp8() -> None:
    amax, found = torch.tensor([0.0, 448.0, 449.0, 896.0], dtype=torch.bfloat16), torch.zeros(4, dtype=torch.uint8)
    te_multi_tensor.multi_tensor_compute_scale_inv_e8m0(64, None, [[amax], [found]])
    assert found.tolist() == [0, 127, 127, 128]  # 449 is 448 in bf16


def test_packages_by_name_cannot_be_called() -> None:
    with names.importable(["shardproof_absent", "shardproof_absent.language"]):
        import shardproof_absent as absent  # type: ignore[import-not-found]

        def kernel() -> None: ...

        for made in (absent.jit(kernel), absent.autotune(configs=[absent.Config({})])(absent.jit(kernel))):
            with pytest.raises(NotImplementedError, match="only here by name"):
                made[(1,)]
    with pytest.raises(ModuleNotFoundError):
        __import__("shardproof_absent")
