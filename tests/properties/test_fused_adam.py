"""FusedAdam's arithmetic, three times: the reference's, exact rationals rounded where docs/fused-adam.md says, and the
emulated class that the twin steps with.

NaNs count as equal whatever their sign and payload; everything else, signed zeros included, is compared by bits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from shardproof.emulation.apex import FusedAdam
from shardproof.oracle.scaled_adam import ScaledAdam
from shardproof.reference import fused_adam
from shardproof.reference.fused_adam import FP8, INT16, Scalars, joined, scaled, split, step_tensor, unscaled
from shardproof.reference.numerics import BF16, FP16, FP32, Array

from tests import exact_floats as exact
from tests.capturable_adam import step_capturable
from tests.effort import examples

DTYPES = {"fp32": FP32, "bf16": BF16, "fp16": FP16, "fp8e4m3": FP8, "int16": INT16}
FORMATS = {FP32: exact.FP32, BF16: exact.BF16, FP16: exact.FP16, FP8: exact.FP8_E4M3}
ASKED = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8e4m3": torch.uint8}
MOMENTS = ("fp32", "bf16", "fp16", "fp8e4m3")

MODES = [("fp32", None), ("bf16", None), ("fp16", None), ("bf16", "fp32"), ("fp16", "fp32"), ("bf16", "fp16"),
         ("fp16", "fp16"), ("bf16", "int16")]  # fmt: skip
"""(parameter, master)."""

LARGEST = float(np.finfo(np.float32).max)
SPECIAL = [0.0, -0.0, 1e-45, -1e-40, 1.17549435e-38, 6e-8, 2.0**-14, -0.5, 1.0, 448.0, 65504.0, 3e38, LARGEST,
           -LARGEST, math.inf, -math.inf, math.nan]  # fmt: skip
singles = st.one_of(
    st.sampled_from(SPECIAL), st.integers(-8192, 8192).map(lambda i: i * 2.0**-12), st.floats(width=32, allow_nan=False)
)
modest = st.integers(-8192, 8192).map(lambda i: i * 2.0**-12)


@dataclass(frozen=True)
class Ask:
    """Options of one step."""

    lr: float = 0.03125
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    decay: float = 0.125
    step: int = 1
    decoupled: bool = True
    bias_correction: bool = True

    @property
    def scalars(self) -> Scalars:
        return Scalars.from_hyperparameters(
            self.lr, self.betas, self.eps, self.decay, self.step,
            decoupled=self.decoupled, bias_correction=self.bias_correction,
        )  # fmt: skip


asks = st.builds(
    Ask,
    lr=st.sampled_from([0.0, 0.03125, 1e-3, 0.3]),
    betas=st.tuples(st.sampled_from([0.0, 0.45, 0.9, 0.999]), st.sampled_from([0.0, 0.475, 0.95, 0.999])),
    eps=st.sampled_from([0.0, 1e-8, 1e-3]),
    decay=st.sampled_from([0.0, 0.125, 0.1]),
    step=st.sampled_from([1, 2, 3, 17, 400]),
    decoupled=st.booleans(),
    bias_correction=st.booleans(),
)


def to(values: list[float], dtype: np.dtype[Any]) -> Array:
    """Values in a dtype; fp8 saturates, as FusedAdam's never overflow."""
    with np.errstate(all="ignore"):
        wide = np.array(values, np.float64).astype(np.float32)
        return (np.clip(wide, -448, 448) if dtype == FP8 else wide).astype(dtype)


def same(ours: Array, theirs: Array, what: str) -> None:
    assert ours.dtype == theirs.dtype, what
    if ours.dtype == INT16:
        assert np.array_equal(ours, theirs), what
        return
    nans = np.isnan(ours.astype(np.float32)), np.isnan(theirs.astype(np.float32))
    assert np.array_equal(*nans), f"{what}: {ours} is not {theirs}"
    kind = f"u{ours.dtype.itemsize}"
    differs = (ours.view(kind) != theirs.view(kind)) & ~nans[0]
    assert not differs.any(), f"{what}: {ours[differs]} is not {theirs[differs]}"


