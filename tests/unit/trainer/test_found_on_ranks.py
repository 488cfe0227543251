"""The state of trainers on several ranks, joined over the ranks, is that of the same trainer in one process."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import found_cases as cases
import pytest
import torch
from shardproof.observe.assemble import assemble
from shardproof.observe.logical import Logical, Problem
from shardproof.observe.record import unpack
from shardproof.trainer.rank.found import State

pytestmark = pytest.mark.real

JOINED = ("param", "buffer", "step", "exp_avg", "exp_avg_sq", "momentum", "state", "setting")


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ran(tmp_path_factory.mktemp("two"), 2)


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ran(tmp_path_factory.mktemp("four"), 4)


def ran(folder: Path, world: int) -> Path:
    torch.multiprocessing.spawn(cases.run_rank, (world, str(folder)), nprocs=world)
    return folder


def joined(folder: Path, name: str, world: int) -> tuple[Logical, list[Problem]]:
    blobs = [cases.file_of(folder, name, rank).read_bytes() for rank in range(world)]
    return assemble(record for blob in blobs for record in unpack(blob))


def alone(roots: dict[str, Any]) -> dict[tuple[str, str], Any]:
    logical, problems = assemble(State(roots, 0, 1).records(1))
    assert not problems
    return shared(logical)


def shared(logical: Logical) -> dict[tuple[str, str], Any]:
    return {(key.role, key.fqn): value for key, value in logical.items() if key.role in JOINED}


def told(folder: Path, name: str, world: int) -> list[Any]:
    files = (cases.file_of(folder, name, rank).with_suffix(".told") for rank in range(world))
    return [pickle.loads(file.read_bytes()) for file in files]


def compare(folder: Path, name: str, world: int, one: Callable[..., Any], **options: Any) -> None:
    logical, problems = joined(folder, name, world)
    expected = alone(one(cases.OPTIMIZERS[name.split()[-1]] if not options else cases.OPTIMIZERS["adamw"], **options))
    assert not problems
    found = shared(logical)
    assert found.keys() == expected.keys()
    assert [key for key in expected if found[key] != expected[key]] == []
    for _, hidden, unchanged, _ in told(folder, name, world):
        assert (hidden, unchanged) == ([], True)


@pytest.mark.parametrize("name", [name for name in cases.TWO if not name.startswith("tied")])
def test_on_two_ranks_the_pieces_are_those_of_one_process(name: str, two: Path) -> None:
    compare(two, name, 2, cases.plain)


@pytest.mark.parametrize("name", [name for name in cases.TWO if name.startswith("tied")])
def test_a_tied_parameter_is_recorded_under_each_name_and_its_moments_under_one(name: str, two: Path) -> None:
    compare(two, name, 2, cases.plain, tied=True)
    logical, _ = joined(two, name, 2)
    assert {("param", "first.up.weight"), ("param", "second.up.weight")} <= shared(logical).keys()
    assert ("exp_avg", "second.up.weight") not in shared(logical)
    assert {tie for *_, tie in told(two, name, 2)} == {"one"}


@pytest.mark.parametrize(
    "name", ["ddp adamw", "fsdp1 full_shard originals adamw", "fsdp1 full_shard flat adamw", "fsdp2 adamw"]
)
def test_parameters_that_are_not_tied_are_two(name: str, two: Path) -> None:
    assert {tie for *_, tie in told(two, name, 2)} == {"two"}


@pytest.mark.nightly
@pytest.mark.parametrize("name", [name for name in cases.FOUR if "hybrid" in name])
def test_with_a_replicated_mesh_dim_too(name: str, four: Path) -> None:
    compare(four, name, 4, cases.plain)


@pytest.mark.nightly
@pytest.mark.parametrize("name", [name for name in cases.FOUR if name.startswith("cut")])
def test_one_dim_may_be_cut_by_two_mesh_dims(name: str, four: Path) -> None:
    compare(four, name, 4, cases.full_tensors)


@pytest.mark.nightly
def test_loose_tensors_have_boxes_too(four: Path) -> None:
    logical, problems = joined(four, "tables", 4)
    assert not problems
    table = torch.arange(35.0).numpy().tobytes()
    values = {key.fqn: value for key, value in logical.items() if key.role == "extra_state"}
    for name in ("both", "each", "one", "none", "sharded"):
        value = values[f"table.{name}"]
        assert (value.dtype, value.shape, value.data) == ("fp32", (5, 7), table)
    assert [values[f"rank{rank}.table.uneven"].shape for rank in range(4)] == [(1 + rank, 2) for rank in range(4)]
    for _, hidden, unchanged, _ in told(four, "tables", 4):
        assert unchanged
        assert [item.name for item in hidden] == ["table.summed"]
        assert "nobody the sum" in hidden[0].detail
