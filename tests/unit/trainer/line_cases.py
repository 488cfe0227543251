"""Modules of a trainer's own lines, and what is recorded while they run."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from shardproof.program import Op
from shardproof.scenario import Mesh
from shardproof.trainer.lines.statements import Moment
from shardproof.trainer.rank.ran import Ran


def written(folder: Path, source: str) -> ModuleType:
    """The module of a source, from a file of its own, `mine.py`."""
    file = folder / "mine.py"
    file.write_text(f"import torch\n{source.lstrip()}", "utf-8")
    spec = importlib.util.spec_from_file_location("mine", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def ran(call: Callable[[], Any], record: Ran | None = None, names: dict[int, str] | None = None) -> bytes:
    """What ran in a call, packed."""
    record = record or Ran()
    traced = sys.gettrace()
    sys.settrace(None)  # as of a measurement of coverage
    try:
        with record.watched():
            call()
    finally:
        sys.settrace(traced)
    return record.record(0, 0, names or {}).data


def step(iteration: int) -> Op:
    """A step of one rank."""
    return Op(iteration, "step", "", 0, Mesh(), iteration, 0, 0, -1)


def of_step(call: Callable[[], Any]) -> list[Moment]:
    """What ran in a call, as the first step of one rank."""
    return [Moment(step(0), {0: ran(call)})]