# Exact rationals


def exact_update(ask: Ask, g: float, p: float, m: float, v: float) -> tuple[float, float, float]:
    """`(p, m, v)` of one element, every operation of the formula rounded to fp32 from its exact value."""
    add, sub, mul, div = exact.add, exact.sub, exact.mul, exact.div
    lr, b1, b2, eps, decay = (exact.convert(x, exact.FP32) for x in (ask.lr, *ask.betas, ask.eps, ask.decay))
    c1, c2 = (exact_correction(b, ask.step) if ask.bias_correction else 1.0 for b in (b1, b2))
    if not ask.decoupled:
        g = add(g, mul(decay, p))
    m = add(mul(b1, m), mul(sub(1.0, b1), g))
    v = add(mul(b2, v), mul(mul(sub(1.0, b2), g), g))
    change = div(div(m, c1), add(exact.sqrt(div(v, c2)), eps))
    if ask.decoupled:
        change = add(change, mul(decay, p))
    return sub(p, mul(lr, change)), m, v


def exact_correction(beta: float, step: int) -> float:
    return exact.convert(exact.sub(1.0, exact.power(beta, step), exact.FP64), exact.FP32)


def exact_scaled(values: list[float], dtype: np.dtype[Any]) -> tuple[list[float], float]:
    """One domain as it is stored, and its scale; zeros stay zeros."""
    magnitude = math.nan if any(map(math.isnan, values)) else max(map(abs, values))
    scale = exact.div(magnitude, 448.0 if dtype == FP8 else 32752.0)
    inverse = 0.0 if scale == 0 or (math.isnan(scale) and dtype == FP16) else exact.div(1.0, scale)
    return [exact.convert(exact.mul(x, inverse), FORMATS[dtype]) for x in values], scale


def exact_unscaled(x: float, scale: float, dtype: np.dtype[Any]) -> float:
    return exact.mul(x, scale if dtype == FP16 else exact.div(1.0, exact.div(1.0, scale)))


@settings(max_examples=examples(60), deadline=None)
@given(ask=asks, values=st.lists(st.tuples(singles, singles, singles, singles), min_size=1, max_size=6))
def test_the_update_is_the_formula_rounded_operation_by_operation(
    ask: Ask, values: list[tuple[float, float, float, float]]
) -> None:
    g, p, m, v = (to(list(column), FP32) for column in zip(*values, strict=True))
    results = fused_adam.adam(ask.scalars, g, p, m, v)
    for at in range(len(values)):
        wanted = exact_update(ask, float(g[at]), float(p[at]), float(m[at]), float(v[at]))
        for name, ours, one in zip(("param", "exp_avg", "exp_avg_sq"), results, wanted, strict=True):
            same(np.atleast_1d(ours[at]), to([one], FP32), f"{name} of {values[at]}")


@pytest.mark.parametrize("dtype", ["fp16", "fp8e4m3"])
@settings(max_examples=examples(60), deadline=None)
@example(values=[0.0, 0.0])
@example(values=[1e-40, 0.0])  # the scale is subnormal, its inverse infinite
@example(values=[math.inf, 1.0])
@example(values=[math.nan, 1.0])
@given(values=st.lists(singles, min_size=1, max_size=6))
def test_scaling_is_the_formula_rounded_operation_by_operation(dtype: str, values: list[float]) -> None:
    values = to(values, FP32).astype(float).tolist()
    stored, scale = scaled(to(values, FP32), DTYPES[dtype])
    wanted, one = exact_scaled(values, DTYPES[dtype])
    same(scale, to([one] * len(values), FP32), "scale")
    same(stored, to(wanted, DTYPES[dtype]), "stored")
    back = [exact_unscaled(x, one, DTYPES[dtype]) for x in wanted]
    same(unscaled(stored, scale), to(back, FP32), "unscaled")


