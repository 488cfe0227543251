"""TransformerEngine's own FusedAdam, over the emulated kernels, against the reference: equal bits after every step.

    python fused_adam_steps.py

Prints the release, and the steps compared with those that differed, as JSON. For a process that finds the library first
on its path; see test_fused_adam_of_te.py.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from shardproof.emulation import cuda, te_extension
from shardproof.mechanisms.probe_module import tensor_bytes
from shardproof.reference import fused_adam
from shardproof.reference.fused_adam import INT16, TOP, Scalars
from shardproof.reference.numerics import BF16, FP16, FP32, Array

from tests.capturable_adam import step_capturable

NUMEL, STEPS = 33, 3
DTYPES = {"fp32": FP32, "bf16": BF16, "fp16": FP16, "int16": INT16}
TORCH = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
MODES = [("fp32", None), ("bf16", None), ("fp16", None), ("bf16", "fp32"), ("fp16", "fp32"), ("bf16", "fp16"),
         ("fp16", "fp16"), ("bf16", "int16")]  # fmt: skip
"""(parameter, master)."""

CAPTURABLE = [("fp32", None), ("bf16", "fp32"), ("fp16", "fp32")]
"""The same of the capturable kernel; the library refuses other masters there."""

MOMENTS = ("fp32", "bf16", "fp16")
COMMON: dict[str, Any] = {"lr": 0.03, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
RANDOM = np.random.default_rng(0)


def uniform(dtype: str) -> Array:
    return RANDOM.uniform(-1, 1, NUMEL).astype(np.float32).astype(DTYPES[dtype])


def tensor(values: Array) -> torch.Tensor:
    if values.dtype == BF16:
        return torch.from_numpy(values.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(values.copy())


def initial(param: Array, master: str | None, moments: tuple[str, str]) -> dict[str, Array]:
    state = {
        name: np.zeros(NUMEL, DTYPES[dtype]) for name, dtype in zip(("exp_avg", "exp_avg_sq"), moments, strict=True)
    }
    if master:
        state["master_param"] = np.zeros(NUMEL, DTYPES[master])
    state |= {f"{name}.scale": np.ones(NUMEL, np.float32) for name, kept in state.items() if kept.dtype in TOP}
    if master in ("fp32", "fp16"):
        fused_adam.store(state, "master_param", param.astype(np.float32))
    return state


def equal(optimizer: Any, parameter: torch.Tensor, param: Array, state: dict[str, Array]) -> bool:
    """Whether the library holds the reference's bits: parameter, states and their scales."""
    if tensor_bytes(parameter) != param.tobytes():
        return False
    for name, kept in optimizer.state[parameter].items():
        if tensor_bytes(kept) != state[name].tobytes():
            return False
        scale = state.get(f"{name}.scale")
        if scale is not None and not (scale == optimizer._scales[parameter][name].item()).all():
            return False
    return True


def steps(kind: Any, dtype: str, master: str | None, moments: tuple[str, str], grad: str, decoupled: bool,
          correction: bool) -> Iterator[bool]:  # fmt: skip
    """Whether the bits are equal after each step of one mode."""
    param = uniform(dtype)
    state = initial(param, master, moments)
    parameter = torch.nn.Parameter(tensor(param).cuda())
    optimizer = kind(
        [parameter], **COMMON, adam_w_mode=decoupled, bias_correction=correction, master_weights=master is not None,
        master_weight_dtype=torch.float16 if master == "fp16" else torch.float32, exp_avg_dtype=TORCH[moments[0]],
        exp_avg_sq_dtype=TORCH[moments[1]], use_decoupled_grad=True, store_param_remainders=master == "int16",
    )  # fmt: skip
    for step in range(1, STEPS + 1):
        gradient = uniform(grad)
        ask = Scalars.from_hyperparameters(*COMMON.values(), step, decoupled=decoupled, bias_correction=correction)
        fused_adam.step_tensor(ask, param, gradient, state)
        parameter.decoupled_grad = tensor(gradient).cuda()  # type: ignore[attr-defined]
        optimizer.step()
        yield equal(optimizer, parameter, param, state)


def capturable_steps(kind: Any, dtype: str, master: str | None, decoupled: bool) -> Iterator[bool]:
    """The same of the capturable kernel, which takes gradients of the parameter's dtype and fp32 moments."""
    param = uniform(dtype)
    state = initial(param, master, ("fp32", "fp32"))
    parameter = torch.nn.Parameter(tensor(param).cuda())
    optimizer = kind([parameter], **COMMON, adam_w_mode=decoupled, capturable=True, master_weights=master is not None)
    for step in range(1, STEPS + 1):
        gradient = uniform(dtype)
        ask = Scalars.from_hyperparameters(*COMMON.values(), step, decoupled=decoupled)
        step_capturable(ask, param, gradient, state)
        parameter.grad = tensor(gradient).cuda()
        optimizer.step()
        yield equal(optimizer, parameter, param, state)


def main() -> None:
    compared: dict[str, list[bool]] = {}
    with cuda.emulated():
        te_extension.library()
        from transformer_engine.pytorch.optimizers import FusedAdam  # type: ignore[import-not-found]

        for (dtype, master), *rest in itertools.product(
            MODES, itertools.product(MOMENTS, repeat=2), ("fp32", "bf16"), (True, False), (True, False)
        ):
            compared[repr((dtype, master, *rest))] = list(steps(FusedAdam, dtype, master, *rest))
        for (dtype, master), decoupled in itertools.product(CAPTURABLE, (True, False)):
            compared[f"capturable {dtype, master, decoupled}"] = list(
                capturable_steps(FusedAdam, dtype, master, decoupled)
            )
    wrong = [mode for mode, found in compared.items() if not all(found)]
    print(json.dumps({"steps": sum(map(len, compared.values())), "wrong": wrong}))


if __name__ == "__main__":
    main()
