"""The emulated kernels against their published formulas; the optimizers against the interface Megatron-Core uses."""

from __future__ import annotations

import copy
import inspect
import math
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from shardproof.emulation import apex, kernels
from shardproof.emulation.apex import FusedAdam, FusedSGD
from shardproof.emulation.used_symbols import forget_used_symbols, used_symbols

F = np.float32
PRECISION_AWARE: dict[str, Any] = {"master_weights": True, "use_decoupled_grad": True}


def bits(tensor: torch.Tensor) -> list[int]:
    return tensor.detach().contiguous().view(torch.int32).tolist()


def adam_formula(p: Any, g: Any, m: Any, v: Any, step: int, decoupled: bool) -> tuple[Any, Any, Any]:
    """The formula in NumPy fp32: lr 0.01, betas 0.9 and 0.999, eps 1e-8, weight decay 0.1."""
    b1, b2, lr, eps, decay = F(0.9), F(0.999), F(0.01), F(1e-8), F(0.1)
    c1, c2 = F(1 - float(b1) ** step), F(1 - float(b2) ** step)
    if not decoupled:
        g = g + decay * p
    m = b1 * m + (F(1) - b1) * g
    v = b2 * v + (F(1) - b2) * g * g
    update = (m / c1) / (np.sqrt(v / c2) + eps)
    if decoupled:
        update = update + decay * p
    return p - lr * update, m, v


def adam_steps(optimizer_params: dict[str, Any], dtype: torch.dtype, steps: int = 5) -> tuple[torch.nn.Parameter, Any]:
    generator = torch.Generator().manual_seed(0)
    param = torch.nn.Parameter(torch.randn(200, generator=generator).to(dtype))
    optimizer = FusedAdam([param], lr=0.01, weight_decay=0.1, **optimizer_params)
    for _ in range(steps):
        grad = torch.randn(200, generator=generator)
        if optimizer_params.get("use_decoupled_grad"):
            param.decoupled_grad = grad  # type: ignore[attr-defined]
        else:
            param.grad = grad.to(dtype)
        optimizer.step()
    return param, optimizer


@pytest.mark.parametrize("decoupled", [True, False])
def test_adam_is_the_formula_bit_for_bit(decoupled: bool) -> None:
    param, optimizer = adam_steps({"adam_w_mode": decoupled}, torch.float32)
    generator = torch.Generator().manual_seed(0)
    p = torch.randn(200, generator=generator).numpy()
    m = v = np.zeros(200, F)
    for step in range(1, 6):
        p, m, v = adam_formula(p, torch.randn(200, generator=generator).numpy(), m, v, step, decoupled)
    assert bits(param) == bits(torch.from_numpy(p))
    assert bits(optimizer.state[param]["exp_avg"]) == bits(torch.from_numpy(m))
    assert bits(optimizer.state[param]["exp_avg_sq"]) == bits(torch.from_numpy(v))


def test_adam_does_not_depend_on_where_an_element_is() -> None:
    whole, _ = adam_steps({}, torch.float32)
    generator = torch.Generator().manual_seed(0)
    first = torch.randn(200, generator=generator)
    parts = [torch.nn.Parameter(part.clone()) for part in first.split([1, 67, 132])]
    optimizer = FusedAdam(parts, lr=0.01, weight_decay=0.1)
    for _ in range(5):
        for part, grad in zip(parts, torch.randn(200, generator=generator).split([1, 67, 132]), strict=True):
            part.grad = grad
        optimizer.step()
    assert bits(torch.cat([part.detach() for part in parts])) == bits(whole)


def test_the_step_is_the_groups() -> None:
    params = [torch.nn.Parameter(torch.ones(2)) for _ in range(3)]
    optimizer = FusedAdam([{"params": params[:2]}, {"params": params[2:]}, {"params": []}])
    params[0].grad = torch.ones(2)
    optimizer.step()
    optimizer.step()
    assert [group.get("step") for group in optimizer.param_groups] == [2, 2, None]
    assert set(optimizer.state[params[0]]) == {"exp_avg", "exp_avg_sq"}
    assert optimizer.state_dict()["param_groups"][0]["step"] == 2


def test_a_parameter_without_gradient_stays_but_has_state() -> None:
    param = torch.nn.Parameter(torch.ones(2))
    optimizer = FusedAdam([param])
    optimizer.step()
    assert param.tolist() == [1.0, 1.0]
    assert optimizer.state[param]["exp_avg"].tolist() == [0.0, 0.0]


def test_half_parameters_without_masters_round_every_step() -> None:
    param, optimizer = adam_steps({}, torch.bfloat16)
    assert param.dtype is torch.bfloat16
    assert optimizer.state[param]["exp_avg"].dtype is torch.float32