@pytest.mark.parametrize(("param", "master"), MODES)
@settings(max_examples=examples(10), deadline=None)
@given(
    ask=asks, moments=st.tuples(st.sampled_from(MOMENTS), st.sampled_from(MOMENTS)),
    gradient=st.sampled_from(["fp32", "bf16", "fp16"]),
    values=st.lists(st.tuples(singles, modest, singles, singles), min_size=1, max_size=4),
)  # fmt: skip
def test_a_whole_step_rounds_where_it_stores(
    param: str, master: str | None, ask: Ask, moments: tuple[str, str], gradient: str,
    values: list[tuple[float, float, float, float]],
) -> None:  # fmt: skip
    columns = [list(column) for column in zip(*values, strict=True)]
    p, state = fresh(param, master, columns[1], dict(zip(("exp_avg", "exp_avg_sq"), moments, strict=True)))
    for name, column in zip(("exp_avg", "exp_avg_sq"), columns[2:], strict=True):
        fused_adam.store(state, name, to(column, FP32))
    g = to(columns[0], DTYPES[gradient])
    before = {name: exact_wide(p, state, name) for name in ("param", "exp_avg", "exp_avg_sq")}
    step_tensor(ask.scalars, p, g, state)
    old = zip(g.astype(float).tolist(), *before.values(), strict=True)
    new_p, new_m, new_v = map(list, zip(*(exact_update(ask, *element) for element in old), strict=True))
    for name, wanted in (("exp_avg", new_m), ("exp_avg_sq", new_v)):
        assert_stored(state, name, wanted)
    if master == "int16":
        same(joined(p, state["master_param"]), to(new_p, FP32), "master")
        return
    same(p, to([exact.convert(x, FORMATS[p.dtype]) for x in new_p], p.dtype), "param")
    if master is not None:
        assert_stored(state, "master_param", new_p)


def exact_wide(param: Array, state: dict[str, Array], name: str) -> list[float]:
    """A state as the kernel reads it; of `param` the master where there is one."""
    if name == "param" and "master_param" not in state:
        return param.astype(float).tolist()  # type: ignore[no-any-return]
    stored = state["master_param" if name == "param" else name]
    if stored.dtype == INT16:
        return joined(param, stored).astype(float).tolist()
    numbers = stored.astype(np.float32).astype(float).tolist()
    if stored.dtype not in fused_adam.TOP:
        return numbers  # type: ignore[no-any-return]
    scale = float(state[f"{'master_param' if name == 'param' else name}.scale"][0])
    return [exact_unscaled(x, scale, stored.dtype) for x in numbers]


def assert_stored(state: dict[str, Array], name: str, wanted: list[float]) -> None:
    dtype = state[name].dtype
    if dtype in fused_adam.TOP:
        wanted, scale = exact_scaled(wanted, dtype)
        same(state[f"{name}.scale"], to([scale] * len(wanted), FP32), f"scale of {name}")
    same(state[name], to([exact.convert(x, FORMATS[dtype]) for x in wanted], dtype), name)


def fresh(
    param: str, master: str | None, values: list[float], moments: dict[str, str]
) -> tuple[Array, dict[str, Array]]:
    """A parameter and its state before the first step, as FusedAdam creates it."""
    p, n = to(values, DTYPES[param]), len(values)
    state = {name: np.zeros(n, DTYPES[dtype]) for name, dtype in moments.items()}
    if master is not None:
        state["master_param"] = np.zeros(n, DTYPES[master])
    state |= {f"{name}.scale": np.ones(n, np.float32) for name, s in state.items() if s.dtype in fused_adam.TOP}
    if master in ("fp32", "fp16"):
        fused_adam.store(state, "master_param", p.astype(FP32))
    return p, state


# The emulated class


def to_torch(x: Array) -> torch.Tensor:
    if x.dtype == BF16:
        return torch.from_numpy(x.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(x.copy())


def to_numpy(t: torch.Tensor) -> Array:
    t = t.detach().contiguous()
    if t.dtype is torch.bfloat16:
        return t.view(torch.int16).numpy().view(BF16)
    if t.dtype is torch.float8_e4m3fn:
        return t.view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn)
    return t.numpy()


