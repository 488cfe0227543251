"""What a step does to gradients, as ranks measure it: told beside a pass, and a failure where ranks scale the parts of
one tensor apart."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from shardproof.observe.logical import Value
from shardproof.observe.settings import SETTING
from shardproof.trainer.rank.inputs import Inputs, weights_of_targets
from shardproof.trainer.rank.measured import Measured
from shardproof.trainer.rank.pieces import whole_tensor
from shardproof.trainer.step.collectives import Seen
from shardproof.trainer.step.measured import (
    Gradient,
    OfStep,
    measured_by_op,
    mixed,
    portrait,
    rates_at,
    rates_told,
    scaled_apart,
    stale,
)
from shardproof.trainer.step.model_calls import Call, evaluates, model_calls_by_op, same_rows, weighed_by_call
from torch import nn


def scaled(factor: float, *, sharded: bool = True, squares: float = 4.0, copies: int = 1) -> Gradient:
    return Gradient((squares, 1.5), (squares * factor**2, 1.5 * factor), sharded, copies)


def step(*gradients: Gradient, stale: tuple[str, ...] = ()) -> OfStep:
    return OfStep(2, {"AdamW": 1}, {f"weight{place}": one for place, one in enumerate(gradients)}, stale)


@pytest.mark.parametrize("factor", [1.0, 0.25, -3.0, 0.0])
def test_a_factor_is_told_by_two_sums(factor: float) -> None:
    expected = None if factor == 0 else pytest.approx(factor)
    assert scaled(factor).factor == expected


def test_what_is_no_multiple_has_no_factor() -> None:
    assert Gradient((4.0, 1.5), (4.0, 0.5), True, 1).factor is None
    assert Gradient((0.0, 0.0), (4.0, 1.5), True, 1).factor is None
    assert Gradient((0.0, 0.0), (0.0, 0.0), True, 1).factor == 0


def test_ranks_that_scale_their_parts_apart_are_told() -> None:
    told = scaled_apart({0: step(scaled(0.5), scaled(0.5)), 1: step(scaled(0.25), scaled(0.25))})
    assert "multiplies its part of the gradients by a number of its own: 0.5 on rank 0, 0.25 on rank 1" in told


@pytest.mark.parametrize(
    "ranks",
    [
        {0: step(scaled(0.5)), 1: step(scaled(0.5))},
        {0: step(scaled(0.5))},
        {0: step(scaled(0.5, sharded=False)), 1: step(scaled(0.25, sharded=False))},  # copies, which must agree anyway
        {0: step(scaled(0.5), scaled(0.7)), 1: step(scaled(0.25), scaled(0.25))},  # by each parameter's own norm
        {0: step(Gradient((4.0, 1.5), (4.0, 0.5), True, 1)), 1: step(scaled(0.25))},  # a reduction
        {0: step(scaled(0.5), scaled(1.0, squares=0.0)), 1: step(scaled(1.0, squares=0.0))},  # a rank without a part
    ],
)
def test_nothing_is_told_of_ranks_that_scale_alike_or_of_which_nobody_knows(ranks: dict[int, OfStep]) -> None:
    assert scaled_apart(ranks) == ""


def test_targets_that_weigh_more_in_one_call_are_told() -> None:
    calls = {0: [Call(("a", "b"), (0.5, 0.5), False)], 1: [Call(("c",), (1.0,), False)]}
    assert weighed_by_call(calls, 3).startswith(
        "in step 3 the loss weighs the 2 targets of call 1 on rank 0 by 0.5 each, the target of call 1 on rank 1 by 1: "
    )


def test_targets_that_weigh_more_on_one_rank_are_told() -> None:
    calls = {0: [Call((), (0.25, 0.25), False), Call((), (0.25, 0.25), False)], 1: [Call((), (0.5, 0.5), False)]}
    assert weighed_by_call(calls, 1).startswith(
        "in step 1 the loss weighs the 4 targets of rank 0 by 0.25 each, the 2 targets of rank 1 by 0.5 each: it is"
    )


@pytest.mark.parametrize(
    "weights",
    [[(0.5, 0.5), (0.5,)], [(0.5,)], [(0.5, 0.5), ()], [(0.5, 0.25), (1.0,)], [(0.5, 0.5), (0.7,)]],
    ids=str,
)
def test_nothing_is_told_of_targets_that_weigh_alike_or_each_by_itself(weights: list[tuple[float, ...]]) -> None:
    calls = {rank: [Call((), each, False)] for rank, each in enumerate(weights)}
    assert weighed_by_call(calls, 0) == ""


def test_calls_of_several_updates_are_no_parts_of_one_mean() -> None:
    calls = {0: [Call((), (0.5, 0.5), False), Call((), (1.0,), False)]}
    seen = OfStep(2, {"SGD": 2}, {}, (), events=("backward", "SGD", "backward", "SGD"))
    assert (seen.updates, step().updates) == (2, 0)
    assert "loss: a cross-entropy, which weighs in all the 3 targets of rank 0 by 2; a mean in each of the 2 " in str(
        portrait({0: seen}, calls, {}, {}, [])
    )


def test_ranks_with_the_same_samples_and_models_that_evaluate_are_told() -> None:
    one, other = [Call(("a",), (), False)], [Call(("b",), (), True)]
    assert same_rows({0: one, 1: one, 2: other}, 0).startswith("in step 0 the models of ranks 0, 1 are given the same")
    assert same_rows({0: one, 1: other}, 0) == evaluates({0: one}, 0) == ""
    assert evaluates({0: other}, 2).startswith("in step 2 the model's `training` is False")


def test_gradients_that_nobody_cleared_are_told() -> None:
    assert stale({0: step()}, 1) == ""
    assert "`.grad` of bias is still what an optimizer has stepped with" in stale({0: step(stale=("bias",))}, 1)
    assert "`.grad` of 2 parameters, such as a, is" in stale({0: step(stale=("a", "b"))}, 1)


def test_a_portrait_tells_the_targets_of_each_rank_where_their_numbers_differ() -> None:
    calls = {0: [Call((), (0.5, 0.5), False)], 1: [Call((), (1.0,), False)]}
    assert portrait({}, calls, {}, {}, [])[1] == (
        "loss: a cross-entropy, which weighs in all the 2 targets of rank 0 by 1, the target of rank 1 by 1"
    )


def setting(name: str, text: str) -> tuple[tuple[str, str], Value]:
    data = text.encode()
    return (SETTING, name), Value("utf8", (len(data),), data)


def test_a_portrait_tells_of_a_step_that_no_optimizer_makes() -> None:
    skips, steps = OfStep(1, {}, {}, ()), OfStep(1, {"SGD": 1}, {"w": scaled(2.0)}, ())

    def told(ranks: dict[int, OfStep]) -> list[str]:
        return [line for line in portrait(ranks, {}, {}, {}, []) if line.startswith(("order", "gradients"))]

    assert told({0: skips, 1: skips}) == [
        "order: 1 backward, and no step of an optimizer of torch",
        "gradients: not measured, since no optimizer of torch steps in it on rank 0, as where a loss scaler skips the "
        "step, or an engine steps by itself",
    ]
    apart = told({0: skips, 1: steps})
    assert apart[0] == "order: 1 backward, and no step of an optimizer of torch on rank 0, while one steps on rank 1"
    assert apart[1].startswith(
        "gradients: no optimizer of torch steps in it on rank 0, while one does on rank 1, where between the backward"
    )
    assert "no parameter of a module has one in `.grad`" in told({0: OfStep(1, {"SGD": 1}, {}, ())})[1]


def test_a_portrait_has_the_norm_the_decay_and_the_rates() -> None:
    parameter = {("param", "w"): Value("fp32", (2, 2), bytes(16)), ("param", "b"): Value("fp32", (2,), bytes(8))}
    rows = [setting("group0.lr", "float 0.1"), setting("group0.weight_decay", "float 0.01"),
            setting("group0.params", "w\nb")]  # fmt: skip
    before = {**parameter, **dict(rows)}
    ranks = {0: step(scaled(0.5)), 1: step(scaled(0.5, squares=5.0))}
    calls = {0: [Call(("a", "b"), (0.5, 0.5), False)]}
    seen = {0: {(kind, 6, (0, 1)): Seen(1, "", "BFloat16") for kind in ("all_reduce", "all_gather", "broadcast")}}
    assert rates_told(before) == rates_at(step(), before) == "0.1"
    assert rates_at(OfStep(1, {}, {}, (), (), (0.5, 0.25, 0.5, None)), before) == "0.5 and 0.25"
    assert portrait(ranks, calls, seen, before, ["0.1", "0.2"]) == [
        "data: rank 0 calls the model once, with 2 rows",
        "loss: a cross-entropy, which weighs in all the 2 targets of rank 0 by 1; a mean of them weighs 1",
        "order: 2 backwards, and 1 step of AdamW",
        "gradients: between the backward and the optimizer all are multiplied by 0.5; their norm is 3, and 1.5 when "
        "the optimizer steps",
        "reduced: all_reduce of 6 numbers among ranks 0, 1 in bf16, once",
        "gathered: all_gather of 6 numbers among ranks 0, 1 in bf16, once",
        "lr: 0.1, 0.2 in steps 0 to 1",
        "weight_decay: 0.01 for 2 parameters, 1 of them vectors (b)",
    ]


def test_a_portrait_tells_a_factor_of_each_rank() -> None:
    whole = [scaled(factor, sharded=False) for factor in (0.5, 0.25)]
    told = portrait({0: step(whole[0], whole[0]), 1: step(whole[1], whole[1])}, {}, {}, {}, [])
    assert "all are multiplied by 0.5 on rank 0, 0.25 on rank 1" in "; ".join(told)
    mixed = portrait({0: step(*whole), 1: step(*whole)}, {}, {}, {}, [])
    assert "some are multiplied by other numbers than others: 0.25, 0.5" in "; ".join(mixed)


def run(clip: float, *, clears: bool) -> tuple[list[OfStep], list[Call]]:
    """Two steps of a linear model, as a rank records them."""
    torch.manual_seed(0)
    model, seen, inputs = nn.Linear(4, 3), Measured(), Inputs()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parameters = {id(one): whole_tensor(one, (name,)) for name, one in model.named_parameters()}
    plain, records = torch.autograd.backward, []
    with seen.watched(), inputs.watched():
        for op in range(2):
            nn.functional.cross_entropy(model(torch.randn(5, 4)), torch.arange(5) % 3).backward()
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad *= clip
            optimizer.step()
            if clears:
                optimizer.zero_grad()
            records += [seen.record(op, 0, parameters), inputs.record(op, 0)]
    assert torch.autograd.backward is plain
    steps = measured_by_op(records)
    return [steps[op][0] for op in range(2)], model_calls_by_op(records)[1][0]


def test_a_rank_measures_its_second_step() -> None:
    (first, second), calls = run(0.5, clears=True)
    assert (first.backwards, first.steps, first.gradients, first.rates) == (1, {"SGD": 1}, {}, [0.1])
    assert {name: one.factor for name, one in second.gradients.items()} == pytest.approx({"weight": 0.5, "bias": 0.5})
    assert second.stale == []
    assert calls[0].weights == pytest.approx([0.2] * 5)
    assert len(calls[0].rows) == 5


def test_a_backward_inside_of_a_step_belongs_to_it() -> None:
    model, seen = nn.Linear(4, 1), Measured()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen.know([optimizer])

    def closure() -> float:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).square().sum()
        loss.backward()
        return float(loss.detach())

    parameters = {id(one): whole_tensor(one, (name,)) for name, one in model.named_parameters()}
    with seen.watched():
        optimizer.step(closure)
        step = measured_by_op([seen.record(0, 0, parameters)])[0][0]
    assert {name: one.factor for name, one in step.gradients.items()} == {"weight": 1.0, "bias": 1.0}
    assert step.waiting == []


class Every(torch.optim.SGD):
    """Updates in each second call of `step`, and leaves the others without effect."""

    calls = 0

    def step(self, closure: Any = None) -> Any:
        self.calls += 1
        return super().step(closure) if self.calls % 2 == 0 else None


def test_a_step_counts_once_and_only_where_something_changes() -> None:
    model, seen = nn.Linear(4, 1), Measured()
    optimizer = Every(model.parameters(), lr=0.1)
    with seen.watched():
        for _ in range(4):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
        record = seen.record(0, 0, {})
    assert measured_by_op([record])[0][0].steps == {"Every": 2}


def test_a_gradient_that_no_step_has_used_waits() -> None:
    model, seen = nn.Linear(4, 1), Measured()
    seen.know([torch.optim.SGD(model.parameters(), lr=0.1)])
    with seen.watched():
        model(torch.ones(2, 4)).sum().backward()
        record = seen.record(0, 0, {id(model.weight): whole_tensor(model.weight, ("weight",))})
    assert measured_by_op([record])[0][0].waiting == ["weight"]


def test_a_rank_sees_gradients_that_nobody_cleared() -> None:
    (first, second), _ = run(1.0, clears=False)
    assert first.stale == []
    assert second.stale == ["bias", "weight"]


def test_a_gradient_that_waits_for_its_own_turn_does_not_count_again() -> None:
    experts, seen = [nn.Linear(4, 1), nn.Linear(4, 1)], Measured()
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in experts]
    held = {id(one.weight): whole_tensor(one.weight, (f"{at}.weight",)) for at, one in enumerate(experts)}
    seen.know(optimizers)
    records = []
    for op in range(4):
        with seen.watched():
            optimizers[op % 2].zero_grad()
            experts[op % 2](torch.ones(2, 4)).sum().backward()
            optimizers[op % 2].step()
        records.append(seen.record(op, 0, held))
    steps = measured_by_op(records)
    assert [steps[op][0].stale for op in range(4)] == [[]] * 4


def test_turns_of_backwards_and_steps_are_counted_as_one() -> None:
    seen = OfStep(4, {"SGD": 4}, {}, (), events=("backward", "SGD") * 4)
    assert "order: 1 backward, then 1 step of SGD, 4 times" in portrait({0: seen}, {}, {}, {}, [])
    seen = OfStep(4, {"SGD": 4}, {}, (), events=("backward", "SGD", "backward", "backward"))
    told = "order: 1 backward, then 1 step of SGD, then 2 backwards"
    assert told in portrait({0: seen}, {}, {}, {}, [])


def test_a_loss_that_is_no_cross_entropy_has_no_weights() -> None:
    output = torch.randn(4, 5)
    chances = output.softmax(1)
    gradient = 0.25 * (chances - torch.eye(5)[:4])
    gradient[3] = 0  # a target that is left out
    assert weights_of_targets(output, gradient) == pytest.approx([0.25] * 3)
    assert weights_of_targets(output, output) == []
    assert weights_of_targets(output[:, :2], gradient[:, :2]) == []
    assert weights_of_targets(output, torch.full((4, 5), math.nan)) == []


def test_what_each_rank_has_of_its_own_is_no_part_of_a_tensor() -> None:
    """Experts that a trainer calls `local` may be scaled by other numbers on other ranks."""
    own, seen = nn.Linear(4, 1), Measured()
    optimizer = torch.optim.SGD(own.parameters(), lr=0.1)
    seen.know([optimizer])
    held = {id(one): whole_tensor(one, (name,), own=True) for name, one in own.named_parameters()}
    with seen.watched():
        own(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        step = measured_by_op([seen.record(0, 0, held)])[0][0]
    assert {name: one.sharded for name, one in step.gradients.items()} == {"weight": False, "bias": False}


@pytest.mark.parametrize(("leaks", "cleared"), [(True, False), (True, True), (False, False)])
def test_gradients_of_two_optimizers_losses_are_told(leaks: bool, cleared: bool) -> None:
    models = {name: nn.Linear(2, 2) for name in ("critic", "actor")}
    optimizers = {name: torch.optim.SGD(model.parameters(), lr=0.1) for name, model in models.items()}
    watch, held = Measured(), {}
    for name, model in models.items():
        held |= {id(one): whole_tensor(one, (f"{name}.{own}",)) for own, one in model.named_parameters()}
    watch.know(optimizers.values())
    with watch.watched():
        models["critic"](torch.ones(2)).sum().backward()
        made = models["actor"](torch.ones(2))
        judged = models["critic"](made) if leaks else made
        judged.sum().backward()
        if cleared:
            optimizers["critic"].zero_grad()
            models["critic"](torch.ones(2)).sum().backward()
        for optimizer in optimizers.values():
            optimizer.step()
    found = mixed(measured_by_op([watch.record(3, 0, held)])[3], 0)
    assert bool(found) is (leaks and not cleared)
    if found:
        assert "reaches parameters of another optimizer: critic.bias, critic.weight; unless" in found
