"""What ranks learn of shapes from earlier ones, and that a cold rank neither learns nor believes."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from datetime import date, timedelta
from pathlib import Path

import pytest
from shardproof.errors import HarnessError
from shardproof.laboratory.laboratory import Laboratory
from shardproof.scenario import Mesh, Scenario
from shardproof.verdict import Verdict
from shardproof.world import shapes
from shardproof.world.job import Job
from shardproof.world.observations import read_observations
from shardproof.world.server import ForkServer

ROOT = Path(__file__).parents[3]
SCENARIO = Scenario(system="torch-fsdp2", model="dense", mesh=Mesh(1, 2, 1), program="build step save build load step")
WARM_UP = ["shardproof.systems.torch_fsdp2.rank:warm_up"]
KEY, ANSWER = ("aten.add.Tensor", ()), ("one", ((2, 3), (3, 1), "torch.float32"))


def test_ranks_that_learn_observe_what_cold_ones_do(tmp_path: Path) -> None:
    jobs = {
        name: Job(replace(SCENARIO, mesh=mesh), 0, tmp_path / name, 120.0, cold=cold)
        for name, mesh, cold in (
            ("first", Mesh(1, 2, 1), False), ("again", Mesh(1, 2, 1), False), ("cold", Mesh(1, 2, 1), True),
            ("other mesh", Mesh(2, 2, 1), False), ("other mesh, cold", Mesh(2, 2, 1), True),
        )
    }  # fmt: skip
    with ForkServer(warm_up=WARM_UP, scratch=tmp_path) as server:
        for job in jobs.values():
            job.directory.mkdir()
            assert server.submit(job).result(timeout=120).ok
    asked = {name: job.shapes.stat().st_size if job.shapes.exists() else 0 for name, job in jobs.items()}
    assert 0 < asked["first"] < asked["cold"], "a cold rank asks torch for everything, others for what no warm-up asked"
    assert asked["again"] == 0, "what one rank has asked, no later one asks"
    assert asked["other mesh"] < asked["other mesh, cold"] / 2, "what whole tensors come to does not depend on the mesh"
    seen = {name: [list(read_observations(job.observation(r))) for r in range(2)] for name, job in jobs.items()}
    assert seen["first"] == seen["again"] == seen["cold"]
    assert seen["other mesh"] == seen["other mesh, cold"]


def test_what_is_remembered_wrongly_is_ours_and_no_failure_of_the_library() -> None:
    with Laboratory(
        jobs=1, deadline_s=60.0, plugins=("tests.unit.world.wrong_shapes",), systems=["torch-fsdp2"]
    ) as laboratory:
        learned, misled = (laboratory.examine_one(SCENARIO) for _ in range(2))
    assert learned.verdict is Verdict.PASS
    assert misled.verdict is Verdict.UNKNOWN
    assert "is not what torch says now" in misled.reason


def test_a_cold_rank_says_what_torch_does_not_say(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(shapes, "remembered", {KEY: ("one", ((3, 2), (2, 1), "torch.float32"))})
    shapes.begin(cold=True)
    shapes._state.hear(KEY, ANSWER)
    with pytest.raises(HarnessError, match=r"of aten\.add\.Tensor is not what torch says"):
        shapes.end(tmp_path / "shapes")


def test_what_is_read_is_what_was_written_and_damage_is_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "shapes"
    monkeypatch.setattr(shapes, "remembered", {})
    monkeypatch.setattr(shapes, "_state", shapes._State())
    shapes.begin(cold=False)
    shapes._state.hear(KEY, ANSWER)
    shapes.end(file)
    for damaged in (b"", b"[", file.read_bytes()[:-3], b"i\x01\x00\x00\x00"):
        shapes.remembered.clear()
        (tmp_path / "damaged").write_bytes(damaged)
        shapes.read(tmp_path / "damaged")
        assert shapes.remembered == {}
    shapes.read(tmp_path / "none")
    shapes.read(file)
    assert shapes.remembered == {KEY: ANSWER}


def test_every_scenario_is_cold_on_one_day_in_ten() -> None:
    first = date(2026, 11, 29)
    days = [first + timedelta(days=n) for n in range(10)]
    drawn = Counter(day for day in days for n in range(1000) if shapes.drawn(f"{n * 7919:012x}", day))
    assert sum(drawn.values()) == 1000
    assert all(60 < drawn[day] < 140 for day in days)
