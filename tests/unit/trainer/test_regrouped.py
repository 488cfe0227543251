"""Settings of param groups that a statement changes, beside the learning rate."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from line_cases import ran, written
from shardproof.trainer.lines.lines_of_state import of_setting
from shardproof.trainer.lines.statements import touched
from shardproof.trainer.rank.ran import Ran
from torch.optim import SGD

SOURCE = """
from torch.optim.lr_scheduler import LambdaLR

def load(optimizer, again):
    if again:
        optimizer.param_groups[0]["initial_lr"] = 0.5
    schedule = LambdaLR(optimizer, lambda step: 0.5 ** step)
    optimizer.param_groups[0]["weight_decay"] = 0.1
"""


def loaded(folder: Path, *, again: bool) -> bytes:
    mine, optimizer, record = written(folder, SOURCE), SGD([torch.ones(2, requires_grad=True)], lr=0.25), Ran()
    record.groups.know([optimizer])
    return ran(partial(mine.load, optimizer, again), record)


def test_what_a_schedule_keeps_in_a_group_is_told_with_its_line(tmp_path: Path) -> None:
    data = loaded(tmp_path, again=False)
    assert of_setting({0: data}, dict.fromkeys(["group0.initial_lr"], ""), []) == (
        "In `load`, of what is wrong after it: mine.py:7 (`schedule = LambdaLR(optimizer, lambda step: 0.5 ** step)`) "
        "sets initial_lr, which was not there, to 0.25."
    )
    assert [change for touch in touched(data) for change in touch.regrouped] == [
        ["", "initial_lr", "", "0.25"],
        ["", "weight_decay", "0", "0.1"],
    ]


def test_what_was_there_is_told_with_its_value(tmp_path: Path) -> None:
    said = of_setting({0: loaded(tmp_path, again=True)}, dict.fromkeys(["group0.initial_lr"], ""), [])
    assert 'mine.py:6 (`optimizer.param_groups[0]["initial_lr"] = 0.5`) sets initial_lr, which was not there,' in said
    assert "mine.py:7" not in said
