"""Texts of trainer files for tests that never run them, and their registration as systems."""

from __future__ import annotations

from pathlib import Path

from shardproof.trainer.described import Described
from shardproof.trainer.system import register

STEPWISE = """
    def build(self, cell): ...
    def step(self, index): ...
    def save(self, folder): ...
    def load(self, folder): ...
"""

FIT = """
    def fit(self, cell, until, folder, resume): ...
"""


def text_of_trainer(data: str = "", methods: str = STEPWISE, name: str = "Mine", base: str = "Trainer") -> str:
    """The text of a class with these lines of data, separated by line breaks, and these methods."""
    lines = "".join(f"    {line}\n" for line in data.splitlines())
    return f"class {name}({base}):\n    '''One of tests.'''\n{lines}{methods}"


def registered(folder: Path, data: str = "", methods: str = STEPWISE) -> Described:
    """A trainer in `folder/mine.py` that the registry knows from here on."""
    file = folder / "mine.py"
    file.write_text(text_of_trainer(data, methods), "utf-8")
    found = register(str(file)).trainer
    assert found is not None
    return found
