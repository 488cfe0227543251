"""The trainers that are shipped can be read, and name releases to install."""

from __future__ import annotations

import pytest
from shardproof.trainer.described import described

from tests.paths import ROOT

SHIPPED = sorted((ROOT / "scenarios/trainers").glob("*.py"))


def test_there_are_some() -> None:
    assert SHIPPED


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.stem)
def test_a_shipped_trainer_can_be_read(file: object) -> None:
    found = described(str(file))
    assert found.axes
    assert all("==" in text for text in found.requires)
