"""Tensors that last beside parameters, and the lines that write them."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from line_cases import ran, written
from shardproof.trainer.lines.lines_of_ranks import written_otherwise
from shardproof.trainer.lines.statements import LASTING, touched
from shardproof.trainer.rank.found import State
from shardproof.trainer.rank.lasting import lasting
from shardproof.trainer.rank.ran import Ran
from torch import nn

SOURCE = """
def step(trainer, parts):
    for _ in range(parts):
        trainer.average.lerp_(trainer.model.weight.detach(), 0.5)
        trainer.model(torch.ones(3, 2)).sum().backward()
    trainer.optimizer.step()
"""


def trainer() -> SimpleNamespace:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    return SimpleNamespace(model=model, optimizer=optimizer, average=torch.zeros(2, 2))


def step(folder: Path, parts: int) -> bytes:
    mine, state = written(folder, SOURCE), trainer()
    found = State(vars(state), 0, 1)
    record = Ran()
    record.lasting.tensors = lasting(found)
    return ran(partial(mine.step, state, parts), record)


def test_lines_that_write_an_average_or_moments_are_told(tmp_path: Path) -> None:
    lines: dict[str, Any] = {touch.place: touch.done.get(LASTING) for touch in touched(step(tmp_path, 2))}
    assert lines == {
        "mine.py:4 (`trainer.average.lerp_(trainer.model.weight.detach(), 0.5)`)": ["average", "average"],
        "mine.py:6 (`trainer.optimizer.step()`)": [
            "exp_avg of weight", "exp_avg_sq of weight", "exp_avg of bias", "exp_avg_sq of bias",
        ],
    }  # fmt: skip


def test_how_often_a_line_writes_one_is_told_of_two_ways(tmp_path: Path) -> None:
    said = written_otherwise(step(tmp_path, 1), step(tmp_path, 4), ["average"], ("with n=1", "with n=4"))
    assert said == (
        "In this step, on rank 0, average is written by mine.py:4 (`trainer.average.lerp_(trainer.model.weight"
        ".detach(), 0.5)`), once with n=1 and 4 times with n=4."
    )


def test_what_an_object_gives_as_its_state_is_looked_at(tmp_path: Path) -> None:
    class Engine:
        def __init__(self) -> None:
            self.momentum = [torch.zeros(3)]

        def state_dict(self) -> dict[str, Any]:
            return {"momentum": self.momentum}

    engine = Engine()
    found = State({"engine": engine}, 0, 1)
    (name,) = lasting(found)()
    assert name == "engine.momentum.0"
    assert lasting(found)()[name] is engine.momentum[0]


def test_of_many_or_large_tensors_none_is_looked_at(tmp_path: Path) -> None:
    mine = written(tmp_path, "\ndef step(one):\n    one.add_(1)\n    pass\n")
    for tensors, looked_at in (
        ([torch.ones(8)], True),
        ([torch.ones(1)] * 201, False),
        ([torch.ones(1 << 18, 2)], False),
    ):
        record, held = Ran(), {str(number): one for number, one in enumerate(tensors)}
        record.lasting.tensors = lambda held=held: held  # type: ignore[misc]
        data = ran(partial(mine.step, tensors[0]), record)
        assert any(LASTING in touch.done for touch in touched(data)) is looked_at
