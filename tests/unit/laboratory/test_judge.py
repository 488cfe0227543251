"""The judge on records of the reference, sound and spoilt by hand: what differs, and what cannot be said."""

from __future__ import annotations

import os

os.environ["ATEN_CPU_CAPABILITY"] = "default"  # read by torch when its first kernel runs

import json
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from shardproof.laboratory import judge as court
from shardproof.laboratory.judge import Judgement, ResolvedScenario, serve, serve_reference
from shardproof.models import ZOO
from shardproof.observe.logical import Logical, Problem
from shardproof.observe.record import Record, pack, unpack
from shardproof.oracle import twin
from shardproof.oracle.inputs import Inputs
from shardproof.program import PROGRAMS, expand, operations
from shardproof.result import differences_from_json
from shardproof.scenario import Mesh, Optimizer, Scenario
from shardproof.world.rank import LENGTH

from tests.oracles import by_twin, inputs_of, records_of

BASE = Scenario(checkpoint="sharded", mesh=Mesh(1, 2, 1), program="build step save build load step")
FAULTY = replace(BASE, faults=("no-op-load",))
"""With a fault, differences are the system's; without one, the reference's own are a reason for distrust."""


def judge(scenario: Scenario, records: Sequence[Record], problems: Sequence[Problem] = ()) -> Judgement:
    return court.judge(ResolvedScenario.from_scenario(scenario), records, problems)


@pytest.fixture(scope="module")
def sound() -> list[Record]:
    return records_of(BASE)


@pytest.fixture(autouse=True)
def fresh_caches() -> Iterator[None]:
    """What one test makes the oracles say stays in that test."""
    yield
    court._twin.cache_clear()
    court._reference_against_twin.cache_clear()


def first(records: list[Record], role: str = "param", where: str = "live") -> int:
    """Index of a record with data, of a shard that is not the first one where the role has shards."""
    found = [i for i, r in enumerate(records) if r.role == role and r.where == where and r.data]
    return next((i for i in found if any(records[i].start)), found[0])


def spoilt(records: list[Record], index: int, **changes: Any) -> list[Record]:
    return [r._replace(**changes) if i == index else r for i, r in enumerate(records)]


def test_the_references_records_pass(sound: list[Record]) -> None:
    found = judge(BASE, sound)
    assert (found.differences, found.explanations, found.distrust) == ((), (), "")


@pytest.mark.parametrize("role", ["param", "grad", "exp_avg", "step", "hyperparameter", "compute_param"])
def test_one_bit_of_any_role_is_found_at_its_place(sound: list[Record], role: str) -> None:
    at = first(sound, role)
    data = bytes([sound[at].data[0] ^ 1]) + sound[at].data[1:]
    found = judge(FAULTY, spoilt(sound, at, data=data))
    assert {(d.key.role, d.key.fqn, d.key.op) for d in found.differences} == {(role, sound[at].fqn, sound[at].op)}
    assert found.distrust == ""


def test_a_bit_that_was_written_wrong_is_found_though_the_live_state_is_right(sound: list[Record]) -> None:
    at = first(sound, "exp_avg", "written")
    data = bytes([sound[at].data[0] ^ 1]) + sound[at].data[1:]
    (difference,) = judge(FAULTY, spoilt(sound, at, data=data)).differences
    assert (difference.key.where, difference.key.role, difference.kind) == ("written", "exp_avg", "bits")


@pytest.mark.parametrize(
    ("spoil", "kind"),
    [
        (lambda records, at: [r for r in records if (r.op, r.fqn, r.role) != key_of(records[at])], "missing"),
        (
            lambda records, at: [
                *records,
                records[at]._replace(fqn="nobody.weight", shape=records[at].size, start=(0, 0)),
            ],
            "extra",
        ),
        (lambda records, at: spoilt(records, at, start=(records[at].start[0] - 1, *records[at].start[1:])), "overlap"),
        (lambda records, at: [r for i, r in enumerate(records) if i != at], "gap"),
    ],
    ids=["missing", "extra", "overlap", "gap"],
)
def test_structure_is_compared(
    sound: list[Record], spoil: Callable[[list[Record], int], list[Record]], kind: str
) -> None:
    kinds = {d.kind for d in judge(FAULTY, spoil(sound, first(sound, "exp_avg"))).differences}
    assert kind in kinds


def key_of(record: Record) -> tuple[int, str, str]:
    return record.op, record.fqn, record.role


def test_nothing_observed_is_never_a_pass() -> None:
    found = judge(FAULTY, [])
    assert found.differences or found.distrust


