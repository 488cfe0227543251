"""Statements that a backward runs again, as under a checkpoint of activations."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from line_cases import ran, written
from shardproof.trainer.lines.run_again import run_again

SOURCE = """
from torch.utils.checkpoint import checkpoint

class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.count = torch.nn.Parameter(torch.ones(2)), torch.zeros(())

    def forward(self, x):
        self.count.add_(1)
        return (x * self.weight).exp()

def step(layer, x, recompute):
    for _ in range(2):
        out = checkpoint(layer, x, use_reentrant=False) if recompute else layer(x)
        out.sum().backward()
"""
NAMES = "with recompute=off", "with recompute=on"


def test_what_a_backward_runs_again_is_told(tmp_path: Path) -> None:
    mine = written(tmp_path, SOURCE)
    ways = [{0: ran(partial(mine.step, mine.Layer(), torch.ones(2), on))} for on in (False, True)]
    place = next(("mine.py", at + 2) for at, line in enumerate(SOURCE.split("\n")[1:]) if "self.count.add_" in line)
    assert run_again(ways, [place, place], NAMES) == (
        " Of the 4 times that it runs with recompute=on, it runs twice inside of mine.py:16 (`out.sum().backward()`), "
        "as where a backward computes a forward again: what it adds to counts that once more."
    )
    assert run_again([ways[0], ways[0]], [place, place], NAMES) == ""
    assert run_again([{}, {}], [place, place], NAMES) == ""


OWN = """
class Engine:
    def backward(self, loss):
        loss.backward()
        self.reduce()

    def reduce(self):
        pass

def step(engine, x, times):
    for _ in range(times):
        engine.backward((x * 2).sum())
"""


def test_a_backward_of_ones_own_runs_nothing_again(tmp_path: Path) -> None:
    mine = written(tmp_path, OWN)
    x = torch.ones(2, requires_grad=True)
    ways = [{0: ran(partial(mine.step, mine.Engine(), x, times))} for times in (1, 4)]
    assert run_again(ways, [("mine.py", 5)] * 2, NAMES) == ""
