"""The twin of a trainer: what it comes to from what was observed, and what it does not apply to.

*Verifies*: every elementwise optimizer of torch, a rate that changes before or after the step, names that hold on every
mesh. *Does not verify*: what ranks say (`test_trainer_runs`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from shardproof.observe.logical import Value
from shardproof.oracle.contract import Contract
from shardproof.oracle.twin import NAME_OF
from shardproof.oracle.values import exact_gradient
from shardproof.program import Op
from shardproof.scenario import Mesh, Scenario
from shardproof.trainer.judge.twin import ELEMENTWISE, NoTwin, Told, stepped
from shardproof.trainer.values.every_mesh import of_every_mesh

SCENARIO = Scenario.from_axes({"system": "reference", "mesh": "1x2x1"})
MESH = Mesh(1, 2, 1)
MODEL = Contract().parameters(SCENARIO, MESH)
OPS = [Op(0, "build", "", 0, MESH, 0, 0, 0), *(Op(n + 1, "step", "", 0, MESH, n, 0, 0) for n in range(3))]

Values = dict[tuple[str, str], Value]


class Plain:
    """A run on whole tensors: what ranks would have observed, and said."""

    def __init__(self, name: str = "AdamW", prefix: str = "model.", dtype: str = "fp32", **settings: Any) -> None:
        self.prefix, self.name, self.dtype = prefix, name, dtype
        self.scenario = SCENARIO.with_axes({"dtype": dtype})
        self.model = Contract().parameters(self.scenario, MESH)
        generator = torch.Generator().manual_seed(0)
        self.params = {p.fqn: torch.nn.Parameter(torch.rand(p.shape, generator=generator)) for p in MODEL}
        self.optimizer = getattr(torch.optim, name)(list(self.params.values()), lr=0.5, **settings)

    def told(self) -> Told:
        group = {key: value for key, value in self.optimizer.param_groups[0].items() if key != "params"}
        group["params"] = [self.prefix + fqn for fqn in self.params]
        return Told([("dense", self.dtype)], False, [{"class": f"torch.optim.x.{self.name}", "groups": [group]}])

    def values(self) -> Values:
        found: Values = {}
        for fqn, param in self.params.items():
            found["param", self.prefix + fqn] = value(param)
            for key, state in self.optimizer.state.get(param, {}).items():
                role = {"momentum_buffer": "momentum"}.get(key, key if key in ("step", "exp_avg", "exp_avg_sq") else "")
                if isinstance(state, torch.Tensor):
                    found[role or "state", self.prefix + fqn + ("" if role else f".{key}")] = value(state)
        return found

    def step(self, iteration: int, times: float = 1.0) -> None:
        for p in self.model:
            assert p.gradient is not None
            at = (SCENARIO.seed, iteration, (0,))
            self.params[p.fqn].grad = exact_gradient(p.uses, p.shape, p.gradient, "fp32", at) * times
        self.optimizer.step()


def value(tensor: torch.Tensor) -> Value:
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return Value(NAME_OF[tensor.dtype], tuple(tensor.shape), data)


def run(
    plain: Plain, rates: Mapping[int, float] | None = None, **step: Any
) -> tuple[dict[int, Told], dict[int, Values]]:
    told, observed = {0: plain.told()}, {0: plain.values()}
    for op in OPS[1:]:
        plain.step(op.iteration, **step)
        told[op.index], observed[op.index] = plain.told(), plain.values()
        if rates and op.index in rates:
            plain.optimizer.param_groups[0]["lr"] = rates[op.index]
            told[op.index] = plain.told()
    return told, observed


def wrong(told: Mapping[int, Told], observed: Mapping[int, Values]) -> set[tuple[int, str]]:
    """(operation, role) of what the twin has otherwise."""
    steps = list(stepped(SCENARIO, OPS, told, observed))
    assert len(steps) == 3
    assert all(("param", f"model.{p.fqn}") in expected for _, expected, _ in steps for p in MODEL)
    return {(op.index, name[0]) for op, want, have in steps for name in want if want[name] != have.get(name)}


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_every_elementwise_optimizer_comes_to_the_same_bits(name: str) -> None:
    assert wrong(*run(Plain(name))) == set()


def test_gradients_are_those_of_the_dtype_that_the_probe_was_asked_for() -> None:
    """Masters in fp32 of a model in bf16, whose gradients are exact in bf16."""
    assert wrong(*run(Plain(dtype="bf16"))) == set()
    told, observed = run(Plain(dtype="bf16"))
    as_fp32 = {op: replace(each, models=[("dense", "fp32")]) for op, each in told.items()}
    assert wrong(as_fp32, observed)


def test_a_rate_that_is_set_behind_the_step_or_before_it() -> None:
    assert wrong(*run(Plain(), {1: 0.25, 2: 0.125})) == set()
    plain = Plain()
    told, observed = {0: plain.told()}, {0: plain.values()}
    for op in OPS[1:]:
        plain.optimizer.param_groups[0]["lr"] = 1 / op.index
        plain.step(op.iteration)
        told[op.index], observed[op.index] = plain.told(), plain.values()
    assert wrong(told, observed) == set()


def test_other_gradients_than_the_mean_are_seen() -> None:
    found = wrong(*run(Plain("SGD", momentum=0.9), times=2.0))
    assert (1, "param") in found
    assert (1, "momentum") in found


def test_state_that_is_there_at_first_is_gone_on_from() -> None:
    plain = Plain()
    plain.step(7)
    assert wrong(*run(plain)) == set()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"models": []}, "the model does not come from self.probe"),
        ({"declined": True}, "twin=False"),
        ({"models": [("dense", "fp32"), ("tied", "fp32")]}, "more than one model"),
        ({"optimizers": []}, "no optimizer was found"),
        ({"optimizers": [{"class": "mine.AdamW", "groups": []}]}, "AdamW is no optimizer of torch.optim"),
        ({"optimizers": [{"class": "torch.optim._muon.Muon", "groups": []}]}, "Muon is no optimizer of torch.optim"),
        ({"optimizers": [{"class": "torch.optim.adam.Adam", "groups": [{"lr": {"type": "Tensor"}, "params": []}]}]},
         "the setting lr of Adam is no plain value"),
        ({"optimizers": [{"class": "torch.optim.adam.Adam", "groups": [{"params": ["model.other"]}]}]},
         "model.other is no parameter of the model"),
    ],
)  # fmt: skip
def test_what_it_does_not_apply_to_is_said(change: dict[str, Any], reason: str) -> None:
    told, observed = run(Plain())
    told[0] = replace(told[0], **change)
    with pytest.raises(NoTwin, match=reason):
        list(stepped(SCENARIO, OPS, told, observed))


def test_optimizers_that_change_along_the_way_are_not_followed() -> None:
    told, observed = run(Plain())
    told[2] = replace(told[2], optimizers=[*told[2].optimizers, *told[2].optimizers])
    with pytest.raises(NoTwin, match="change along the way"):
        list(stepped(SCENARIO, OPS, told, observed))


def test_state_that_ranks_have_differently_is_seen() -> None:
    told, observed = run(Plain("NAdam"))
    name = f"model.{MODEL[0].fqn}.mu_product"
    right = observed[1].pop(("state", name))
    observed[1] |= {("state", f"rank{n}.{name}"): v for n, v in enumerate((right, right._replace(data=b"ABCD")))}
    assert wrong(told, observed) == {(1, "state")}


def test_parameters_in_half_precision_are_not_stepped() -> None:
    told, observed = run(Plain())
    name = ("param", f"model.{MODEL[0].fqn}")
    observed[0][name] = replace_dtype(observed[0][name])
    with pytest.raises(NoTwin, match="kept in bf16"):
        list(stepped(SCENARIO, OPS, told, observed))


def replace_dtype(of: Value) -> Value:
    return of._replace(dtype="bf16")


def test_what_ranks_have_alike_has_one_name_and_what_they_have_apart_has_none() -> None:
    one, other = (Value("fp32", (), np.float32(n).tobytes()) for n in (1, 2))
    values = {
        ("state", "rank0.w.mu_product"): one,
        ("state", "rank1.w.mu_product"): one,
        ("state", "rank0.w.d"): one,
        ("state", "rank1.w.d"): other,
        ("extra_state", "rank0.loader.position"): one,
        ("rng", "rank0.torch"): one,
        ("param", "w"): one,
    }
    assert of_every_mesh(values) == ({("state", "w.mu_product"): one, ("param", "w"): one}, {("state", "w.d")})