def emulated(ask: Ask, params: list[torch.nn.Parameter], master: str | None, moments: tuple[str, str]) -> FusedAdam:
    return FusedAdam(
        params, ask.lr, ask.betas, ask.eps, ask.decay, adam_w_mode=ask.decoupled, bias_correction=ask.bias_correction,
        master_weights=master is not None, use_decoupled_grad=True, store_param_remainders=master == "int16",
        master_weight_dtype=torch.float16 if master == "fp16" else torch.float32,
        exp_avg_dtype=ASKED[moments[0]], exp_avg_sq_dtype=ASKED[moments[1]],
    )  # fmt: skip


@pytest.mark.parametrize(("param", "master"), MODES)
@settings(max_examples=examples(15), deadline=None)
@given(
    ask=asks, moments=st.tuples(st.sampled_from(MOMENTS), st.sampled_from(MOMENTS)), seed=st.integers(0, 2**32 - 1),
    size=st.sampled_from([1, 7, 64]), gradient=st.sampled_from(["fp32", "bf16"]),
)  # fmt: skip
def test_steps_equal_those_of_the_emulated_class(
    param: str, master: str | None, ask: Ask, moments: tuple[str, str], seed: int, size: int, gradient: str
) -> None:
    rng = np.random.default_rng(seed)
    named = dict(zip(("exp_avg", "exp_avg_sq"), moments, strict=True))
    p, state = fresh(param, master, rng.uniform(-1, 1, size).tolist(), named)
    theirs = torch.nn.Parameter(to_torch(p))
    optimizer = emulated(ask, [theirs], master, moments)
    for number in (1, 2, 3):
        g = to((rng.integers(-(1 << 13), 1 << 13, size) * 2.0**-12).tolist(), DTYPES[gradient])
        step_tensor(Ask(**{**vars(ask), "step": number}).scalars, p, g, state)
        theirs.decoupled_grad = to_torch(g)  # type: ignore[attr-defined]
        optimizer.step()
        same(p, to_numpy(theirs), f"param after step {number}")
        for name, tensor in optimizer.state[theirs].items():
            if name == "master_param" and param == "fp32":
                continue
            same(state[name], to_numpy(tensor), f"{name} after step {number}")
            if f"{name}.scale" in state:
                scale = to_numpy(optimizer._scales[theirs][name])
                same(state[f"{name}.scale"], np.repeat(scale, size), f"scale of {name} after step {number}")


