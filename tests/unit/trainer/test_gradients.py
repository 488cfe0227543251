"""What an optimizer has of each parameter when it steps, as it is seen in one process and read again."""

from __future__ import annotations

from weakref import ref

import pytest
import torch
from shardproof.observe.logical import Value
from shardproof.trainer.rank.found import State
from shardproof.trainer.rank.gradients import Gradients
from shardproof.trainer.values.gradients import (
    GRADIENT,
    NONE,
    UNSTEPPED,
    OfParameters,
    are_frozen,
    gradients_by_op,
    has_master,
    may_be_stepped,
    reached_apart,
    stepped_frozen,
    why_each,
    why_still,
)
from torch import nn


@pytest.mark.parametrize(
    ("names", "ways", "may"),
    [
        ([("param", "ema.w")], [{"w": "gradient", "ema.w": "frozen"}, {"w": "gradient"}], False),
        ([("param", "ema.w")], [{"w": "gradient"}, {"w": "gradient", "ema.w": "zeros"}], True),
        ([("param", "ema.w"), ("param", "w")], [{"w": "gradient"}, {"w": "gradient"}], True),
        ([("param", "ema.w"), ("exp_avg", "w")], [{"w": "gradient"}, {"w": "gradient"}], True),
        ([("param", "ema.w")], [{"w": "gradient"}, {}], True),
        ([("param", "ema.w")], [{"w": "gradient"}, {"w": "gradient", "": "gradient"}], True),
    ],
)
def test_what_an_optimizer_may_have_had_a_gradient_of(
    names: list[tuple[str, str]], ways: list[OfParameters], *, may: bool
) -> None:
    assert may_be_stepped(names, ways) is may


def seen(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 1) -> OfParameters:
    watch, state = Gradients(), State({"model": model, "optimizer": optimizer}, 0, 1)
    with watch.watched():
        for _ in range(steps):
            optimizer.step()
    optimizer.step()  # which nobody looks at
    return gradients_by_op([watch.record(3, 0, state.parameters, state.frozen)])[3]


@pytest.mark.parametrize(
    ("gradient", "told"),
    [(None, "no gradient arrives there"), (0.0, "all zeros"), (1.0, "look at what copies them back")],
)
def test_what_an_optimizer_steps_beside_the_model_is_told(gradient: float | None, told: str) -> None:
    """Copies in fp32, for example: the model's parameters stay."""
    model, copy = nn.Linear(2, 1, bias=False), nn.Parameter(torch.ones(2))
    copy.grad = None if gradient is None else torch.full((2,), gradient)
    why = why_still(["weight"], seen(model, torch.optim.SGD([copy], lr=0.1)))
    assert why.startswith("the optimizer steps other tensors than these")
    assert told in why


def test_a_parameter_with_a_gradient_that_no_group_has_is_told() -> None:
    model = nn.ParameterDict({name: nn.Parameter(torch.ones(2)) for name in ("a", "b", "c")})
    for name in ("a", "b"):
        model[name].grad = torch.ones(2)
    state = State({"model": model}, 0, 1)
    watch = Gradients(lambda: {id(each): ref(each) for each in model.values()})
    with watch.watched():
        torch.optim.SGD([model["a"]], lr=0.1).step()
    found = gradients_by_op([watch.record(3, 0, state.parameters, state.frozen)])[3]
    assert found == {"a": "gradient", "b": "in no group"}
    assert why_each(["b"], found).startswith("gradients other than zero reach them, and no param group of an optimizer")
    with watch.watched():
        for name in ("a", "b"):
            torch.optim.SGD([model[name]], lr=0.1).step()
    assert gradients_by_op([watch.record(4, 0, state.parameters, state.frozen)])[4] == {
        "a": "gradient",
        "b": "gradient",
    }


def test_every_kind_of_gradient_is_told() -> None:
    model = nn.ParameterDict({name: nn.Parameter(torch.ones(2)) for name in ("a", "b", "c", "d", "e", "f")})
    for name, gradient in {"b": 0.0, "c": 1.0, "d": torch.nan, "e": 1.0}.items():
        model[name].grad = torch.full((2,), gradient)
    for name in ("e", "f"):
        model[name].requires_grad_(False)
    found = seen(model, torch.optim.SGD(model.parameters(), lr=0.1), 2)
    assert found == {"a": "none", "b": "zeros", "c": "gradient", "d": "not finite", "e": "stepped although frozen",
                     "f": "frozen"}  # fmt: skip
    assert stepped_frozen(found) == ["e"]
    assert are_frozen(["e", "f"], found)
    assert not are_frozen(["a", "f"], found)
    assert why_still(["a"], found).startswith("no gradient arrives")
    assert why_still(["a", "b"], found) == ""


