"""What FSDP2 and DCP write on real ranks, read back and compared with the twin."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest
from shardproof.diff import diff
from shardproof.models import model_spec
from shardproof.observe.assemble import assemble
from shardproof.observe.settings import SETTING
from shardproof.program import expand
from shardproof.readers.checkpoint import expected_written, read_checkpoint
from shardproof.readers.description import check_complete, describe
from shardproof.scenario import Mesh, Optimizer, Scenario
from shardproof.systems.torch_fsdp2 import SYSTEM

from tests.conformance.torch_fsdp2 import checkpoint_ranks
from tests.oracles import by_twin

pytestmark = pytest.mark.real

MODELS = {"tied": "adamw/schedule=halve", "short": "sgd/loss_scale=8.0", "frozen_tower": "adam"}
FORMATS = ("dcp", "dcp+flatten", "dcp-async", "dcp-stateful", "full", "full+flatten+cpu_offload", "dcp+combined")
SCENARIOS = [
    Scenario(
        system="torch-fsdp2",
        model=model,
        mesh=Mesh(1, 2, 1),
        checkpoint=form,
        optimizer=Optimizer.parse(optimizer),
        program="build step step save",
    )
    for model, optimizer in MODELS.items()
    for form in FORMATS
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every scenario's checkpoint, written by two ranks."""
    path = tmp_path_factory.mktemp("real")
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=checkpoint_ranks.main, args=(rank, path, SCENARIOS)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(120)
        rank.kill()
    assert [rank.exitcode for rank in ranks] == [0, 0]
    return path


@pytest.mark.parametrize("number", range(len(SCENARIOS)), ids=[f"{s.model}-{s.checkpoint}" for s in SCENARIOS])
def test_what_real_ranks_write_is_what_the_twin_expects(folder: Path, number: int) -> None:
    scenario, path = SCENARIOS[number], folder / str(number) / "checkpoint0"
    model = model_spec(scenario.model)
    check_complete(path, describe(path))
    save = expand(scenario)[3]
    records = SYSTEM.stored.read(path, save, scenario)
    assert records == read_checkpoint(path, save.index, model)
    logical, problems = assemble(records)
    assert problems == []
    live = {key: value for key, value in by_twin(scenario).items() if key.op == save.index}
    settings = {key for key in logical if key.role == SETTING}  # which the twin does not know
    assert {f"{key.fqn.rpartition('.')[0]}.lr" for key in settings} <= {key.fqn for key in settings}
    expected = SYSTEM.stored.must_hold(live, save, scenario)
    assert expected == expected_written(live, model, flat="flatten" in scenario.checkpoint.split("+"))
    assert settings
    assert diff(expected, {key: value for key, value in logical.items() if key not in settings}) == []
    assert {record.rank for record in records} == ({0} if scenario.checkpoint.startswith("full") else {0, 1})
