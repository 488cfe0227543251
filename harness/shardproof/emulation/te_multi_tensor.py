"""The multi-tensor kernels of TransformerEngine's extension that go through lists of tensors, all but Adam's: scaling,
norms, SGD, the scales of fp8.

Sources: `transformer_engine/common/multi_tensor/` (`scale.cu`, `l2norm.cu`, `sgd.cu`, `compute_scale.cu`,
`multi_tensor_apply.cuh`) and `transformer_engine/common/recipe/recipe_common.cuh`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from shardproof.emulation import kernels
from shardproof.emulation.used_symbols import touch
from shardproof.ownership import refused

NAME = "transformer_engine_torch"

_MOST_TENSORS = (110, 64, 48, 36, 30, 24)
"""Tensors of one launch, by the number of lists: `common/multi_tensor/multi_tensor_apply.cuh`."""

Lists = list[list[torch.Tensor]]


def launched(chunk: int, lists: Lists) -> Iterator[list[torch.Tensor]]:
    """The tensors that the launcher really hands to a kernel, flat, one entry a list.

    The kernel goes by addresses, and by the number of elements of the first list's tensor: a longer tensor in another
    list is read and written from its start. A launch happens at the last chunk of a tensor. After an empty tensor at
    the end of the lists no chunk follows, so that whatever was collected until then is never launched
    (TransformerEngine pull request 3212).
    """
    pending: list[list[torch.Tensor]] = []
    for number, tensors in enumerate(zip(*lists, strict=True), 1):
        count = tensors[0].numel()
        pending.append([tensor.view(-1)[:count] for tensor in tensors])
        if count and (number == len(lists[0]) or len(pending) == _MOST_TENSORS[len(lists) - 1]):
            yield from (each for each in pending if each[0].numel())
            pending = []


@torch.no_grad()
def multi_tensor_scale(chunk: int, noop: torch.Tensor, lists: Lists, factor: float) -> None:
    """lists: [sources, targets]. The flag is set to 1 where a source is not finite."""
    touch(f"{NAME}.multi_tensor_scale")
    for source, target in zip(*lists, strict=True):
        if kernels.scale(source, target, factor):
            noop.fill_(1)


@torch.no_grad()
def multi_tensor_l2norm(
    chunk: int, noop: torch.Tensor, lists: Lists, per_tensor: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """(norm of everything, shape (1,); norms by tensor, shape (n,), or empty)."""
    touch(f"{NAME}.multi_tensor_l2norm")
    (tensors,) = lists
    norms = [kernels.l2norm([tensor]) for tensor in tensors] if per_tensor else []
    return kernels.l2norm(tensors), torch.cat(norms) if norms else torch.empty(0)


@torch.no_grad()
def multi_tensor_scale_tensor(chunk: int, noop: torch.Tensor, lists: Lists, factor: torch.Tensor) -> None:
    """As `multi_tensor_scale`, by a factor that lies on the device, one fp32 value."""
    touch(f"{NAME}.multi_tensor_scale_tensor")
    multi_tensor_scale(chunk, noop, lists, float(factor))


@torch.no_grad()
def multi_tensor_unscale_l2norm(
    chunk: int, noop: torch.Tensor, lists: Lists, inv_scale: torch.Tensor, per_tensor: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `multi_tensor_l2norm`, of the values times inv_scale, each product rounded to fp32; they stay as they are."""
    touch(f"{NAME}.multi_tensor_unscale_l2norm")
    (tensors,) = lists
    return multi_tensor_l2norm(chunk, noop, [[tensor.float() * inv_scale for tensor in tensors]], per_tensor)


_SGD_DTYPES = (
    (torch.float16, torch.float16, 3), (torch.float32, torch.float32, 3),
    (torch.float16, torch.float32, 4), (torch.float32, torch.float32, 4),
)  # fmt: skip
"""Gradients, weights and the number of lists that there is a kernel for."""


