"""What a step works out for nothing, and loops over nothing."""

from __future__ import annotations

import ast
from functools import partial
from pathlib import Path

import pytest
import torch
from line_cases import of_step, ran, step, written
from shardproof.trainer.lines.statements import Moment
from shardproof.trainer.lines.unread import over_nothing, unread
from shardproof.trainer.rank.modules import said_of_weights
from shardproof.trainer.rank.unread import made_in
from torch import nn
from torch.nn.utils import prune

POLICY = """
def step(adv, valid, recurrent, centre=True):
    kept = adv[valid]
    if centre:
        kept = kept - kept.mean()
    if recurrent:
        loss = (adv * valid).sum()
    else:
        loss = kept.sum()
    return loss
"""


def test_an_option_that_is_applied_to_what_the_branch_does_not_read_is_told(tmp_path: Path) -> None:
    mine, adv, valid = written(tmp_path, POLICY), torch.ones(3), torch.tensor([True, True, False])
    assert unread(of_step(partial(mine.step, adv, valid, True))) == (
        "mine.py:5 (`kept = kept - kept.mean()`) makes `kept` in every step, and nothing that runs reads it: "
        "mine.py:9, which reads it, is in a branch that no step takes"
    )
    assert unread(of_step(partial(mine.step, adv, valid, False))) == ""


def test_what_is_read_in_one_of_the_steps_is_not_told(tmp_path: Path) -> None:
    mine, adv, valid = written(tmp_path, POLICY), torch.ones(3), torch.tensor([True, True, False])
    rows = [ran(partial(mine.step, adv, valid, recurrent)) for recurrent in (True, False)]
    assert unread([Moment(step(n), {0: row}) for n, row in enumerate(rows)]) == ""


@pytest.mark.parametrize(
    "body",
    [
        pytest.param("    norm = nn_.clip_grad_norm_([x], 1.0)", id="done for what it does to others"),
        pytest.param("    old = x + 1\n    if x.numel() > 99:\n        print(old)", id="read now and then"),
        pytest.param("    old = x + 1\n    return (lambda: old)()", id="read by a lambda"),
        pytest.param("    old = x + 1\n    def f():\n        return old\n    return f()", id="read by a closure"),
        pytest.param("    old = x + 1\n    return locals()", id="all names are looked up"),
        pytest.param("    global old\n    old = x + 1", id="a name of the module"),
        pytest.param("    old, new = x + 1, x\n    return new", id="one of several"),
        pytest.param("    _old = x + 1", id="named as not to be read"),
        pytest.param("    number = x.numel()", id="a number"),
        pytest.param("    for one in range(2):\n        if one:\n            print(old)\n        old = x + one",
                     id="read in the next turn"),
    ],
)  # fmt: skip
def test_what_may_be_read_is_not_told(tmp_path: Path, body: str) -> None:
    mine = written(tmp_path, f"from torch.nn import utils as nn_\n\ndef step(x):\n{body}\n    x = None\n")
    assert unread(of_step(partial(mine.step, torch.ones(3, requires_grad=True)))) == ""


def test_a_tensor_that_no_line_reads_is_told(tmp_path: Path) -> None:
    mine = written(tmp_path, "def step(x, mask):\n    mask = mask.logical_not()\n    return x.sum()\n")
    assert unread(of_step(partial(mine.step, torch.ones(2), torch.ones(2)))).endswith("nothing that runs reads it")


def test_branches_that_may_be_taken_instead_are_those_of_all_ifs_around() -> None:
    tree = ast.parse(
        "def f(x, a, b):\n    y = x\n    if a:\n        if b:\n            g(y)\n        else:\n            g(x)\n"
    )
    assert made_in(tree)[2].readers == ((5, ((7, 7),)),)


def test_what_stands_behind_an_early_return_is_a_branch_too() -> None:
    tree = ast.parse("def f(x, a):\n    y = x\n    if a:\n        return x\n    z = 1\n    return y + z\n")
    assert made_in(tree)[2].readers == ((6, ((4, 4),)),)


LOOP = """
def step(actor, target):
    for p, t in zip(actor.parameters(), target.parameters()):
        t.data.copy_(p.data)
    for one in []:
        print(one)
"""


def test_a_loop_over_no_parameters_is_told_and_another_is_not(tmp_path: Path) -> None:
    mine, actor = written(tmp_path, LOOP), nn.Linear(2, 2)
    assert over_nothing(of_step(partial(mine.step, actor, nn.Sequential()))) == (
        "mine.py:3 (`for p, t in zip(actor.parameters(), target.parameters()):`) goes over nothing in every step, so "
        "that what stands in it never runs"
    )
    assert over_nothing(of_step(partial(mine.step, actor, nn.Linear(2, 2)))) == ""
    assert over_nothing([]) == ""


def test_weights_that_are_plain_tensors_are_told_and_those_that_torch_puts_there_are_not() -> None:
    plain, pruned = nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 2)
    prune.identity(pruned, "weight")
    for name in ("weight", "bias"):
        value = getattr(plain[0], name).detach().clone()
        del plain[0]._parameters[name]
        setattr(plain[0], name, value)
    found = said_of_weights({"target": plain, "target.0": plain[0], "pruned": pruned})
    assert found == {
        "target": "0.weight, 0.bias are plain tensors, and no parameter or buffer: no state_dict has them, and a loop "
        "over parameters() does not meet them"
    }
