"""The optimizers' kernels on a GPU: whether the bits of an element depend on where it lies in its tensor.

A GPU's sharded state is compared with its unsharded state, so that this is what the comparison rests on. It has not
been measured yet: `oracle.kernels_table` lists what depends on the position, and has entries for CPU kernels only.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import pytest
import torch

CUTS = (0, 1, 3, 64, 515, 1000)
"""Where a tensor is cut: shards of one element, aligned and unaligned, shorter and longer than a block."""

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

Make = Callable[[list[torch.Tensor]], torch.optim.Optimizer]


def trained(make: Make, values: torch.Tensor, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    """The parameter and its state after a step for each gradient."""
    param = torch.nn.Parameter(values.clone())
    optimizer = make([param])
    for gradient in gradients:
        param.grad = gradient.clone()
        optimizer.step()
    state = optimizer.state[param]
    return [param.detach(), *(state[name] for name in sorted(state) if state[name] is not None and state[name].dim())]


def assert_position_does_not_matter(make: Make, dtype: torch.dtype) -> None:
    generator = torch.Generator("cuda").manual_seed(0)

    def draw() -> torch.Tensor:
        return torch.randn(CUTS[-1], generator=generator, device="cuda").to(dtype)

    values, gradients = draw(), [draw() for _ in range(3)]
    whole = trained(make, values, gradients)
    spans = [slice(a, b) for a, b in pairwise(CUTS)]
    shards = [trained(make, values[span], [g[span] for g in gradients]) for span in spans]
    for number, expected in enumerate(whole):
        found = torch.cat([shard[number] for shard in shards])
        assert torch.equal(expected.view(torch.uint8), found.view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("impl", ["forloop", "foreach", "fused"])
@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("kind", ["adam", "adamw", "sgd"])
def test_torchs_kernels(kind: str, impl: str, capturable: bool, dtype: str) -> None:
    how: dict[str, Any] = {"foreach": impl == "foreach", "fused": impl == "fused", "weight_decay": 0.125}
    if kind == "sgd":
        if capturable:
            pytest.skip("SGD has no capturable")
        how |= {"momentum": 0.9, "lr": 0.03125}
    else:
        how |= {"eps": 2.0**-10, "capturable": capturable}
    classes: dict[str, Any] = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
    assert_position_does_not_matter(lambda params: classes[kind](params, **how), DTYPES[dtype])


@pytest.mark.skipif(find_spec("transformer_engine") is None, reason="TransformerEngine is not installed")
@pytest.mark.parametrize("options", [{}, {"capturable": True}, {"adam_w_mode": False}], ids=str)
def test_transformer_engines_fused_adam(options: dict[str, Any]) -> None:
    from transformer_engine.pytorch.optimizers import FusedAdam

    assert_position_does_not_matter(lambda params: FusedAdam(params, lr=0.03125, **options), torch.float32)