def test_a_reference_that_differs_from_the_twin_is_distrusted(sound: list[Record]) -> None:
    at = first(sound)
    found = judge(BASE, spoilt(sound, at, data=bytes(len(sound[at].data))))
    assert "twin and reference disagree" in found.distrust
    assert sound[at].fqn in found.distrust


def test_a_wrong_twin_is_distrusted_and_does_not_blame_the_system(
    sound: list[Record], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = twin.run

    def wrong(inputs: Inputs, *rest: Any, **options: Any) -> Logical:
        truth = right(inputs, *rest, **options)
        key = next(key for key in truth if key.role == "exp_avg")
        return {**truth, key: truth[key]._replace(data=bytes(len(truth[key].data)))}

    monkeypatch.setattr(twin, "run", wrong)
    court._twin.cache_clear()
    for scenario in (BASE, FAULTY, replace(BASE, system="torch-fsdp2", checkpoint="dcp")):
        court._reference_against_twin.cache_clear()
        live = [r for r in sound if r.where == "live"]
        assert "twin and reference disagree" in judge(scenario, live).distrust


def test_a_load_that_could_do_nothing_unnoticed_is_distrusted(
    sound: list[Record], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = twin.run

    def blind(inputs: Inputs, *rest: Any, **options: Any) -> Logical:
        """A truth in which every parameter is the same after every operation."""
        truth = right(inputs, *rest, **options)
        initial = {key.fqn: truth[key] for key in reversed(truth) if key.role == "param"}
        return {key: initial[key.fqn] if key.role == "param" else value for key, value in truth.items()}

    monkeypatch.setattr(twin, "run", blind)
    court._twin.cache_clear()
    assert "a load that does nothing would pass" in judge(FAULTY, sound).distrust


@pytest.mark.parametrize("program", [name for name, text in PROGRAMS.items() if "load" in text])
@pytest.mark.parametrize("model", ["dense", "later"])
def test_no_program_has_a_load_that_could_do_nothing_unnoticed(program: str, model: str) -> None:
    optimizer = Optimizer(schedule="halve") if "load_schedule_only" in operations(program) else BASE.optimizer
    scenario = replace(BASE, program=program, model=model, optimizer=optimizer)
    assert court._blind_load(expand(scenario), by_twin(scenario)) == ""


@pytest.mark.parametrize("model", sorted(ZOO))
@pytest.mark.parametrize(
    ("mesh", "like"), [(Mesh(1, 1, 2), Mesh(1, 1, 1)), (Mesh(2, 2, 1), Mesh(1, 2, 1)), (Mesh(1, 4, 2), Mesh(2, 2, 2))]
)
def test_scenarios_that_differ_in_nothing_that_decides_bits_have_equal_inputs(
    model: str, mesh: Mesh, like: Mesh
) -> None:
    scenario = replace(BASE, model=model, mesh=mesh, sharding="zero1", checkpoint="gathered", microbatches=2)
    others = [
        replace(scenario, mesh=like),
        replace(scenario, sharding="replicate", grad_sync="every", version="2.0"),
        replace(
            scenario, sharding="fully_shard", system="torch-fsdp2", checkpoint="dcp", reshard_after_forward="false"
        ),
        replace(scenario, faults=("no-op-load",)),
    ]
    assert {inputs_of(other) for other in others} == {inputs_of(scenario)}
    assert by_twin(scenario), "and the twin has an answer"


@pytest.mark.parametrize(
    "axes",
    [
        {"seed": "1"},
        {"microbatches": "2"},
        {"model": "short"},
        {"program": "train"},
        {"dtype": "bf16"},
        {"dtype": "fp32/reduce=bf16"},
        {"optimizer": "adamw/lr=0.5"},
        {"optimizer": "adamw/impl=fused"},
        {"optimizer": "adamw/loss_scale=8.0"},
        {"optimizer": "adamw/clip=0.5"},
        {"optimizer": "adamw/schedule=halve"},
    ],
    ids=str,
)
def test_scenarios_that_differ_in_what_decides_bits_have_other_inputs(axes: dict[str, str]) -> None:
    assert inputs_of(BASE.with_axes(axes)) != inputs_of(BASE)


def test_one_rank_has_inputs_of_its_own_where_its_gradients_come_from_another_grid() -> None:
    alone = {"mesh": "1x1x1"}
    half = BASE.with_axes({"sharding": "zero1", "dtype": "bf16/reduce=fp32/master=fp32"})
    assert inputs_of(half.with_axes(alone)) != inputs_of(half)
    assert inputs_of(BASE.with_axes(alone)) == inputs_of(BASE)


def test_a_twin_is_run_once_for_all_scenarios_with_equal_inputs(
    sound: list[Record], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Inputs] = []
    right = twin.run

    def counted(inputs: Inputs, *rest: Any, **options: Any) -> Logical:
        asked.append(inputs)
        return right(inputs, *rest, **options)

    monkeypatch.setattr(twin, "run", counted)
    court._twin.cache_clear()
    live = [record for record in sound if record.where == "live"]
    for scenario in (BASE, replace(BASE, grad_sync="every", checkpoint="gathered")):
        assert judge(scenario, sound).distrust == ""
    assert judge(replace(BASE, system="torch-fsdp2", checkpoint="dcp"), live).distrust == ""
    assert len(set(asked)) == 1
    assert len(asked) == 1


# --- what workers are asked ---------------------------------------------------------------------------


def test_the_reference_is_run_and_judged_in_one_call() -> None:
    for scenario in (BASE, replace(BASE, faults=("no-op-load",))):
        reply = serve_reference(json.dumps({"scenario": scenario.axis_values(only_changed=True)}).encode())
        (length,) = struct.unpack_from("<Q", reply)
        judgement, blob = json.loads(reply[8 : 8 + length]), reply[8 + length :]
        if scenario.faults:
            assert judgement["differences"]
            assert list(unpack(blob)) == records_of(scenario)
        else:
            assert (judgement["differences"], blob) == ([], b"")


class Ranks:
    """Observation files as two ranks of a library write them, from the reference's live records."""

    def __init__(self, folder: Path) -> None:
        self.scenario = replace(BASE, system="torch-fsdp2", checkpoint="dcp", program="train")
        self.paths = [folder / f"rank{rank}.obs" for rank in range(2)]
        records = records_of(self.scenario)
        for rank, path in enumerate(self.paths):
            blobs = [pack(r for r in records if (r.op, r.rank) == (op.index, rank)) for op in expand(self.scenario)]
            path.write_bytes(b"".join(LENGTH.pack(len(blob)) + blob for blob in blobs))

    def judged(self, *, complete: bool) -> dict[str, Any]:
        request = {
            "scenario": self.scenario.axis_values(only_changed=True), "observations": [str(p) for p in self.paths],
            "checkpoints": {}, "complete": complete,
        }  # fmt: skip
        reply: dict[str, Any] = json.loads(serve(json.dumps(request).encode()))
        return reply


def test_files_of_ranks_that_did_everything_are_judged(tmp_path: Path) -> None:
    reply = Ranks(tmp_path).judged(complete=True)
    assert (reply["differences"], reply["distrust"]) == ([], "")


def test_a_file_that_a_dying_rank_cut_off_counts_as_far_as_every_rank_got(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path)
    content = ranks.paths[1].read_bytes()
    ranks.paths[1].write_bytes(content[: len(content) // 2 + 5])
    assert ranks.judged(complete=False)["differences"] == []
    with pytest.raises(ValueError, match=r"truncated|stray|short|cut"):
        ranks.judged(complete=True)


def test_ranks_that_failed_before_their_first_observation_differ_in_nothing(tmp_path: Path) -> None:
    """Their verdict is the failure's; whether the other ranks got as far as an observation is a matter of timing."""
    ranks = Ranks(tmp_path)
    ranks.paths[1].write_bytes(b"")
    assert ranks.judged(complete=False)["differences"] == []
    assert ranks.judged(complete=True)["differences"]


def test_a_rank_that_wrote_less_than_it_says_is_a_mismatch(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path)
    content = ranks.paths[1].read_bytes()
    (length,) = LENGTH.unpack_from(content)
    ranks.paths[1].write_bytes(content[: 8 + length])
    assert ranks.judged(complete=False)["differences"] == []
    assert differences_from_json(ranks.judged(complete=True)["differences"])


def test_an_unreadable_checkpoint_is_a_difference_that_says_why(tmp_path: Path) -> None:
    scenario = replace(BASE, system="torch-fsdp2", checkpoint="dcp", program="build step save")
    (tmp_path / "checkpoint0").mkdir()
    records = [r for r in records_of(scenario) if r.where == "live"]
    ops = expand(scenario)
    number = next(op.checkpoint for op in ops if op.kind == "save")
    paths = {str(number): str(tmp_path / "checkpoint0")}
    written, problems, unfamiliar = court._read_written(ResolvedScenario.from_scenario(scenario), ops, paths)
    assert written == []
    assert [problem.detail for problem in problems] == unfamiliar
    (difference,) = [d for d in judge(scenario, records, problems).differences if d.kind == "unreadable"]
    assert ".metadata" in difference.detail
