"""What a trainer declares by patterns of names: what each lets go or forbids, and one that fits no name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from shardproof.program import Op
from shardproof.protocol import registry
from shardproof.trainer.arms import Session
from shardproof.trainer.cells import scenario_of
from shardproof.trainer.rank.modules import Modules
from shardproof.trainer.values.every_mesh import fits, is_transient
from simulated import COUNT, Fault, Simulation, State, nothing
from trainer_texts import STEPWISE, registered

CACHE = ("buffer", "cache")


@pytest.fixture(autouse=True)
def _systems_of_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    registry.all_systems()
    monkeypatch.setattr(registry, "_SYSTEMS", dict(registry._SYSTEMS))
    return


def judged(folder: Path, data: str, fault: Fault = nothing) -> dict[str, Any]:
    trainer = registered(folder, data, STEPWISE)
    return Simulation(scenario_of(trainer, {}, program="arms"), fault).judged(folder)


def verdicts(found: dict[str, Any]) -> dict[str, str]:
    return {arm["name"]: arm["verdict"] for arm in found["arms"]}


def _cache(session: Session, op: Op, state: State) -> None:
    """A buffer that every step writes anew and no checkpoint holds."""
    state[CACHE] = np.full(2, op.iteration if op.kind != "load" else -1, np.float32)


@pytest.mark.parametrize(
    ("pattern", "verdict"), [("buffer cache", "pass"), ("buffer *.cache", "pass"), ("cache", "mismatch")]
)
def test_a_buffer_that_no_checkpoint_need_hold(tmp_path: Path, pattern: str, verdict: str) -> None:
    found = judged(tmp_path, f"transient = ['{pattern}']", _cache)
    assert verdicts(found)["resumed"] == verdict, found["arms"]


def test_a_pattern_that_fits_no_name_is_told(tmp_path: Path) -> None:
    found = judged(tmp_path, "transient = ['exp_avg *', 'buffer w']\nlocal = ['w', '*.experts.*']")
    assert [note for note in found["notes"] if not note.startswith("ends: ")] == [
        "transient: `buffer w` is the name of nothing that was looked at; names are such as `exp_avg w` and `param w`",
        "local: `*.experts.*` is the name of nothing that was looked at; names are such as `cpu` and `group0.lr`",
    ]


@pytest.mark.parametrize(
    ("pattern", "name", "expected"),
    [
        ("*.experts.*", "experts.0.weight", True),
        ("*.experts.*", "layers.0.experts.0.weight", True),
        ("*.experts.*", "shared_experts.weight", False),
        ("*.bias", "bias", True),
        ("extra_state *.cache", "extra_state cache", True),
        ("extra_state *.cache", "extra_state precache", False),
        ("*.cache", "extra_state cache", False),
        ("a.*.b", "a.b", False),
    ],
)
def test_what_a_pattern_begins_with_may_stand_for_nothing(pattern: str, name: str, expected: bool) -> None:
    assert fits(name, [pattern]) == expected


def test_one_matching_for_what_is_local_and_what_is_transient() -> None:
    assert Modules(["*.experts.*"]).is_local("experts.0.weight")
    assert is_transient(("extra_state", "rank1.cache.rows"), ["extra_state *.cache.*"])
    assert is_transient(("extra_state", "rank1.cache.rows"), ["extra_state cache.*"])


def test_a_pattern_that_fits_a_topmost_name_is_not_told(tmp_path: Path) -> None:
    (ends,) = judged(tmp_path, "transient = ['param *.w']\nlocal = ['*.w']")["notes"]
    assert ends.startswith("ends: ")


@pytest.mark.parametrize(("pattern", "verdict"), [("w", "mismatch"), ("*.w", "mismatch"), ("base.*", "pass")])
def test_a_parameter_that_is_declared_frozen_and_moves(tmp_path: Path, pattern: str, verdict: str) -> None:
    found = judged(tmp_path, f"frozen = ['{pattern}']")
    arm = next((arm for arm in found["arms"] if arm["name"] == "trains"), {"verdict": "pass", "sentence": ""})
    assert arm["verdict"] == verdict
    assert ("w is called `frozen`, and changes in step 0" in arm["sentence"]) == (verdict == "mismatch")


def test_a_count_of_steps_that_stays_while_its_parameter_moves(tmp_path: Path) -> None:
    def never(session: Session, op: Op, state: State) -> None:
        if COUNT in state:
            state[COUNT] = np.float32(0)

    found = judged(tmp_path, "", never)
    (told,) = [arm["sentence"] for arm in found["arms"] if arm["name"] == "trains"]
    assert told.startswith("The optimizer never counts its steps: its `step` of w is the same after each of 4 steps")