def test_gradients_without_autograd_are_the_trainers_own() -> None:
    assert stepped_frozen({"a": "stepped although frozen", "b": "frozen"}) == []


def test_the_rank_that_has_most_counts() -> None:
    watch = Gradients()
    records = [watch.record(0, rank, {}, set()) for rank in range(2)]
    records = [
        record._replace(data=data)
        for record, data in zip(records, (b'{"a": "zeros"}', b'{"a": "gradient"}'), strict=True)
    ]
    assert gradients_by_op(records) == {0: {"a": "gradient"}}


@pytest.mark.parametrize(
    ("seen", "scale", "told"), [({}, 1.0, True), ({"master": "gradient"}, 1.0, False), ({}, 2.0, False)]
)
def test_a_frozen_parameter_may_have_a_master_that_is_stepped(seen: OfParameters, scale: float, *, told: bool) -> None:
    """A copy in bf16 of a parameter of a module is no such thing: whoever syncs it does so on purpose."""
    master = torch.randn(6, generator=torch.Generator().manual_seed(0))
    half = (scale * master).bfloat16().view(torch.int16).numpy().tobytes()
    values = {("param", "w"): Value("bf16", (6,), half), ("setting", "group0.params"): Value("utf8", (6,), b"master"),
              ("param", "rank0.master"): Value("fp32", (6,), master.numpy().tobytes())}  # fmt: skip
    assert has_master("w", values, seen) is told


@pytest.mark.parametrize(
    ("first", "own", "told"),
    [
        ({"gate": "gradient", "w": "gradient"}, {"gate": "none", "w": "gradient"},
         "With ep=2 no gradient reaches gate and with ep=1 some other than zero come: look at what cuts the graph"),
        ({"gate": "zeros", "w": "zeros"}, {"gate": "gradient", "w": "gradient"},
         "With ep=1 all gradients are zeros of 2 parameters, such as gate, and with ep=2"),
        ({"gate": "none"}, {"gate": "none"}, ""), ({"gate": "gradient"}, {}, ""), ({}, {}, ""),
    ],
)  # fmt: skip
def test_a_gradient_that_reaches_a_parameter_in_one_way_alone(
    first: dict[str, str], own: dict[str, str], told: str
) -> None:
    found = reached_apart(first, own, ("ep=1", "ep=2"))
    assert told in found
    assert bool(told) == bool(found)


def test_why_each_of_several_parameters_stays() -> None:
    seen = {"a": "frozen", "b": "none", "d": "gradient"}
    assert why_each(["a"], seen) == "they are frozen (`requires_grad` is False)"
    assert why_each(["c"], seen) == "no param group of an optimizer that stepped has them"
    assert why_each(["a", "c"], seen) == (
        "they are frozen (`requires_grad` is False) (a); no param group of an optimizer that stepped has them (c)"
    )
    assert why_each(["a"], {}) == ""


def test_parameters_that_look_like_copies_of_those_without_gradients_are_told() -> None:
    originals, copies = ["q.0.weight", "q.0.bias"], ["loss.q_params.0_weight", "loss.q_params.0_bias"]
    seen = dict.fromkeys(originals, NONE) | dict.fromkeys(copies, UNSTEPPED) | {"v.weight": GRADIENT}
    assert why_each([*originals, *copies], seen).endswith(
        "if `loss.q_params` holds copies of `q`, the optimizer has the originals, and the loss goes through the copies"
    )
    seen["loss.q_params.1_bias"] = UNSTEPPED
    assert "copies" not in why_each([*originals, *copies, "loss.q_params.1_bias"], seen), "one more than originals"


def test_a_rank_with_several_modules_tells_the_others_all_the_same() -> None:
    asked = list[tuple[str, tuple[str, ...]]]()

    def alike(kind: str, paths: tuple[str, ...]) -> bool:
        asked.append((kind, paths))
        return False

    one, other = nn.Linear(2, 1), nn.Linear(2, 1)
    optimizers = {name: torch.optim.SGD(model.parameters()) for name, model in (("a", one), ("b", other))}
    list(State({"one": one, "other": other, **optimizers}, 0, 2, alike=alike).records(0))
    assert asked == [("modules", ("one", "other")), ("optimizers", ("a", "b"))]
