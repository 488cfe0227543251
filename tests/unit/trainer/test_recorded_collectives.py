"""What a rank records of the collectives in torch's flight recorder, and that it says nothing where there are none."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest
import torch
from shardproof.trainer.rank.collectives import Collectives


def entry(number: int, kind: str = "gloo:all_reduce") -> dict[str, Any]:
    return {"record_id": number, "is_p2p": False, "profiling_name": kind, "process_group": ("0", ""),
            "input_sizes": [[2, 3], [4]]}  # fmt: skip


@pytest.fixture
def entries(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What the recorder has, which a test fills."""
    found: list[dict[str, Any]] = []
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "8")
    monkeypatch.setattr(torch._C._distributed_c10d, "_dump_fr_trace", lambda *_: pickle.dumps({"entries": found}))
    return found


def test_what_is_new_is_recorded(entries: list[dict[str, Any]]) -> None:
    collectives = Collectives()
    entries += [entry(0), entry(1)]
    (first,) = collectives.records(3, 0)
    assert json.loads(first.data) == [["all_reduce", 10, [], "", "", 2]]
    (second,) = collectives.records(4, 0)
    assert json.loads(second.data) == [], "a step in which nothing was reduced"


def test_a_recorder_that_records_nothing_says_nothing(entries: list[dict[str, Any]]) -> None:
    assert list(Collectives().records(3, 0)) == [], "it may be a release that does not record this backend"
