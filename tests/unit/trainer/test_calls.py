"""The calls of modules: what is kept of a step, and where two ways part.

*Verifies*: order, paths and digests in one process, with activation checkpoints and with `torch.compile`; sentences.
*Does not verify*: outputs that are DTensors, which trainers of FSDP2 have.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from shardproof.trainer.rank.calls import Calls
from shardproof.trainer.step.calls import Called, calls_by_op, first_not_finite, recomputed_apart, where_they_part
from torch import nn
from torch.utils.checkpoint import checkpoint

NAMES = ("With how=a", "With how=b")


class Odd(nn.Module):
    """Doubles its input, but for a factor that is another one in each call."""

    def __init__(self, *factors: float) -> None:
        super().__init__()
        self.factors = list(factors)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 * (self.factors.pop(0) if self.factors else 1)


def model_of(*factors: float) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.Sequential(Odd(*factors)), nn.Linear(3, 3))


def called(
    model: nn.Module, step: Callable[[nn.Module], torch.Tensor] = lambda model: model(torch.ones(2, 3))
) -> Called:
    calls = Calls()
    with calls.watched():
        step(model).sum().backward()
    return calls_by_op([calls.record(4, 0)])[4][0]


def told(first: Called, own: Called) -> str:
    return where_they_part({0: first}, {0: own}, NAMES)


def recomputed(model: nn.Module) -> torch.Tensor:
    out: torch.Tensor = checkpoint(model, torch.ones(2, 3), use_reentrant=False)
    return out


def test_the_first_module_that_comes_to_something_else_is_named() -> None:
    assert told(called(model_of()), called(model_of(1.5))) == (
        "The first module whose output differs is 1.0 (Odd), on rank 0, and it was given the same."
    )


def test_data_that_differ_are_told_from_a_module_that_does() -> None:
    one, other = called(model_of()), called(model_of(), lambda model: model(torch.full((2, 3), 2.0)))
    assert told(one, other) == (
        "The first module whose output differs is 0 (Linear), on rank 0, and what it was given differs already: look "
        "at the data, and at what is computed between modules."
    )


def test_nothing_is_said_of_what_a_module_writes_to() -> None:
    """Its input is its output."""
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True))
    assert [bool(call.given) for call in called(model).forward] == [True, False, True]


def test_equal_outputs_lead_to_the_backward() -> None:
    assert "the outputs of all 5 calls of modules are equal: look at the backward" in told(
        called(model_of()), called(model_of())
    )


def test_equal_outputs_lead_nowhere_where_no_optimizer_steps_what_differs() -> None:
    ways = [{0: called(model_of())} for _ in range(2)]
    assert where_they_part(ways[0], ways[1], NAMES, stepped=False) == (
        "In this step the outputs of all 5 calls of modules are equal, and no optimizer had a gradient of what differs."
    )


def test_outputs_may_be_equal_up_to_rounding() -> None:
    ways = [{0: called(model_of(factor))} for factor in (1, 1 + 1e-6, 1.5)]
    assert where_they_part(ways[0], ways[1], NAMES).startswith("The first module whose output differs is 1.0 (Odd)")
    assert "are equal up to rounding: look at the backward" in where_they_part(ways[0], ways[1], NAMES, 2.0**-10)
    assert "output differs is 1.0 (Odd), on rank 0" in where_they_part(ways[0], ways[2], NAMES, 2.0**-10)


def test_pieces_of_another_size_are_not_held_against_each_other() -> None:
    one = called(model_of())
    other = Called(tuple(call._replace(digest="x", sketch=[1.0, 2.0, 3.0]) for call in one.forward), ())
    assert told(one, other) == ""


def test_the_first_output_that_is_not_finite_is_named() -> None:
    assert first_not_finite({0: called(model_of(float("nan")))}) == "1.0 (Odd)"
    assert first_not_finite({0: called(model_of())}) == ""


def test_what_a_backward_computes_anew_is_held_against_the_forward() -> None:
    same, other = called(model_of(1, 1), recomputed), called(model_of(1, 1.5), recomputed)
    assert [call.path for call in same.anew][:2] == ["0", "1.0"]
    plain = {0: called(model_of())}
    for near in (0.0, 1e-3):
        said = recomputed_apart(plain, {0: other}, NAMES, near)
        assert said.startswith("With how=b the backward computes 1.0 (Odd) anew, and comes to another output")
        assert recomputed_apart(plain, {0: same}, NAMES, near) == ""


def test_what_cannot_be_read_or_has_other_modules_says_nothing() -> None:
    one = called(model_of())
    assert told(one, Called(one.forward[:2], ())) == ""
    unread = Called(tuple(call._replace(digest="") for call in one.forward), ())
    assert told(unread, called(model_of(1.5))) == ""
    assert told(Called((), ()), Called((), ())) == ""
    assert told(one, called(nn.Sequential(nn.ReLU(), nn.Linear(3, 3)))) == ""


def test_nothing_is_kept_outside_and_hooks_are_gone_after_an_error() -> None:
    calls, model = Calls(), model_of()
    with pytest.raises(ValueError, match="stop"), calls.watched():
        raise ValueError("stop")
    model(torch.ones(2, 3))
    assert calls.forward == []


def test_a_compiled_graph_is_the_same_with_and_without() -> None:
    graphs: list[int] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        graphs.append(len(graph.graph.nodes))
        return graph.forward

    for watched in (False, True):
        torch._dynamo.reset()
        compiled = torch.compile(model_of(), backend=backend)
        _ = called(compiled) if watched else compiled(torch.ones(2, 3))
    assert graphs[0] == graphs[1]
    assert len(graphs) == 2


def test_an_output_is_looked_at_behind_the_hooks_of_its_module() -> None:
    """As of tensor parallelism, where a hook adds up what each rank has of the output."""

    def with_hook(factor: float) -> nn.Module:
        model = model_of(factor)
        model[1][0].register_forward_hook(lambda module, args, output: output / factor)
        return model

    assert called(model_of()).forward[1].digest == called(with_hook(2.0)).forward[1].digest
    model = with_hook(2.0)
    called(model)
    assert len(model[1][0]._forward_hooks) == 1, "what was put there for a look is gone"
