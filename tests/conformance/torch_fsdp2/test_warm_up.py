"""The fork server with the real FSDP2 system: what the warm-up leaves behind must not reach the ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from shardproof.observe.record import Record
from shardproof.scenario import Mesh, Scenario
from shardproof.systems.torch_fsdp2 import SYSTEM
from shardproof.world.job import Job
from shardproof.world.observations import read_observations
from shardproof.world.server import ForkServer

ROOT = Path(__file__).parents[3]


@pytest.mark.real
def test_a_warm_server_forgets_its_meshes_and_runs_every_world(tmp_path: Path) -> None:
    warm_up = [SYSTEM.entry(SYSTEM.warm_up)]
    with ForkServer(path_prefix=[ROOT], plugins=["tests.unit.world_stub"], warm_up=warm_up) as server:
        assert server.call("tests.unit.world_stub:sharding_cache", b"", 60) == b"0"
        finals = []
        for world in (1, 2, 3):
            folder = tmp_path / str(world)
            folder.mkdir()
            program = "build step save build load step"
            scenario = Scenario(system="torch-fsdp2", mesh=Mesh(1, world, 1), program=program)
            outcome = server.submit(Job(scenario, 0, folder, 60)).result()
            assert outcome.ok, outcome
            records = [r for path in outcome.observations for r in read_observations(path)]
            finals.append(_assembled([r for r in records if (r.op, r.role, r.fqn) == (5, "param", "embed.weight")]))
    assert finals[0] == finals[1] == finals[2]


def _assembled(records: list[Record]) -> bytes:
    return b"".join(r.data for r in sorted(records, key=lambda r: r.start))