class TestPrecisionAware:
    def test_the_interface_that_megatron_asks_for(self) -> None:
        named = inspect.signature(FusedAdam).parameters
        assert {"master_weight_dtype", "exp_avg_dtype", "exp_avg_sq_dtype", "use_decoupled_grad"} <= set(named)
        required = inspect.signature(FusedAdam.initialize_state).parameters["store_param_remainders"]
        assert required.default is inspect.Parameter.empty  # TE 2.10 requires it; Megatron-Core does not pass it

    def test_remainders_hold_the_same_master(self) -> None:
        whole, optimizer = adam_steps(PRECISION_AWARE, torch.bfloat16)
        split, other = adam_steps({**PRECISION_AWARE, "store_param_remainders": True}, torch.bfloat16)
        remainder = other.state[split]["master_param"]
        assert remainder.dtype is torch.int16
        master = optimizer.state[whole]["master_param"]
        assert bits(kernels.join_remainder(split.data, remainder)) == bits(master)

    @pytest.mark.parametrize("value", [0x3F808000, 0x3F818000, 0xBF808000, 0x3F807FFF, 0x3F808001, 0x7F7F8000, 0])
    def test_remainders_round_ties_away(self, value: int) -> None:
        master = torch.tensor([value - (1 << 32) if value >= 1 << 31 else value], dtype=torch.int32).view(torch.float32)
        high, low = kernels.split_remainder(master)
        assert bits(kernels.join_remainder(high, low)) == bits(master)
        assert (high.view(torch.int16).item() & 0xFFFF) == (value + 0x8000) >> 16 & 0xFFFF

    def test_a_tie_is_where_remainders_differ_from_rounding(self) -> None:
        tie = torch.tensor([0x3F808000], dtype=torch.int32).view(torch.float32)
        assert kernels.split_remainder(tie)[0].item() != tie.bfloat16().item()

    @pytest.mark.parametrize(("dtype", "top"), [(torch.float16, 65504.0 / 2), (torch.uint8, 448.0)])
    def test_scaled_moments_use_their_whole_range(self, dtype: torch.dtype, top: float) -> None:
        param, optimizer = adam_steps({**PRECISION_AWARE, "exp_avg_dtype": dtype}, torch.bfloat16)
        stored = optimizer.state[param]["exp_avg"].float()
        assert stored.abs().max() == pytest.approx(top, rel=1e-2)
        exact = adam_steps(PRECISION_AWARE, torch.bfloat16)[1].state
        reference = next(iter(exact.values()))["exp_avg"]
        unscaled = optimizer.get_unscaled_state(param, "exp_avg")
        assert unscaled.dtype is torch.float32
        assert torch.allclose(unscaled, reference, rtol=0.2, atol=0.02)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
    def test_a_state_dict_is_fp32_and_loads_back(self, dtype: torch.dtype) -> None:
        options = {**PRECISION_AWARE, "exp_avg_dtype": dtype, "exp_avg_sq_dtype": dtype, "store_param_remainders": True}
        param, optimizer = adam_steps(options, torch.bfloat16)
        saved = optimizer.state_dict()
        assert saved["state"][0]["exp_avg"].dtype is torch.float32
        assert saved["state"][0]["master_param"].dtype is torch.int16
        again = FusedAdam([torch.nn.Parameter(param.detach().clone())], **options)
        again.load_state_dict(copy.deepcopy(saved))
        for name, value in optimizer.state[param].items():
            assert torch.equal(again.state_dict()["state"][0][name].float(), saved["state"][0][name].float()), name
            assert next(iter(again.state.values()))[name].dtype is value.dtype
        assert again.param_groups[0]["step"] == 5

    def test_scaling_to_fp16_changes_the_tensor_it_is_given(self) -> None:
        """As TE does: who sets a state from a tensor does not own that tensor's values any more."""
        param = torch.nn.Parameter(torch.ones(2))
        optimizer = FusedAdam([param], exp_avg_dtype=torch.float16)
        given = torch.tensor([1.0, 2.0])
        optimizer.set_scaled_state(param, "exp_avg", given)
        assert given.tolist() != [1.0, 2.0]
        assert optimizer.get_unscaled_state(param, "exp_avg").tolist() == pytest.approx([1.0, 2.0])

    def test_zero_grad_reads_the_decoupled_gradient(self) -> None:
        param, optimizer = adam_steps(PRECISION_AWARE, torch.bfloat16)
        optimizer.zero_grad(set_to_none=False)
        assert param.decoupled_grad.abs().sum() == 0  # type: ignore[attr-defined]
        optimizer.zero_grad()
        assert param.decoupled_grad is None  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"amsgrad": True}, RuntimeError),
        ({"capturable": True}, NotImplementedError),
        ({"master_weights": True, "master_weight_dtype": torch.bfloat16}, RuntimeError),
        ({"exp_avg_dtype": torch.float64}, RuntimeError),
    ],
)
def test_refusals(options: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        FusedAdam([torch.nn.Parameter(torch.ones(1))], **options)


def test_halves_do_not_mix_in_a_group() -> None:
    params = [torch.nn.Parameter(torch.ones(1, dtype=dtype)) for dtype in (torch.float16, torch.bfloat16)]
    for param in params:
        param.grad = torch.ones_like(param)
    with pytest.raises(RuntimeError, match="mix of float16 and bfloat16"):
        FusedAdam(params).step()


@pytest.mark.parametrize("options", [{}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}])
def test_sgd_is_near_torchs_and_keeps_buffers(options: dict[str, Any]) -> None:
    ours, theirs = (torch.nn.Parameter(torch.linspace(-1, 1, 9)) for _ in range(2))
    fused = FusedSGD([ours], lr=0.1, weight_decay=0.01, **options)
    plain = torch.optim.SGD([theirs], lr=0.1, weight_decay=0.01, **options)
    for scale in (1.0, -2.0, 0.5):
        ours.grad, theirs.grad = torch.full((9,), scale), torch.full((9,), scale)
        fused.step()
        plain.step()
    assert torch.allclose(ours, theirs, rtol=1e-6)
    assert "momentum_buffer" in fused.state[ours]


