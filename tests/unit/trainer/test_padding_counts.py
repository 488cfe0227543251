"""Targets that fill up rows and weigh as much as the others."""

from __future__ import annotations

import pytest
import torch
from shardproof.trainer.rank.inputs import padding_among
from shardproof.trainer.step.model_calls import Call, padding_counts
from torch.nn import functional

IGNORED = -100


def gradient_of(targets: list[list[int]]) -> torch.Tensor:
    """The gradient of a cross-entropy at logits of 6 classes."""
    rows = torch.tensor(targets)
    logits = torch.randn(*rows.shape, 6, generator=torch.Generator().manual_seed(5)).requires_grad_()
    functional.cross_entropy(logits.flatten(0, 1), rows.flatten(), ignore_index=IGNORED).backward()
    assert logits.grad is not None
    return logits.grad


PADDED = [[1, 2, 3, 4], [2, 0, 0, 0], [5, 1, 0, 0]]


def test_a_class_that_fills_up_rows_is_found_with_how_many_there_are() -> None:
    assert padding_among(gradient_of(PADDED)) == [0, 5, 12]


@pytest.mark.parametrize(
    "targets",
    [
        pytest.param([[1, 2, 3, 4], [2, IGNORED, IGNORED, IGNORED]], id="ignored"),
        pytest.param([[1, 2, 3, 4], [2, 3, 1, 5], [4, 1, 5, 5]], id="no filling"),
        pytest.param([[1, 0, 3, 4], [2, 0, 0, 0], [5, 1, 0, 0]], id="a class of its own"),
        pytest.param([[1, 2, 0, 0], [2, 3, 0, 0], [5, 1, 0, 0]], id="rows of one length"),
        pytest.param([[1, 2, 3, 0], [2, 3, 4, 0], [5, 1, 2, 4]], id="an end of each row"),
    ],
)
def test_what_is_no_padding_or_has_no_weight_is_not_found(targets: list[list[int]]) -> None:
    assert padding_among(gradient_of(targets)) == []


def test_padding_is_told_where_it_weighs_as_much_as_the_others() -> None:
    counted, masked = (Call((), weights, False, padded=(0, 5, 12)) for weights in ((0.5, 0.5), (0.5, 0.1)))
    assert padding_counts({1: [counted]}, 3).startswith(
        "in step 3 5 of the 12 targets on rank 1 are class 0 at the ends of rows, which nothing else is, and weigh"
    )
    assert padding_counts({0: [masked], 1: [Call((), (1.0,), False)]}, 3) == ""