@torch.no_grad()
def multi_tensor_sgd(
    chunk: int, noop: torch.Tensor, lists: Lists, weight_decay: float, momentum: float, dampening: float, lr: float,
    nesterov: bool, first_run: bool, wd_after_momentum: bool, scale: float,
) -> None:  # fmt: skip
    """One SGD step of gradients times scale; nothing if noop is set. lists: gradients, weights, momentum buffers, and
    fp16 copies of the weights where there are any.

    Raises:
        RuntimeError: a combination of dtypes that has no kernel.
    """
    touch(f"{NAME}.multi_tensor_sgd")
    grads, weights = lists[0], lists[1]
    if (grads[0].dtype, weights[0].dtype, len(lists)) not in _SGD_DTYPES:
        raise refused(RuntimeError("Unsupported combination of weight and gradient types."))
    if int(noop) == 1:
        return
    for grad, weight, buffer, *copies in launched(chunk, lists):
        new = kernels.sgd(
            grad.float() * scale, weight, buffer, lr=lr, momentum=momentum, dampening=dampening,
            weight_decay=weight_decay, nesterov=nesterov, first_run=first_run, decay_after_momentum=wd_after_momentum,
        )  # fmt: skip
        weight.copy_(new)
        for copy in copies:
            copy.copy_(weight)


@torch.no_grad()
def multi_tensor_compute_scale_and_scale_inv(
    chunk: int, noop: torch.Tensor, lists: Lists, max_fp8: float, force_pow_2_scales: bool, epsilon: float
) -> None:
    """Scales of fp8 from largest magnitudes, element by element. lists: magnitudes, scales, inverse scales (fp32)."""
    touch(f"{NAME}.multi_tensor_compute_scale_and_scale_inv")
    for amax, scale, scale_inv in zip(*lists, strict=True):
        scale.copy_(scale_of(amax, max_fp8, epsilon, pow_2=force_pow_2_scales))
        scale_inv.copy_(scale.reciprocal())


def scale_of(
    amax: torch.Tensor, largest: float, epsilon: float, *, pow_2: bool, of: torch.dtype = torch.float32
) -> torch.Tensor:
    """The scale under which each magnitude becomes the dtype's largest value; 1 where it is none or zero.

    amax: fp32, of any shape. pow_2: the power of two below. of: the dtype whose largest value stands for a scale that
    fp32 cannot hold.
    """
    amax = torch.where(amax < epsilon, torch.full_like(amax, epsilon), amax)
    scale = torch.full_like(amax, largest).div(amax)
    scale = torch.where(scale.isinf(), torch.full_like(scale, torch.finfo(of).max), scale)
    if pow_2:
        scale = (scale.view(torch.int32) & -0x800000).view(torch.float32)
    return torch.where(amax.isfinite() & (amax != 0), scale, torch.ones_like(scale))


@torch.no_grad()
def multi_tensor_compute_scale_inv_e8m0(chunk: int, noop: None, lists: Lists) -> None:
    """Inverse scales of mxfp8 as bare exponents, rounded up. lists: bf16 magnitudes, bytes."""
    touch(f"{NAME}.multi_tensor_compute_scale_inv_e8m0")
    for amax, scale_inv in zip(*lists, strict=True):
        bits = (amax.float() * _E4M3_RECIPROCAL).view(torch.int32)
        exponent, mantissa = bits >> 23, bits & 0x7FFFFF
        up = (mantissa > 0) & (exponent != 0xFE) & ~((exponent == 0) & (mantissa <= 0x400000))
        scale_inv.copy_((exponent + up).to(torch.uint8))


_E4M3_RECIPROCAL = 1.0 / torch.tensor(448.0)
"""As the kernel has it, rounded to fp32."""

FUNCTIONS: tuple[Callable[..., Any], ...] = (
    multi_tensor_compute_scale_and_scale_inv, multi_tensor_compute_scale_inv_e8m0, multi_tensor_l2norm,
    multi_tensor_scale, multi_tensor_scale_tensor, multi_tensor_sgd, multi_tensor_unscale_l2norm,
)  # fmt: skip