def test_sgd_passes_over_bf16_as_upstream() -> None:
    param = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    param.grad = torch.ones_like(param)
    FusedSGD([param], lr=0.1).step()
    assert param.tolist() == [1.0, 1.0]


def test_scale_rounds_to_the_target_and_flags_what_is_not_finite() -> None:
    flag = torch.zeros(1, dtype=torch.int32)
    source, target = torch.tensor([1.0, 3.0]), torch.zeros(2, dtype=torch.bfloat16)
    apex.multi_tensor_applier(apex.multi_tensor_scale, flag, [[source], [target]], 1 / 3)
    assert target.tolist() == source.mul(float(F(1 / 3))).bfloat16().tolist()
    assert flag.item() == 0
    apex.multi_tensor_applier(apex.multi_tensor_scale, flag, [[torch.tensor([float("inf")])], [torch.zeros(1)]], 1.0)
    assert flag.item() == 1


def test_norm_of_all_and_by_tensor() -> None:
    flag = torch.zeros(1, dtype=torch.int32)
    tensors = [torch.tensor([3.0]), torch.tensor([4.0, 0.0], dtype=torch.bfloat16)]
    total, each = apex.multi_tensor_applier(apex.multi_tensor_l2norm, flag, [tensors], True)
    assert total.shape == (1,)
    assert total.dtype is torch.float32
    assert total.item() == 5.0
    assert each.tolist() == [3.0, 4.0]
    assert apex.multi_tensor_l2norm(0, flag, [[torch.tensor([1e20])]])[0].item() == float("inf")  # as in fp32


INSTALLING = """
import sys, types
from shardproof.emulation import apex

sys.modules["amp_C"] = types.ModuleType("amp_C")
try:
    apex.install()
    raise SystemExit("the real amp_C was covered over")
except RuntimeError as error:
    assert "real amp_C" in str(error) and "apex" not in sys.modules
del sys.modules["amp_C"]

apex.install()
try:
    from transformer_engine.pytorch.optimizers import FusedAdam
    raise SystemExit("TransformerEngine's optimizers were not asked for")
except ModuleNotFoundError:
    pass

apex.install(te_optimizers=True)
import amp_C, torch
from apex.optimizers import FusedAdam, FusedSGD
from apex.multi_tensor_apply import multi_tensor_applier
from apex.normalization.fused_layer_norm import FusedLayerNormAffineFunction as norm
from transformer_engine.pytorch.optimizers import FusedAdam as Adam, multi_tensor_l2norm, multi_tensor_scale
assert Adam is FusedAdam is apex.FusedAdam and amp_C.multi_tensor_scale is multi_tensor_scale
for absent in ("transformer_engine", "transformer_engine.pytorch", "apex.contrib.nccl_allocator"):
    try:
        __import__(absent)
        raise SystemExit(f"{absent} can be imported")
    except ModuleNotFoundError:
        pass
with apex.te_version_known("2.10.0"):
    import transformer_engine
    assert transformer_engine.__version__ == "2.10.0"
assert "transformer_engine" not in sys.modules

x = torch.randn(2, 4, requires_grad=True)
norm.apply(x, torch.ones(4), torch.zeros(4), torch.Size([4]), 1e-5).sum().backward()
assert x.grad is not None
"""


def test_installing_gives_the_names_asked_for_and_leaves_te_absent() -> None:
    subprocess.run([sys.executable, "-W", "error", "-c", INSTALLING], check=True)


def test_the_larger_of_zeros_is_the_positive_one_as_on_a_gpu() -> None:
    forget_used_symbols()
    one, other = torch.tensor([0.0, -0.0, -0.0, 1.0, math.nan]), torch.tensor([-0.0, 0.0, -0.0, 2.0, -0.0])
    for found in (kernels.maximum(one, other), kernels.maximum(other, one)):
        assert found[:2].signbit().tolist() == [False, False]
        assert found[2].signbit()
        assert found[3] == 2.0
        assert found[4].isnan()
    assert used_symbols() == ("torch.maximum of 0 and -0",)
    whole = torch.tensor([3, -1])
    assert torch.equal(kernels.maximum(whole, whole.neg()), torch.tensor([3, 1]))
