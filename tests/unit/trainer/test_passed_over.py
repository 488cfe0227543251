"""Parameters that no line changes, in a step in which lines change others."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from line_cases import ran, step, written
from shardproof.trainer.judge.trains import _untouched
from shardproof.trainer.rank.ran import Ran
from torch import nn

STEP = "def step(a, b):\n    a.data.add_(1)\n    b.data.add_(1)\n    b.data.sub_(1)\n"


@pytest.mark.parametrize(("names", "untouched"), [(["c"], True), (["a"], False), (["b", "c"], False)])
def test_what_a_line_changes_and_another_puts_back_is_not_passed_over(
    tmp_path: Path, names: list[str], *, untouched: bool
) -> None:
    parameters = {name: nn.Parameter(torch.ones(2)) for name in "abc"}
    held = {id(one): (lambda one=one: one) for one in parameters.values()}
    record = Ran(lambda: held)
    call = partial(written(tmp_path, STEP).step, parameters["a"], parameters["b"])
    data = ran(call, record, {id(one): name for name, one in parameters.items()})
    judging: Any = SimpleNamespace(ran={0: {0: data}}, whole=SimpleNamespace(ops=[step(0)]))
    assert _untouched(judging, names) is untouched
