"""TransformerEngine's FusedAdam with its real kernels: a shard is stepped as the same elements of the whole tensor.

*Verifies*, bit for bit on the device: that cutting a tensor into shards of any size, each at any address, changes no
parameter, master, remainder, moment or scale, in every mode. A scaled state is compared under the same domains: every
shard with an optimizer of its own, against all shards in one.
*Does not verify* the values: the kernels are built with fast math, and the reference is not (docs/fused-adam.md).
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.gpu

if not torch.cuda.is_available():
    pytest.skip("no CUDA device: the kernels of FusedAdam cannot run", allow_module_level=True)
optimizers = pytest.importorskip("transformer_engine.pytorch.optimizers", reason="TransformerEngine is not installed")

NUMEL = 70_001
CUTS = (0, 1, 2, 515, 516, 4_099, 40_000, NUMEL)
"""Where the tensor is cut: single elements, odd addresses, more than one chunk of a kernel."""

PLAIN = {
    "fp32": (torch.float32, {}),
    "bf16": (torch.bfloat16, {}),
    "fp16": (torch.float16, {}),
    "bf16, fp32 masters": (torch.bfloat16, {"master_weights": True}),
    "fp16, fp32 masters": (torch.float16, {"master_weights": True}),
    "bf16, remainders": (torch.bfloat16, {"master_weights": True, "store_param_remainders": True}),
    "bf16 moments": (torch.float32, {"exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.bfloat16}),
    "one bf16 moment": (torch.float32, {"exp_avg_dtype": torch.bfloat16}),
    "L2": (torch.float32, {"adam_w_mode": False}),
    "no bias correction": (torch.float32, {"bias_correction": False}),
    "decoupled gradient": (torch.bfloat16, {"master_weights": True, "use_decoupled_grad": True}),
    "capturable": (torch.float32, {"capturable": True}),
    "capturable, masters": (torch.bfloat16, {"capturable": True, "master_weights": True}),
}
SCALED = {
    "fp16 moments": (torch.float32, {"exp_avg_dtype": torch.float16, "exp_avg_sq_dtype": torch.float16}),
    "fp8 moments": (torch.float32, {"exp_avg_dtype": torch.uint8, "exp_avg_sq_dtype": torch.uint8}),
    "fp16 masters": (torch.bfloat16, {"master_weights": True, "master_weight_dtype": torch.float16}),
}


def pieces(whole: torch.Tensor) -> list[torch.nn.Parameter]:
    """The shards of a tensor, each where it lies in it."""
    return [torch.nn.Parameter(whole[start:end]) for start, end in pairwise(CUTS)]


def trained(dtype: torch.dtype, options: dict[str, Any], groups: list[list[torch.nn.Parameter]]) -> list[torch.Tensor]:
    """Five steps of the shards, an optimizer for each list of them; parameters and states, put together."""
    made = [
        optimizers.FusedAdam(group, lr=0.03125, betas=(0.9, 0.95), weight_decay=0.125, **options) for group in groups
    ]
    params = [param for group in groups for param in group]
    generator = torch.Generator("cuda").manual_seed(1)
    for _ in range(5):
        gradient = torch.randn(NUMEL, device="cuda", generator=generator)
        start = 0
        for param in params:
            own = gradient[start : start + param.numel()]
            start += param.numel()
            if options.get("use_decoupled_grad"):
                param.decoupled_grad = own.clone()  # type: ignore[attr-defined]
            else:
                param.grad = own.to(dtype)
        for optimizer in made:
            optimizer.step()
    owner = {param: optimizer for optimizer, group in zip(made, groups, strict=True) for param in group}
    names = owner[params[0]].state[params[0]].keys()
    states = [[owner[p].get_unscaled_state(p, name) for p in params] for name in names]
    return [torch.cat([part.detach().flatten() for part in parts]) for parts in ([*params], *states)]


def start(dtype: torch.dtype) -> torch.Tensor:
    return torch.rand(NUMEL, device="cuda", generator=torch.Generator("cuda").manual_seed(0)).sub(0.5).to(dtype)


def assert_bits(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert one.dtype is other.dtype
        kind = {2: torch.int16, 4: torch.int32}[one.element_size()]
        differs = (one.view(kind) != other.view(kind)).nonzero()
        assert not differs.numel(), f"{differs.numel()} of {NUMEL} differ, first at {differs[0].item()}"


@pytest.mark.parametrize("mode", PLAIN)
def test_shards_are_stepped_as_the_whole(mode: str) -> None:
    dtype, options = PLAIN[mode]
    whole = trained(dtype, options, [[torch.nn.Parameter(start(dtype))]])
    assert_bits(trained(dtype, options, [pieces(start(dtype))]), whole)
    assert_bits(trained(dtype, options, [[piece] for piece in pieces(start(dtype))]), whole)


@pytest.mark.parametrize("mode", SCALED)
def test_a_shard_is_stepped_alone_as_beside_others(mode: str) -> None:
    dtype, options = SCALED[mode]
    together = trained(dtype, options, [pieces(start(dtype))])
    assert_bits(trained(dtype, options, [[piece] for piece in pieces(start(dtype))]), together)


@pytest.mark.xfail(strict=True, reason="zeros times the infinite inverse of their scale: seen under emulation only")
def test_an_fp8_moment_of_zeros_stays_zero() -> None:
    param = torch.nn.Parameter(torch.ones(64, device="cuda"))
    param.grad = torch.zeros_like(param)
    optimizer = optimizers.FusedAdam([param], exp_avg_dtype=torch.uint8, exp_avg_sq_dtype=torch.uint8)
    optimizer.step()
    assert not optimizer.get_unscaled_state(param, "exp_avg").isnan().any()
