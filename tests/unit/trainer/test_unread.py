"""What a step works out for nothing, and loops over nothing."""

from __future__ import annotations

import ast
from functools import partial
from pathlib import Path

import pytest
import torch
from line_cases import of_step, ran, step, written
from shardproof.trainer.lines.statements import Moment
from shardproof.trainer.lines.unread import dropped, over_nothing, unread, unread_settings
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


@pytest.mark.parametrize(
    ("line", "told"),
    [
        pytest.param("x.clamp(0)", "leaves `x` as it is, and nothing takes what it comes to", id="a method"),
        pytest.param("F.relu(x)", "runs in every step, and nothing takes what it comes to", id="a function"),
        pytest.param("torch.nn.functional.relu(x)", "runs in every step", id="by its whole name"),
        pytest.param("relu(x)", "runs in every step", id="imported by its name"),
        pytest.param("Twice.apply(x)", "runs in every step", id="a function of autograd"),
        pytest.param("x.clamp_(0)", "", id="in place"),
        pytest.param("F.relu(x, inplace=True)", "", id="in place by an argument"),
        pytest.param("Clip().clamp(x)", "", id="a method of something made there"),
        pytest.param("clip.clamp(x)", "", id="a method of another object"),
        pytest.param("y = x.clamp(0)\n    y.sum()", "", id="taken"),
        pytest.param("F.relu(y).sum().backward()", "", id="of what a function came to"),
        pytest.param("layer.apply(print)", "", id="a method of a module"),
    ],
)
def test_a_call_whose_result_nobody_takes_is_told(tmp_path: Path, line: str, told: str) -> None:
    source = f"""
import torch.nn.functional as F
from torch.nn.functional import relu

class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

class Clip:
    def clamp(self, x):
        x.data.clamp_(0)

clip, layer = Clip(), torch.nn.Linear(1, 1)

def step(x):
    y = torch.ones(2, requires_grad=True)
    {line}
"""
    found = dropped(of_step(partial(written(tmp_path, source).step, torch.ones(2, requires_grad=False))))
    assert told in found
    assert bool(found) is bool(told)


SETTINGS = """
from types import SimpleNamespace

from shardproof.trainer import Trainer

class Net(torch.nn.Module):
    def __init__(self, cfg, dim, scale):
        super().__init__()
        self.frozen = cfg.frozen
        self.dim = dim
        self.head = torch.nn.Linear(dim, cfg.classes)
        self.rate = 0.5
        self.scale = scale
        self.turns = 0

    def forward(self, x):
        self.turns = self.turns + 1
        return self.head(x) * self.scale

class Mine(Trainer):
    def build(self, cell):
        self.local = ("place",)
        self.net = Net(SimpleNamespace(frozen=True, classes=2), 3, 0.25)
"""


def test_a_setting_that_no_line_reads_is_told(tmp_path: Path) -> None:
    told = unread_settings(of_step(partial(written(tmp_path, SETTINGS).Mine().build, None)))
    assert told == (
        "mine.py:9 (`self.frozen = cfg.frozen`), mine.py:12 (`self.rate = 0.5`) give settings that no line of your "
        "own files reads (look for `.frozen`), so that they have no effect"
    )


@pytest.mark.parametrize("more", ["    print(vars(self))", "    getattr(self, 'frozen'), self.rate"])
def test_what_may_be_read_is_no_unread_setting(tmp_path: Path, more: str) -> None:
    mine = written(tmp_path, f"{SETTINGS}\n    def step(self, index):\n    {more}\n")
    assert unread_settings(of_step(partial(mine.Mine().build, None))) == ""