@pytest.mark.parametrize("master", [None, "fp16"])
@settings(max_examples=examples(10), deadline=None)
@given(moments=st.tuples(st.sampled_from(MOMENTS), st.sampled_from(MOMENTS)), seed=st.integers(0, 2**32 - 1))
def test_the_twin_s_domains_are_tensors_of_their_own(master: str | None, moments: tuple[str, str], seed: int) -> None:
    """Steps, and a load that cuts otherwise, against the reference with the same domains."""
    rng = np.random.default_rng(seed)
    named = dict(zip(("exp_avg", "exp_avg_sq"), moments, strict=True))
    p, state = fresh("bf16", master, rng.uniform(-1, 1, 24).tolist(), named)
    if master is not None:
        fused_adam.store(state, "master_param", p.astype(FP32), np.arange(24) // 7)
    options = {"lr": 0.03125, "weight_decay": 0.125, "betas": (0.9, 0.95), "eps": 1e-8, "adam_w_mode": True,
               "exp_avg_dtype": ASKED[moments[0]], "exp_avg_sq_dtype": ASKED[moments[1]]}  # fmt: skip
    if master is not None:
        options |= {"master_weights": True, "master_weight_dtype": torch.float16}
    theirs, kept = torch.nn.Parameter(to_torch(p)), {}
    for number, width in ((1, 7), (2, 7), (3, 5)):
        domains = np.arange(24) // width
        if number in (1, 3):  # a build; the second loads what the first had
            twin = ScaledAdam([{"params": [theirs]}], options, {theirs: torch.from_numpy(domains)})
        if number == 3:
            twin.restore(theirs, kept)
            twin.param_groups[0]["step"] = 2
            for name in (*named, *(["master_param"] if master else [])):
                fused_adam.store(state, name, unscaled(state[name], state.get(f"{name}.scale")), domains)
        g = to((rng.integers(-(1 << 13), 1 << 13, 24) * 2.0**-12).tolist(), FP32)
        step_tensor(Ask(step=number).scalars, p, g, state, domains)
        theirs.decoupled_grad = to_torch(g)  # type: ignore[attr-defined]
        twin.step()
        kept = {name: values.clone() for name, values in twin.state[theirs].items()}
        same(p, to_numpy(theirs), f"param after step {number}")
        assert kept.keys() == state.keys()
        for name, values in kept.items():
            same(state[name], to_numpy(values), f"{name} after step {number}")


# Remainders


def test_remainders_lose_nothing() -> None:
    """Every high half with the low halves around the carry, NaNs and infinities included."""
    high = np.repeat(np.arange(1 << 16, dtype=np.uint32), 7)
    low = np.tile(np.array([0, 1, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32), 1 << 16)
    bits = high << np.uint32(16) | low
    param, remainder = split(bits.view(np.float32))
    assert np.array_equal(joined(param, remainder).view(np.uint32), bits)
    assert np.array_equal(param.view(np.uint16), ((bits + np.uint32(0x8000)) >> np.uint32(16)).astype(np.uint16))
    assert np.array_equal(remainder < 0, low >= 0x8000)


def test_a_remainder_rounds_ties_away_from_zero() -> None:
    ties = np.array([0x3F808000, 0xBF808000, 0x3F818000, 0x7F7F8000], np.uint32).view(np.float32)
    param, remainder = split(ties)
    assert [hex(int(x)) for x in param.view(np.uint16)] == ["0x3f81", "0xbf81", "0x3f82", "0x7f80"]
    assert (remainder == -0x8000).all()
    assert ties[:1].astype(BF16).view(np.uint16)[0] == 0x3F80  # to even


# Scales


@pytest.mark.parametrize("dtype", ["fp16", "fp8e4m3"])
@settings(max_examples=examples(25), deadline=None)
@given(values=st.lists(modest, min_size=1, max_size=30), width=st.integers(1, 9))
def test_a_scaled_domain_is_that_domain_scaled_alone(dtype: str, values: list[float], width: int) -> None:
    wide, domains = to(values, FP32), np.arange(len(values)) // width
    stored, scale = scaled(wide, DTYPES[dtype], domains)
    for number in np.unique(domains):
        alone, own = scaled(wide[domains == number], DTYPES[dtype])
        same(stored[domains == number], alone, "stored")
        same(scale[domains == number], own, "scale")


@pytest.mark.parametrize(("dtype", "top"), [("fp16", 32752.0), ("fp8e4m3", 448.0)])
def test_the_largest_magnitude_comes_to_the_top(dtype: str, top: float) -> None:
    stored, scale = scaled(to([0.25, -3.0, 1.5], FP32), DTYPES[dtype])
    assert stored.astype(np.float32)[1] == -top
    assert (scale == np.float32(3.0 / top)).all()


def test_a_moment_far_below_the_rest_of_its_shard_is_lost() -> None:
    """Why a scale's domain matters at all: the same element beside smaller ones keeps its digits."""
    values = to([1.0, 1e-6, 2e-6], FP32)
    whole, scale = scaled(values, FP8)
    parts, scales = scaled(values, FP8, np.array([0, 1, 1]))
    assert unscaled(whole, scale)[1] == 0.0
    assert abs(unscaled(parts, scales)[1] - 1e-6) < 1e-7


def test_transformer_engine_stores_nan_for_zeros_in_fp8() -> None:
    """The emulated class takes its formula as it is; the contract and the twin keep zeros."""
    param = torch.nn.Parameter(torch.ones(3))
    param.decoupled_grad = torch.zeros(3)  # type: ignore[attr-defined]
    optimizer = emulated(Ask(), [param], None, ("fp8e4m3", "fp8e4m3"))
    optimizer.step()
    assert optimizer.state[param]["exp_avg"].float().isnan().all()
    assert not scaled(np.zeros(3, np.float32), FP8)[0].astype(np.float32).any()


@pytest.mark.parametrize("dtype", ["fp16", "fp8e4m3"])
def test_a_scale_without_an_inverse_makes_infinities_of_what_is_tiny(dtype: str) -> None:
    """Second moments of gradients below 4e-17 (fp16) or 5e-18 (fp8): the inverse of their scale is infinite in fp32."""
    param = torch.nn.Parameter(torch.ones(2))
    param.decoupled_grad = torch.tensor([1e-18, 0.0])  # type: ignore[attr-defined]
    optimizer = emulated(Ask(betas=(0.9, 0.95)), [param], None, ("fp32", dtype))
    optimizer.step()
    stored = optimizer.get_unscaled_state(param, "exp_avg_sq")
    assert stored[1].isnan()
    assert not 0 < stored[0] < 1e-30


# The kernel for CUDA graphs


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@settings(max_examples=examples(15), deadline=None)
@given(seed=st.integers(0, 2**32 - 1), inverse=st.sampled_from([1.0, 2.0**-10, 1 / 3]))
def test_the_capturable_kernel_reads_the_unrounded_product(dtype: str, seed: int, inverse: float) -> None:
    rng = np.random.default_rng(seed)
    master = None if dtype == "fp32" else "fp32"
    p, state = fresh(dtype, master, rng.uniform(-1, 1, 9).tolist(), {"exp_avg": "bf16", "exp_avg_sq": "bf16"})
    g = to(rng.uniform(-900, 900, 9).tolist(), DTYPES[dtype])
    plain, kept, product = p.copy(), {name: x.copy() for name, x in state.items()}, g.astype(FP32) * np.float32(inverse)
    step_capturable(Ask().scalars, p, g, state, inv_scale=inverse)
    step_tensor(Ask().scalars, plain, product, kept)
    same(p, plain, "param")
    assert all(state[name].tobytes() == kept[name].tobytes() for name in state)
    with np.errstate(all="ignore"):
        same(g, product.astype(g.dtype), "gradient")


def test_an_overflow_leaves_everything_as_it_was() -> None:
    p, state = fresh("bf16", "fp32", [1.0, -2.0], {"exp_avg": "fp32", "exp_avg_sq": "fp32"})
    g = to([math.inf, 1.0], BF16)
    before = [x.tobytes() for x in (p, g, *state.values())]
    step_capturable(Ask().scalars, p, g, state, inv_scale=0.5, found_inf=True)
    assert [x.tobytes() for x in (p, g, *state.values())] == before


# Sanity


@pytest.mark.parametrize("kind", ["adam", "adamw"])
@pytest.mark.parametrize(("dtype", "bound"), [("fp32", 1e-5), ("bf16", 2e-2), ("fp16", 2e-3), ("fp8e4m3", 0.1)])
def test_ten_steps_stay_near_torch_s_in_double_precision(kind: str, dtype: str, bound: float) -> None:
    rng = np.random.default_rng(3)
    start = rng.uniform(-1, 1, 200)
    p, state = fresh("fp32", None, start.tolist(), {"exp_avg": dtype, "exp_avg_sq": dtype})
    theirs = torch.nn.Parameter(torch.from_numpy(p.astype(np.float64)))
    cls = torch.optim.AdamW if kind == "adamw" else torch.optim.Adam
    optimizer = cls([theirs], 0.01, (0.9, 0.95), 1e-8, 0.125)
    for number in range(1, 11):
        g = to(rng.uniform(0.5, 1.5, 200).tolist(), FP32)
        step_tensor(Ask(lr=0.01, step=number, decoupled=kind == "adamw").scalars, p, g, state)
        theirs.grad = torch.from_numpy(g.astype(np.float64))
        optimizer.step()
    assert np.abs(p - theirs.detach().numpy()).max() < bound
