"""Fixtures by which whole files of tests compare all that is said in them with a record (`tests/recorded_texts.py`)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import recorded_texts


@pytest.fixture
def explained_word_for_word(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every explanation that is made in the test, in order: its text, and the evidence of the first difference."""
    from shardproof.diagnosis.rules import engine

    said: list[str] = []
    ranked = engine._of_operation

    def recorded(*given: Any) -> Any:
        found = ranked(*given)
        for explanation in found:
            said.append(f"{explanation.mechanism} ({explanation.confidence}) {explanation.text}")
            said.append(f"    {json.dumps(explanation.evidence[0], sort_keys=True)}")
        return found

    monkeypatch.setattr(engine, "_of_operation", recorded)
    yield
    recorded_texts.check(recorded_texts.EXPLANATIONS, name_of(request), said)


@pytest.fixture
def refused_word_for_word(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[None]:
    """Every error that a reader raises in the test, in order."""
    from shardproof.readers.errors import CheckpointError

    said: list[str] = []

    def recorded(error: CheckpointError, text: str) -> None:
        Exception.__init__(error, text)
        told = text.replace(str(tmp_path), "TMP")
        if ".distcp" in told:  # how long an item is depends on the release of torch that wrote it
            told = re.sub(r"\b\d{4,}\b", "N", told)
        if told not in said[-1:]:
            said.append(told)

    monkeypatch.setattr(CheckpointError, "__init__", recorded)
    yield
    recorded_texts.check(recorded_texts.REFUSALS, name_of(request), said)


def name_of(request: pytest.FixtureRequest) -> str:
    return f"{request.path.name}::{request.node.name}"
