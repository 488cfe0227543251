"""What a loss makes of each sample in two ways, and how ranks record it."""

from __future__ import annotations

import json

import pytest
import torch
from shardproof.observe.record import whole
from shardproof.trainer.arms import GIVEN
from shardproof.trainer.rank.inputs import Inputs
from shardproof.trainer.step.samples import Sample, Samples, samples_by_op, weighed_apart, zeroed_before

WAYS = "micro=4", "micro=2"


def way(*gradients: float | None, calls: int = 1) -> Samples:
    """Samples of one rank, as many in each call."""
    each = len(gradients) // calls
    return {f"s{n}": Sample(0, n // each, gradient) for n, gradient in enumerate(gradients)}


@pytest.mark.parametrize(
    ("one", "other", "told"),
    [
        (way(1, 2, -3, 4), way(1, 2, -3, 4, calls=2), ""),
        (way(1, 2, -3, 4), way(0.5, 1, -1.5, 2, calls=2),
         "The gradient that the loss hands to the model's output is with micro=2 0.5 times that with micro=4, for"),
        (way(1, 2, -3, 4), way(-1, -2, 3, -4), "is with micro=2 -1 times that with micro=4"),
        (way(1, 2, -3, 4), way(3, 6, -1.5, 2, calls=2),
         "that with micro=4 3 times in call 1 on rank 0, 0.5 times in call 2 on rank 0. So each call's loss is scaled"),
        (way(1, 2, -3, 4), way(3, 7, -1.5, 2, calls=2), ""),
        (way(1, 2, -3, 4), way(1, 2, None, None, calls=2),
         "With micro=2 no gradient comes back to 2 of 4 samples, and with micro=4 it does"),
        (way(None, None), way(None, None), ""),
        (way(1, 2), {}, ""),
    ],
)  # fmt: skip
def test_samples_that_two_ways_weigh_otherwise(one: Samples, other: Samples, told: str) -> None:
    found = weighed_apart(one, other, WAYS)
    assert told in found
    assert bool(told) == bool(found)


def _recorded(inputs: Inputs) -> Samples:
    return samples_by_op([inputs.record(3, 0)])[3]


def test_a_rank_keeps_the_gradient_of_each_sample_at_the_models_output() -> None:
    inputs, model = Inputs(), torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2))
    batch = torch.randn(4, 3)
    found = []
    for scale in (1.0, 0.25):
        with inputs.watched():
            for part in batch.chunk(2):
                (model(part).square().sum() * scale).backward()
        found.append(_recorded(inputs))
    assert len(found[0]) == 4
    assert {sample.call for sample in found[0].values()} == {0, 1}
    assert "0.25 times" in weighed_apart(found[0], found[1], WAYS)


def test_a_sample_without_a_backward_has_no_gradient_and_one_that_comes_twice_is_left_out() -> None:
    inputs, model = Inputs(), torch.nn.Linear(3, 2)
    rows = torch.tensor([[1.0, 2, 3], [1, 2, 3], [4, 5, 6]])
    with inputs.watched():
        model(rows)
    assert [sample.gradient for sample in _recorded(inputs).values()] == [None]


def test_a_loss_as_output_has_no_row_for_each_sample() -> None:
    class Whole(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(3, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x).sum()

    inputs = Inputs()
    with inputs.watched():
        Whole()(torch.ones(2, 3) * torch.tensor([[1.0], [2.0]])).backward()
    assert {sample.gradient for sample in _recorded(inputs).values()} == {None}


def test_what_is_recorded_has_a_digest_the_rows_and_each_sample() -> None:
    data = json.dumps([["d", 2, ["a", "b"], [1.0, 2.0], "loop.py:3"], ["e", 1, ["a"], [], ""]]).encode()
    record = whole(1, 0, GIVEN, "", "utf8", (len(data),), data)
    assert samples_by_op([record]) == {1: {"b": Sample(0, 0, 2.0, "loop.py:3")}}


@pytest.mark.parametrize("zeroes", ["optimizer", "model"])
def test_gradients_that_are_set_to_zero_before_a_step_are_told_with_the_line(zeroes: str) -> None:
    inputs, model = Inputs(), torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    batch, found = torch.randn(4, 3), []
    for loses in (False, True):
        with inputs.watched():
            optimizer.zero_grad()
            for part in batch.chunk(2):
                model(part).square().sum().backward()
                if loses and part is not batch:
                    {"optimizer": optimizer, "model": model}[zeroes].zero_grad()
                    loses = False
            with torch.no_grad():
                model(torch.ones(7, 3))  # a validation is none of the data
            optimizer.step()
            optimizer.zero_grad()
        found.append(_recorded(inputs))
    assert len(found[0]) == len(found[1]) == 4
    told = weighed_apart(found[0], found[1], WAYS)
    assert told.startswith(
        "With micro=2 what the backward made of 2 of 4 samples is set to zero before an optimizer steps"
    )
    assert "(test_samples.py:" in told
    assert zeroed_before(found[0], 0) == ""
    assert "of 2 of 4 samples of step 0 is set to zero" in zeroed_before(found[1], 0)
    assert torch.optim.Optimizer.zero_grad.__module__ == "torch.optim.optimizer"


def test_nothing_is_said_of_zeroes_where_no_optimizer_of_torch_steps() -> None:
    inputs, model = Inputs(), torch.nn.Linear(3, 2)
    with inputs.watched():
        model(torch.randn(4, 3)).square().sum().backward()
        model.zero_grad()
    assert {sample.zeroed for sample in _recorded(inputs).values()} == {""}
