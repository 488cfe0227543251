"""What is kept of shapes from one run to the next, when it is not read, and that a wrong answer of it is found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from shardproof.scenario import Mesh, Scenario
from shardproof.world import cure_import_hook, shapes, shapes_kept
from shardproof.world.job import Job
from shardproof.world.server import ForkServer
from torch.distributed.tensor import DTensor

SCENARIO = Scenario(system="torch-fsdp2", model="dense", mesh=Mesh(1, 2, 1), program="build step save build load step")
WARM_UP = ["shardproof.systems.torch_fsdp2.rank:warm_up"]
ANSWERS = {("aten.add.Tensor", ("float32",)): ("one", ((2, 3), (3, 1), "torch.float32")), ("aten.mm.default",): ()}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own."""
    monkeypatch.setenv("SHARDPROOF_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "shapes"


def kept_by(cache: Path) -> shapes_kept.Kept:
    (file,) = cache.glob("*.answers")
    return shapes_kept.Kept(file)


def ran(tmp_path: Path, name: str, *, cold: bool = False) -> tuple[Job, str]:
    """One session of two ranks from a server of its own, and the error that ended it, if one did."""
    (tmp_path / name).mkdir()
    job = Job(SCENARIO, 0, tmp_path / name, 120.0, cold=cold)
    with ForkServer(warm_up=WARM_UP, scratch=tmp_path) as server:
        outcome = server.submit(job).result(timeout=120)
    return job, "" if outcome.ok else str(outcome)


def test_a_later_run_asks_nothing_that_an_earlier_one_asked(tmp_path: Path, cache: Path) -> None:
    first, failed = ran(tmp_path, "first")
    assert not failed
    assert first.shapes.exists()
    size = next(cache.glob("*.answers")).stat().st_size
    again, failed = ran(tmp_path, "again")
    assert not failed
    assert not again.shapes.exists(), "rank 0 writes down what it had to ask torch, and it had to ask nothing"
    assert next(cache.glob("*.answers")).stat().st_size == size, "and the warm-up had to ask nothing either"


def test_a_cold_rank_finds_an_answer_that_is_wrong_and_nothing_of_the_file_is_kept(tmp_path: Path, cache: Path) -> None:
    ran(tmp_path, "first")
    kept = kept_by(cache)
    wrong = {key: ("one", (*answer[1][:-1], "torch.float64"))
             for key, answer in kept.read().items()
             if answer and answer[0] == "one" and answer[1] and answer[1][-1] == "torch.float32"}  # fmt: skip
    assert wrong
    kept.add(wrong)
    _, failed = ran(tmp_path, "cold", cold=True)
    assert "is not what torch says now" in failed
    assert not [*cache.glob("*.answers")]


def test_answers_are_read_as_they_were_written(tmp_path: Path) -> None:
    kept = shapes_kept.Kept(tmp_path / "folder" / "x.answers")
    assert kept.read() == {}
    for key, answer in ANSWERS.items():
        kept.add({key: answer})
    assert kept.read() == ANSWERS


@pytest.mark.parametrize("cut", [1, 20, 60])
def test_a_part_that_was_not_written_to_its_end_is_not_read(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "x.answers"
    first, second = ({key: answer} for key, answer in ANSWERS.items())
    shapes_kept.Kept(path).add(first)
    whole = path.stat().st_size
    shapes_kept.Kept(path).add(second)
    with path.open("r+b") as file:
        file.truncate(max(whole, path.stat().st_size - cut))
    assert shapes_kept.Kept(path).read() == first


def test_a_byte_that_is_another_ends_the_reading(tmp_path: Path) -> None:
    path = tmp_path / "x.answers"
    shapes_kept.Kept(path).add(ANSWERS)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert shapes_kept.Kept(path).read() == {}


def test_a_file_does_not_grow_without_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.answers"
    shapes_kept.Kept(path).add(ANSWERS)
    size = path.stat().st_size
    monkeypatch.setattr(shapes_kept, "MOST_BYTES", size)
    shapes_kept.Kept(path).add(ANSWERS)
    assert path.stat().st_size == size


def test_the_oldest_files_make_room(tmp_path: Path) -> None:
    for n in range(shapes_kept.MOST_FILES + 3):
        shapes_kept.Kept(tmp_path / f"{n}.answers").add(ANSWERS)
    assert len([*tmp_path.glob("*.answers")]) == shapes_kept.MOST_FILES


def test_a_home_that_cannot_be_written_costs_time_alone(tmp_path: Path) -> None:
    (tmp_path / "shapes").write_text("a file where the folder would be")
    kept = shapes_kept.Kept(tmp_path / "shapes" / "x.answers")
    kept.add(ANSWERS)
    assert kept.read() == {}


def test_a_cure_of_what_is_asked_has_answers_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = shapes_kept._digest()
    monkeypatch.setattr("sys.meta_path", [])
    for cured, same in (
        ("torch/distributed/checkpoint/not_there.py", True), ("torch/distributed/tensor/_ops/not_there.py", False),
    ):  # fmt: skip
        file = tmp_path / "cures.json"
        file.write_text(json.dumps({cured: "x = 1"}))
        cure_import_hook.install(str(file))
        assert (shapes_kept._digest() == plain) is same


def test_a_library_that_says_how_an_operator_of_torchs_is_sharded_keeps_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    propagator = DTensor._op_dispatcher.sharding_propagator
    assert shapes._Shardings.of_torch_alone(propagator)
    monkeypatch.setitem(propagator.op_strategy_funcs, torch.ops.aten.add.Tensor, ran)
    assert not shapes._Shardings.of_torch_alone(propagator)
