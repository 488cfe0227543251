"""What ranks learn of shapes from earlier ones, and that a cold rank neither learns nor believes."""

from __future__ import annotations

import marshal
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from datetime import date, timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from shardproof.errors import HarnessError
from shardproof.laboratory.laboratory import Laboratory
from shardproof.scenario import Mesh, Scenario
from shardproof.verdict import Verdict
from shardproof.world import shapes
from shardproof.world.job import Job
from shardproof.world.observations import read_observations
from shardproof.world.server import ForkServer
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

ROOT = Path(__file__).parents[3]
SCENARIO = Scenario(system="torch-fsdp2", model="dense", mesh=Mesh(1, 2, 1), program="build step save build load step")
WARM_UP = ["shardproof.systems.torch_fsdp2.rank:warm_up"]
KEY, ANSWER = ("aten.add.Tensor", ()), ("one", ((2, 3), (3, 1), "torch.float32"))


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is known from an earlier run."""
    monkeypatch.setenv("SHARDPROOF_CACHE", str(tmp_path / "cache"))


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
    assert asked["other mesh"] < asked["other mesh, cold"], "what whole tensors come to does not depend on the mesh"
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


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """A mesh of two ranks in one process, whose group sends nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


def asked(mesh: DeviceMesh, placement: Placement, shape: tuple[int, ...] = (4, 2), op: str = "add") -> OpSchema:
    """An operator on two tensors that are sharded alike."""
    meta = TensorMeta(torch.Size(shape), (shape[1], 1), torch.float32)
    spec = DTensorSpec(mesh, (placement,), meta)
    return OpSchema(getattr(torch.ops.aten, op).Tensor, (spec, spec), {})


def test_a_sharding_is_made_again_from_plain_data(mesh: DeviceMesh) -> None:
    propagator = DTensor._op_dispatcher.sharding_propagator
    plainly = shapes._Shardings(propagator)
    for placement in (Shard(0), Shard(1), Replicate()):
        schema = asked(mesh, placement)
        answer = propagator.propagate_op_sharding_non_cached(schema)
        plain = marshal.loads(marshal.dumps(plainly.plain(answer, schema)))
        assert plainly.made(plain, schema).output_spec == answer.output_spec


def test_what_a_sharding_depends_on_is_asked_for(mesh: DeviceMesh) -> None:
    plainly = shapes._Shardings(DTensor._op_dispatcher.sharding_propagator)
    schemas = (
        asked(mesh, Shard(0)), asked(mesh, Shard(1)), asked(mesh, Replicate()), asked(mesh, Partial()),
        asked(mesh, Partial("avg")), asked(mesh, Shard(0), (5, 2)), asked(mesh, Shard(0), op="mul"),
        asked(mesh, _StridedShard(0, split_factor=2)),
    )  # fmt: skip
    assert len({plainly.key(schema) for schema in schemas}) == len(schemas)
    assert plainly.key(asked(mesh, Shard(0))) == plainly.key(schemas[0])


def test_arguments_that_have_to_move_are_not_remembered(mesh: DeviceMesh) -> None:
    """They may depend on the rank, as the shape of its part of a view does."""
    propagator = DTensor._op_dispatcher.sharding_propagator
    plainly = shapes._Shardings(propagator)
    meta = TensorMeta(torch.Size((4, 2)), (2, 1), torch.float32)
    one, other = (DTensorSpec(mesh, (placement,), meta) for placement in (Shard(0), Shard(1)))
    schema = OpSchema(torch.ops.aten.add.Tensor, (one, other), {})
    with pytest.raises(shapes._UnknownError):
        plainly.plain(propagator.propagate_op_sharding_non_cached(schema), schema)


def test_a_rule_that_is_registered_later_is_asked(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    propagator = DTensor._op_dispatcher.sharding_propagator
    plainly, schema = shapes._Shardings(propagator), asked(mesh, Shard(0))
    plainly.key(schema)
    monkeypatch.setitem(propagator.op_strategy_funcs, schema.op, lambda _: None)
    with pytest.raises(shapes._UnknownError):
        plainly.key(schema)


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
