"""A laboratory whose warm servers have already imported the optimizers under question."""

from __future__ import annotations

import os
from collections.abc import Sequence

from shardproof.laboratory.laboratory import Laboratory
from shardproof.optimizers import system
from shardproof.optimizers.request import VARIABLE

COMPILERS = {"TORCHDYNAMO_DISABLE": "1"}
"""Code that asks for torch.compile runs as it is written: what a compiler makes of it may add up in another order for
every shape."""


def opened(modules: Sequence[str], jobs: int, deadline_s: float, python: str | None = None) -> Laboratory:
    """A laboratory, to be entered.

    Args:
        modules: what servers import before they fork. jobs, deadline_s, python: of `Laboratory`.
    """
    os.environ[VARIABLE] = ",".join(dict.fromkeys(modules))
    for name, value in COMPILERS.items():
        os.environ.setdefault(name, value)
    return Laboratory(jobs=jobs, deadline_s=deadline_s, plugins=[system.__name__], python=python, systems={system.NAME})
