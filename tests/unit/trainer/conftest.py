"""Fixtures of tests that register trainers."""

from __future__ import annotations

from pathlib import Path

import pytest
from shardproof.protocol import registry


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of a test's own, in which systems that it registers are known until it ends."""
    registry.all_systems()
    monkeypatch.setattr(registry, "_SYSTEMS", dict(registry._SYSTEMS))
    return tmp_path
