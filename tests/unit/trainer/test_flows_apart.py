"""The first gradient of a backward that arrives otherwise at a value in two ways to compute the same."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path

import pytest
import torch
from line_cases import ran, written
from shardproof.trainer.lines.flows_apart import flow_apart
from shardproof.trainer.lines.held import CLOSE

SOURCE = """
def train(weight, rows, way, parts=1, share=1.0):
    for part in rows.chunk(parts):
        hidden = part @ weight
        target = hidden
        if way == "cut":
            target = hidden.detach()
        if way == "scaled":
            target = hidden * 0.5 + hidden.detach() * 0.5
        score = target * 2
        loss = (score ** 2).mean() * share
        loss.backward()

def changes(weight):
    hidden = weight * 2
    hidden.mul_(3)
    score = hidden.exp()
    score.sum().backward()
"""

NAMES = "with n=1", "with n=2"


def _of(folder: Path, way: str, parts: int = 1, share: float = 1.0) -> dict[int, bytes]:
    weight = torch.arange(1.0, 5.0).reshape(2, 2).requires_grad_()
    rows = torch.arange(8.0).reshape(4, 2)
    return {0: ran(partial(written(folder, SOURCE).train, weight, rows, way, parts, share))}


def test_a_gradient_that_is_let_through_in_one_way_alone_is_told(tmp_path: Path) -> None:
    said = flow_apart(_of(tmp_path, ""), _of(tmp_path, "scaled"), NAMES, CLOSE)
    assert said == (
        "In the backward, gradients are alike until that of `score`, which mine.py:10 (`score = target * 2`) made, "
        "and the first that is not arrives at `hidden`, which mine.py:4 (`hidden = part @ weight`) made: it is 0.5 "
        "times as long with n=2 as with n=1. Look at what lies between these two. These lines read it in one way "
        "alone: mine.py:9 (`target = hidden * 0.5 + hidden.detach() * 0.5`) with n=2."
    )


def test_a_gradient_that_never_arrives_is_told(tmp_path: Path) -> None:
    source = SOURCE.replace("score = target * 2", "score = target * 2 + part @ weight * 0")
    module = written(tmp_path, source)
    rows, ways = torch.arange(8.0).reshape(4, 2), list[dict[int, bytes]]()
    for way in ("", "cut"):
        weight = torch.arange(1.0, 5.0).reshape(2, 2).requires_grad_()
        ways.append({0: ran(partial(module.train, weight, rows, way))})
    said = flow_apart(ways[0], ways[1], NAMES, CLOSE)
    assert "arrives at `hidden`, which mine.py:4 (`hidden = part @ weight`) made: none arrives with n=2." in said
    assert "made: none arrives with n=1." in flow_apart(ways[1], ways[0], NAMES, CLOSE)


@pytest.mark.parametrize(("parts", "share"), [(1, 1.0), (2, 0.5), (2, 1.0)])
def test_micro_batches_are_alike(tmp_path: Path, parts: int, share: float) -> None:
    assert flow_apart(_of(tmp_path, ""), _of(tmp_path, "", parts, share), NAMES, CLOSE) == ""


def test_gradients_of_which_none_is_alike_are_not_told(tmp_path: Path) -> None:
    assert flow_apart(_of(tmp_path, ""), _of(tmp_path, "", 1, 3.0), NAMES, CLOSE) == ""


def test_a_tensor_that_is_looked_at_is_saved_without_a_warning(tmp_path: Path) -> None:
    module = written(tmp_path, "def made(weight):\n    hidden = weight * 2\n    return hidden\n")
    found = list[torch.Tensor]()
    ran(lambda: found.append(module.made(torch.ones(3, requires_grad=True))))
    assert found[0]._backward_hooks
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.save(found[0], tmp_path / "hidden.pt")


def test_a_backward_goes_on_as_it_did(tmp_path: Path) -> None:
    changes = written(tmp_path, SOURCE).changes
    watched, alone = (torch.ones(3, requires_grad=True) for _ in range(2))
    ran(partial(changes, watched))
    changes(alone)
    assert watched.grad is not None
    assert alone.grad is not None
    assert torch.equal(watched.grad, alone.grad)


def test_views_that_are_written_in_place_have_the_gradients_that_they_had(tmp_path: Path) -> None:
    source = """
def changes(weight):
    hidden = weight * 2
    view = hidden[0]
    view.mul_(3)
    hidden[1].add_(view)
    hidden.mul_(2)
    total = (hidden * view.sum()).sum()
    total.backward()
"""
    changes = written(tmp_path, source).changes
    watched, alone = (torch.arange(1.0, 5.0).reshape(2, 2).requires_grad_() for _ in range(2))
    ran(partial(changes, watched))
    changes(alone)
    assert watched.grad is not None
    assert alone.grad is not None
    assert torch.equal(watched.grad, alone.grad)


SUMS_TO_ZERO = """
def step(weight, rows, parts):
    for part in rows.chunk(parts):
        scores = (part @ weight).view(-1, 2, 3)
        found = part * weight.sum()
        loss = torch.logsumexp(scores, -1).sum() - scores[..., 0].sum() + found.sum()
        (loss / parts).backward()
"""


def test_what_is_zero_but_for_rounding_is_not_told(tmp_path: Path) -> None:
    """The gradient of a softmax, of which an outline has sums over the classes."""
    mine = written(tmp_path, SUMS_TO_ZERO)
    ways = []
    for parts in (1, 3):
        weight = torch.randn(4, 6, generator=torch.Generator().manual_seed(0)).requires_grad_()
        rows = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
        ways.append({0: ran(partial(mine.step, weight, rows, parts))})
    assert flow_apart(ways[0], ways[1], ("with parts=1", "with parts=3"), CLOSE) == ""
