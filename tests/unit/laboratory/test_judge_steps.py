"""What the judge finds beside bits: what some ranks lack, how an error is told, what is left out before it compares.
Each test is here because a change of the code went unnoticed without it (`docs/mutation.md`)."""

from __future__ import annotations

import os

os.environ["ATEN_CPU_CAPABILITY"] = "default"  # read by torch when its first kernel runs

import base64
import json
import struct
import zlib
from collections.abc import Callable, Set
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from shardproof.diagnosis import Context, Finding, Rule
from shardproof.diff import Difference, as_numbers
from shardproof.faults.catalogue import CATALOGUE, scenarios_of
from shardproof.laboratory import judge as court
from shardproof.laboratory.judge import ResolvedScenario
from shardproof.observe import ambient
from shardproof.observe.ambient import expected_generators
from shardproof.observe.assemble import assemble
from shardproof.observe.logical import Key, Logical, Problem, Value
from shardproof.observe.record import LIVE, OWNER_ROLES, WRITTEN, Record, pack, whole
from shardproof.oracle import twin
from shardproof.oracle.cold_run import ColdRun
from shardproof.oracle.reported import NOTHING, Reported
from shardproof.program import Op, expand
from shardproof.reference import system as reference
from shardproof.scenario import Mesh, Optimizer, Scenario
from shardproof.world.rank import LENGTH

from tests.oracles import by_reference, records_of


def held(rank: int, role: str, fqn: str = "w", *, data: bytes = b"\1\2\3\4", op: int = 1, where: str = LIVE) -> Record:
    return Record(op, rank, where, role, fqn, "fp32", (1,), (0,), (1,), data)


def lost(key: Key, *ranks: int) -> Problem:
    return Problem(key, "gap", ranks, f"ranks {list(ranks)} own some of the parameter and hold nothing of it")


@pytest.mark.parametrize("owned", ["master", "grad", "exp_avg_sq"])
@pytest.mark.parametrize("role", ["step", "exp_avg", "momentum"])
def test_an_owner_without_a_counter_or_a_moment_has_lost_it(owned: str, role: str) -> None:
    records = [held(0, owned), held(1, owned), held(2, owned), held(1, role)]
    assert court._losses(records) == [lost(Key(1, LIVE, role, "w"), 0, 2)]
    assert court._losses([*records, held(0, role), held(2, role)]) == []


def test_an_owner_without_the_hyperparameters_of_its_parameter_has_lost_them() -> None:
    records = [held(0, "master", "a.b"), held(1, "master", "a.b"), held(0, "hyperparameter", "a.b.lr")]
    assert court._losses(records) == [lost(Key(1, LIVE, "hyperparameter", "a.b.lr"), 1)]


@pytest.mark.parametrize(
    "other",
    [
        held(1, "master", data=b""),  # nothing of it is its own
        held(1, "master", op=2),
        held(1, "master", "v"),
        held(1, "master", where="written"),
        held(1, "param"),
        held(1, "step"),
    ],
)
def test_who_owns_nothing_of_it_there_and_then_has_lost_nothing(other: Record) -> None:
    assert court._losses([other, held(0, "master"), held(0, "step")]) == []
    assert court._losses([held(0, "master"), held(0, "step"), other]) == []


def test_a_counter_that_is_empty_is_none() -> None:
    records = [held(0, "master"), held(1, "master"), held(0, "step"), held(1, "step", data=b"")]
    assert court._losses(records) == [lost(Key(1, LIVE, "step", "w"), 1)]


def test_a_value_that_some_ranks_did_not_record() -> None:
    records = [held(0, "param"), held(2, "param"), held(1, "rng"), held(1, "param", where="written"), held(0, "step")]
    (found,) = court._absences(records, {1: 4}, OWNER_ROLES)
    assert found == Problem(Key(1, LIVE, "param", "w"), "gap", (1, 3), "ranks [1, 3] hold nothing of it")
    assert {p.key.role for p in court._absences(records, {1: 4}, frozenset())} == {"param", "step"}


def test_what_ranks_say_of_themselves_is_no_value() -> None:
    notes = [held(0, "emulated", data=b"b\na"), held(1, "emulated", data=b"a\n"), held(0, "device", data=b"H100")]
    kept, said = court._without_notes([held(0, "param"), *notes])
    assert kept == [held(0, "param")]
    assert said == {"emulated": ["a", "b"], "device": ["H100"]}


def test_an_operation_that_some_rank_did_not_complete_is_left_out() -> None:
    ops = expand(Scenario(mesh=Mesh(1, 2, 1), program="build step step", system="reference"))
    records = [held(0, "param", op=op) for op in (0, 1, 2)] + [held(1, "param", op=op) for op in (0, 1)]
    assert {r.op for r in court._finished(records, ops, complete=False)} == {0, 1}
    assert court._finished(iter(records), ops, complete=True) == records


def test_norms_are_those_that_are_numbers_of_their_dtype() -> None:
    norm = Key(3, LIVE, "norm", "total_norm")
    one = Value("fp32", (), np.float32(1.5).tobytes())
    assert court._reported({norm: one, norm._replace(role="grad"): one}).norms == ((3, 1.5),)
    assert court._reported({norm: Value("fp64", (), np.float64(2.5).tobytes())}).norms == ((3, 2.5),)
    for odd in (Value("fp32", (2,), one.data * 2), Value("bf16", (), b"\0\0"), Value("fp32", (), b"")):
        assert court._reported({norm: odd}).norms == ()


def test_a_crash_of_the_reference_is_told_as_that_of_a_rank() -> None:
    axes = {"mesh": "1x2x1", "checkpoint": "gathered", "program": "restart", "faults": "step-left-on-the-host"}
    found, records, notes = court.run_reference(ResolvedScenario.from_scenario(Scenario.from_axes(axes)))
    crash = notes["crash"]
    assert {key: crash[key] for key in ("rank", "op", "stage", "errno")} == {
        "rank": 0, "op": "step", "stage": "op", "errno": None,
    }  # fmt: skip
    assert crash["op_index"] == max(r.op for r in records) + 1
    assert crash["type"] in crash["traceback"]
    assert crash["message"]
    assert crash["message"] in crash["traceback"]
    assert found.differences == ()


def test_a_fault_that_changed_nothing_had_no_effect_and_one_that_did_says_nothing_of_it() -> None:
    clean = Scenario.from_axes({"mesh": "1x2x1", "checkpoint": "gathered", "program": "train"})
    for fault, notes in (("no-op-load", {"no_effect": True}), ("demote-state", {})):
        case = ResolvedScenario.from_scenario(replace(clean, faults=(fault,)))
        found, records, told = court.run_reference(case)
        assert told == notes
        assert bool(found.differences) is not bool(notes)
        assert records
    assert court.run_reference(ResolvedScenario.from_scenario(clean))[1:] == ([], {})


# --- what a worker is asked, and replies ---------------------------------------------------------------

TRAIN = Scenario(system="torch-fsdp2", checkpoint="dcp", mesh=Mesh(1, 2, 1), program="build step")
NO_REPLY = {"differences": [], "normalisations": [], "explanations": [], "distrust": "", "elements": ""}
BROADCAST = "could not broadcast input array from shape (6,) into shape (16, 7)"


def live_records(scenario: Scenario) -> list[Record]:
    return [record for record in records_of(scenario) if record.where == LIVE]


def asked(folder: Path, scenario: Scenario, records: list[Record], **more: Any) -> dict[str, Any]:
    """The reply to a request in which two ranks have left these records."""
    paths = [folder / f"rank{rank}.obs" for rank in range(2)]
    for rank, path in enumerate(paths):
        blobs = [pack(r for r in records if (r.op, r.rank) == (op.index, rank)) for op in expand(scenario)]
        path.write_bytes(b"".join(LENGTH.pack(len(blob)) + blob for blob in blobs))
    request = {"observations": [str(path) for path in paths], "checkpoints": {}, "complete": True, **more}
    axes = scenario.axis_values(only_changed=True)
    reply: dict[str, Any] = json.loads(court.serve(json.dumps({"scenario": axes, **request}).encode()))
    return reply


def spoilt(records: list[Record], role: str = "exp_avg", op: int = 1) -> list[Record]:
    at = next(i for i, r in enumerate(records) if (r.role, r.op) == (role, op) and r.data)
    data = bytes([records[at].data[0] ^ 1]) + records[at].data[1:]
    return [*records[:at], records[at]._replace(data=data), *records[at + 1 :]]


def test_a_reply_has_what_differs_why_its_elements_and_what_ranks_said(tmp_path: Path) -> None:
    records = live_records(TRAIN)
    notes = {"emulated": [], "device": []}
    assert asked(tmp_path, TRAIN, records) == NO_REPLY | notes
    said = held(0, "device", "note", data=b"NVIDIA H100")
    reply = asked(tmp_path, TRAIN, [*spoilt(records), said])
    assert reply["device"] == ["NVIDIA H100"]
    assert [(d["kind"], d["role"], d["op_index"]) for d in reply["differences"]] == [("bits", "exp_avg", 1)]
    assert reply["explanations"]
    assert b"pictures" in zlib.decompress(base64.b64decode(reply["elements"]))


def test_what_differs_before_a_failure_is_told_too(tmp_path: Path) -> None:
    reply = asked(tmp_path, TRAIN, spoilt(live_records(TRAIN)), complete=False)
    assert [d["role"] for d in reply["differences"]] == ["exp_avg"]


def test_ranks_that_left_nothing_have_no_verdict_but_their_failures(tmp_path: Path) -> None:
    assert asked(tmp_path, TRAIN, [], complete=False) == NO_REPLY


def test_the_text_of_an_error_is_looked_at_where_nothing_differs(tmp_path: Path) -> None:
    told = ["state of 'up.weight' has 7 elements where its shard has 112", 1]
    (explanation,) = asked(tmp_path, TRAIN, live_records(TRAIN), complete=False, refused=told)["explanations"]
    assert explanation["mechanism"] == "size_of_another"
    assert "operation 1 (step)" in explanation["text"]
    reply = asked(tmp_path, TRAIN, spoilt(live_records(TRAIN)), complete=False, refused=told)
    assert "size_of_another" not in [e["mechanism"] for e in reply["explanations"]]


def test_a_checkpoint_that_cannot_be_read_differs_in_nothing_else(tmp_path: Path) -> None:
    scenario = replace(TRAIN, program="build step save")
    (tmp_path / "empty").mkdir()
    found = asked(tmp_path, scenario, live_records(scenario), checkpoints={"0": str(tmp_path / "empty")})
    (difference,) = found["differences"]
    assert {key: difference[key] for key in ("kind", "where", "role", "name", "op_index", "ranks")} == {
        "kind": "unreadable", "where": WRITTEN, "role": "checkpoint", "name": "checkpoint", "op_index": 2, "ranks": [],
    }  # fmt: skip


def test_the_reference_replies_with_the_notes_of_its_run() -> None:
    axes = {"mesh": "1x2x1", "checkpoint": "gathered", "program": "train", "faults": "no-op-load"}
    reply = court.serve_reference(json.dumps({"scenario": axes}).encode())
    (length,) = struct.unpack_from("<Q", reply)
    assert json.loads(reply[8 : 8 + length]) == NO_REPLY | {"no_effect": True}


# --- what must be found -------------------------------------------------------------------------------


class Asked:
    """A format whose checkpoints hold what is written here, and which remembers what it was asked."""

    def __init__(self) -> None:
        self.of: list[tuple[str, int]] = []

    def read(self, path: Path, op: Op, scenario: Scenario) -> list[Record]:
        return [held(0, "param", str(path), op=op.index, where=WRITTEN)]

    def must_hold(self, live: Logical, op: Op, scenario: Scenario) -> Logical:
        self.of.append((op.kind, op.index))
        return {}


def with_system(scenario: Scenario, **parts: Any) -> ResolvedScenario:
    """A case of a system that is another one in these parts."""
    case = ResolvedScenario.from_scenario(scenario)
    names = ("contract", "stored", "rules", "world")
    system: Any = SimpleNamespace(**({name: getattr(case.system, name) for name in names} | parts))
    return replace(case, system=system)


def test_every_checkpoint_is_read() -> None:
    case = with_system(replace(TRAIN, program="build save step save"), stored=Asked())
    records, problems, _ = court._read_written(case, case.ops, {"0": "first", "1": "second"})
    assert [(r.op, r.fqn) for r in records] == [(1, "first"), (3, "second")]
    assert problems == []


def test_a_format_is_asked_what_each_save_must_hold() -> None:
    stored = Asked()
    scenario = replace(TRAIN, program="build save step save")
    assert court.judge(with_system(scenario, stored=stored), live_records(scenario)).differences == ()
    assert stored.of == [("save", 1), ("save", 3)]


def test_a_contract_adds_to_the_oracle_what_its_system_alone_has() -> None:
    given: list[Any] = []

    class Adds(type(ResolvedScenario.from_scenario(TRAIN).system.contract)):  # type: ignore[misc]
        def completed(self, truth: Logical, observed: Logical, scenario: Scenario, done: Set[int]) -> Logical:
            given.append((observed, scenario, done))
            return truth

    records = live_records(TRAIN)
    court.judge(with_system(TRAIN, contract=Adds()), records)
    assert given == [(assemble(records)[0], TRAIN, {0, 1})]


def beside_fsdp2(scenario: Scenario) -> list[Record]:
    """What FSDP2's ranks record beside training state: generators, keys of a group, and bytes of a layer."""
    records: list[Record] = []
    for key, value in expected_generators(scenario.seed, list(expand(scenario))).items():
        rank, _, name = key.fqn.partition(".")
        records.append(whole(key.op, int(rank[4:]), "rng", name, value.dtype, value.shape, value.data))
    for op in expand(scenario):
        for rank in range(2):
            records.append(whole(op.index, rank, "setting", "group0.fused", "utf8", (4,), b"bool"))
            records.append(whole(op.index, rank, "extra_state", "layer", "uint8", (1,), b"\7"))
            if op.kind == "save":
                records.append(whole(op.index, rank, "extra_state", "layer", "uint8", (1,), b"\7", WRITTEN))
    return records


def of_beside(scenario: Scenario, change: Callable[[Record], Record] = lambda record: record) -> list[str]:
    """What differs where all else is as it must be and `change` was done to what is beside."""
    found = court.judge(
        with_system(scenario, stored=Asked()), [*live_records(scenario), *map(change, beside_fsdp2(scenario))]
    )
    return [f"{d.key.role} {d.key.where} {d.kind} {d.key.op} {d.key.fqn}" for d in found.differences]


RESUMED = replace(TRAIN, program="build step save build load")


def test_generators_settings_and_bytes_of_layers_that_stay_as_they_were() -> None:
    assert of_beside(RESUMED) == []
    assert of_beside(replace(RESUMED, seed=3)) == []


def test_a_generator_that_drew() -> None:
    def drew(record: Record) -> Record:
        other = (record.role, record.op, record.rank, record.fqn) == ("rng", 4, 1, "numpy")
        return record._replace(data=bytes(16)) if other else record

    assert of_beside(RESUMED, drew) == ["rng live bits 4 rank1.numpy"]


def test_a_key_of_a_group_that_a_load_changed() -> None:
    def changed(record: Record) -> Record:
        other = (record.role, record.op) == ("setting", 4)
        return record._replace(data=b"list") if other else record

    assert of_beside(RESUMED, changed) == ["setting live bits 4 group0.fused"]


@pytest.mark.parametrize("where", [LIVE, WRITTEN])
def test_bytes_of_a_layer_that_a_save_changed(where: str) -> None:
    def changed(record: Record) -> Record:
        other = (record.role, record.op, record.where) == ("extra_state", 2, where)
        return record._replace(data=b"\1") if other else record

    assert of_beside(RESUMED, changed) == [f"extra_state {where} bits 2 layer"]


def test_written_keys_of_a_group_count_where_ranks_record_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    written = [held(0, role, op=2, where=WRITTEN) for role in ("setting", "param")]
    monkeypatch.setattr(court, "_read_written", lambda *_: (written, [], []))
    request = {
        "scenario": RESUMED.axis_values(only_changed=True),
        "observations": [],
        "checkpoints": {},
        "complete": True,
    }
    for live, counted in (("setting", {"setting", "param"}), ("param", {"param"})):
        monkeypatch.setattr(court, "_read_observations", lambda *_, role=live, **__: [held(0, role, op=2)])
        found = court.gather(request).records
        assert {record.role for record in found if record.where == WRITTEN} == counted


def test_a_gpu_has_a_generator_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ambient, "seeded_gpu_state", lambda seed: torch.tensor([seed], dtype=torch.uint8))
    case = ResolvedScenario.from_scenario(TRAIN)
    case = replace(case, scenario=replace(TRAIN, device="cuda"))
    observed = by_reference(TRAIN) | expected_generators(TRAIN.seed, list(case.ops), "cuda")
    on_gpu = {key for key in court._expected(case, observed, frozenset()) if key.role == "rng"}
    assert on_gpu == {key for key in observed if key.role == "rng"}
    assert {key.fqn.partition(".")[2] for key in on_gpu} >= {"cuda"}


def test_bytes_that_a_format_leaves_out_stay_what_they_were_at_a_load() -> None:
    class Without(type(ResolvedScenario.from_scenario(TRAIN).system.contract)):  # type: ignore[misc]
        def stores_extra_state(self, scenario: Scenario) -> bool:
            assert scenario == RESUMED
            return False

    def live(record: Record) -> bool:
        return record.where == LIVE

    def anew(record: Record) -> Record:
        """The second build made other bytes, which the load must keep."""
        return record._replace(data=b"\1") if record.role == "extra_state" and record.op > 2 else record

    records = [*live_records(RESUMED), *map(anew, filter(live, beside_fsdp2(RESUMED)))]
    assert court.judge(with_system(RESUMED, stored=Asked(), contract=Without()), records).differences == ()
    assert court.judge(with_system(RESUMED, stored=Asked()), records).differences


def test_addresses_in_bytes_of_a_layer_are_no_difference_between_ranks() -> None:
    def pickled(record: Record) -> Record:
        """A pickle of the address of a storage, another one in every rank."""
        data = b"\x80\x02X\x08\0\0\0" + b"%08d" % (10_000_000 + record.rank) + b"."
        return (
            record._replace(data=data, shape=(len(data),), size=(len(data),))
            if record.role == "extra_state"
            else record
        )

    assert of_beside(RESUMED, pickled) == []


def test_elements_and_normalisations_of_what_differs() -> None:
    case = ResolvedScenario.from_scenario(TRAIN)
    records = live_records(TRAIN)
    sound = court.judge(case, records)
    assert (sound.differences, sound.normalisations, sound.elements) == ((), (), b"")
    (first, *_) = [r for r in records if (r.op, r.role, r.fqn) == (1, "exp_avg", "up.weight")]
    created = [
        r._replace(op=0, data=bytes(len(r.data))) for r in records if (r.op, r.role, r.fqn) == (1, "exp_avg", first.fqn)
    ]  # torch.distributed.checkpoint.state_dict makes state of zeros before a load
    early = court.judge(case, [*records, *created])
    assert early.differences == ()
    assert [(d.key, d.kind, d.fails) for d in early.normalisations] == [
        (Key(0, LIVE, "exp_avg", "up.weight"), "equivalent", False)
    ]
    wrong = court.judge(case, [*spoilt(records), *created])
    assert [d.key.op for d in wrong.differences] == [1]
    assert wrong.elements


def test_a_difference_names_the_ranks_that_hold_it() -> None:
    records = live_records(TRAIN)
    at = next(i for i, r in enumerate(records) if (r.op, r.rank, r.role) == (1, 1, "exp_avg") and r.data)
    wrong = records[at]._replace(data=bytes(len(records[at].data)))
    (difference,) = court.judge(
        ResolvedScenario.from_scenario(TRAIN), [*records[:at], wrong, *records[at + 1 :]]
    ).differences
    assert difference.ranks == (1,)


def test_rules_of_the_system_itself_are_asked_and_may_look_at_pieces() -> None:
    def looks(difference: Difference, context: Context) -> Finding:
        return Finding("certain", f"{len(context.pieces(difference.key))} pieces", {})

    own = Rule("own", "What only it has", looks)
    found = court.judge(with_system(TRAIN, rules=(own,)), spoilt(live_records(TRAIN)))
    assert "What only it has: 2 pieces." in [explanation.text for explanation in found.explanations]


def test_what_would_be_held_without_a_load_has_the_norms_that_were_reported() -> None:
    scenario = replace(RESUMED, optimizer=Optimizer.parse("adamw/clip=0.5"))
    case = ResolvedScenario.from_scenario(scenario)
    observed = by_reference(scenario)
    reported = [key for key in observed if key.role == "norm"]
    doubled = {key: observed[key]._replace(data=(as_numbers(observed[key]) * 2).tobytes()) for key in reported}
    norms = {key.op: float(as_numbers(doubled[key])[0]) for key in reported}
    assert norms
    said = Reported(tuple(norms.items()))
    warm, cold = twin.run(case.inputs, said), twin.run(case.inputs, said, cold_from=0)
    found = ColdRun(case.inputs, said, warm)
    assert {key: found.get(key) for key in cold} == cold
    assert cold not in (warm, twin.run(case.inputs, cold_from=0))
    assert found.get(Key(99, LIVE, "param", "no.such")) is None


def test_before_any_load_the_cold_run_is_the_other_one_and_nothing_is_worked_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inputs = ResolvedScenario.from_scenario(RESUMED).inputs
    warm = twin.run(inputs)
    monkeypatch.setattr(twin, "run", None)
    found = ColdRun(inputs, NOTHING, warm)
    before = [key for key in warm if key.op < next(op.index for op in inputs.operations if op.kind == "load")]
    assert {key: found.get(key) for key in before} == {key: warm[key] for key in before}


def test_a_cold_run_whose_steps_torch_cannot_take_has_no_values(monkeypatch: pytest.MonkeyPatch) -> None:
    said = "expected Tensor as element 0 in argument 2, but got NoneType"

    def refuses(*_: object, **__: object) -> None:
        raise TypeError(said)

    monkeypatch.setattr(twin, "run", refuses)
    inputs = ResolvedScenario.from_scenario(RESUMED).inputs
    last = Key(len(inputs.operations) - 1, LIVE, "param", "up.weight")
    assert ColdRun(inputs, NOTHING, {}).get(last) is None
    said = "run() got an unexpected keyword argument"
    with pytest.raises(TypeError, match="unexpected keyword"):  # which is a mistake of ours
        ColdRun(inputs, NOTHING, {}).get(last)


def test_what_must_be_follows_the_norm_that_was_reported() -> None:
    scenario = replace(TRAIN, optimizer=Optimizer.parse("sgd/clip=0.5"))
    at = Key(1, LIVE, "norm", "total_norm")
    (norm,) = {as_numbers(by_reference(scenario)[at])[0]}
    records = [
        r._replace(data=np.array(norm * 2, norm.dtype).tobytes()) if r.role == "norm" else r
        for r in live_records(scenario)
    ]
    differ = {d.key.role for d in court.judge(ResolvedScenario.from_scenario(scenario), records).differences}
    assert differ == {"norm", "grad", "momentum", "param"}


def with_empty_pieces(records: list[Record]) -> list[Record]:
    """A real rank records an empty piece of what another one of two holds."""
    shared = {(r.op, r.role, r.fqn): r for r in records if r.role not in OWNER_ROLES | {"rng"}}
    have = {(r.op, r.role, r.fqn, r.rank) for r in records}
    empty = [
        r._replace(rank=rank, start=(0,), size=(0,), flat=True, data=b"")
        for key, r in shared.items()
        for rank in range(2)
        if (*key, rank) not in have
    ]
    return records + empty


@pytest.mark.parametrize("system", ["megatron-core", "torch-fsdp2"])
def test_an_owner_that_lost_its_counter_is_told_of_systems_whose_owners_record(system: str) -> None:
    axes = {"system": system, "mesh": "1x2x1", "program": "build step"}
    if system == "megatron-core":
        axes |= {"sharding": "zero1", "dtype": "bf16/master=fp32", "checkpoint": "dp_zero"}
    case = ResolvedScenario.from_scenario(Scenario.from_axes(axes))
    records = with_empty_pieces([r for r in records_of(case.scenario) if r.where == LIVE])
    whole_found = court.judge_found(court.RankObservations(case, records, [], {}))
    assert whole_found.differences == ()
    owned = {r.fqn for r in records if (r.op, r.rank, r.role) == (1, 1, "exp_avg") and r.data}
    counters = [r for r in records if (r.op, r.rank, r.role) == (1, 1, "step")]
    lost_counter = next(r for r in sorted(counters) if r.fqn in owned)
    absent = next(r for r in records if (r.op, r.role, r.rank) == (1, "param", 1) and r.fqn != lost_counter.fqn)
    left = [r for r in records if r not in (lost_counter, absent)]
    found = court.judge_found(court.RankObservations(case, left, [], {}), refused=(BROADCAST, 1))
    told = {(d.key.role, d.key.fqn, d.detail) for d in found.differences if d.kind == "gap"}
    why = "own some of the parameter and hold" if system == "megatron-core" else "hold"
    assert ("step", lost_counter.fqn, f"ranks [1] {why} nothing of it") in told
    assert ("param", absent.fqn, "ranks [1] hold nothing of it") in told


# --- whether the oracles are believed ------------------------------------------------------------------


@pytest.mark.parametrize("model", ["opaque", "dropout", "quantised"])
def test_what_the_twin_knows_nothing_of_is_no_reason_for_distrust(model: str) -> None:
    scenario = Scenario(mesh=Mesh(1, 2, 1), checkpoint="sharded", program="build step", model=model)
    if model == "quantised":
        scenario = scenario.with_axes({"dtype": "fp32/param=bf16/reduce=fp32"})
    assert court._oracles_disagree(ResolvedScenario.from_scenario(scenario)) == ""


def test_of_a_quantised_model_the_forward_pass_of_its_matrices_is_unknown_to_the_twin() -> None:
    keys = [
        Key(1, LIVE, role, fqn)
        for role in ("param", "compute_param", "quantised", "quant_scale", "rng", "extra_state")
        for fqn in ("up.weight", "embed.weight")
    ]
    logical = dict.fromkeys(keys, Value("fp32", (1,), bytes(4)))
    assert {(key.role, key.fqn) for key in court.known_to_both(logical, "quantised")} == {
        ("param", "up.weight"), ("param", "embed.weight"), ("compute_param", "embed.weight"),
    }  # fmt: skip
    assert court.known_to_both(logical, "dense") == logical


def test_a_reference_that_differs_is_told_with_the_first_values() -> None:
    scenario = Scenario(mesh=Mesh(1, 2, 1), checkpoint="sharded", program="build step")
    records = records_of(scenario)
    counters = [r for r in records if (r.op, r.role, r.fqn) == (1, "exp_avg", "up.weight") and r.rank == 1]
    assert court.judge(
        ResolvedScenario.from_scenario(scenario), [r for r in records if r not in counters]
    ).distrust == (
        "twin and reference disagree in 1 values, first after operation 1: exp_avg of up.weight "
        "(gap: 56 of 112 elements are on no rank, the first at [8, 0])"
    )
    wrong = [
        r._replace(data=np.float32(2).tobytes()) if r.fqn == "up.weight" and r.role == "step" else r for r in records
    ]
    assert court.judge(ResolvedScenario.from_scenario(scenario), wrong).distrust == (
        "twin and reference disagree in 1 values, first after operation 1: step of up.weight "
        "(bits: 1.0 (0x3f800000) against 2.0 (0x40000000))"
    )


def test_a_look_at_the_reference_passes_only_if_all_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    case = ResolvedScenario.from_scenario(Scenario(mesh=Mesh(1, 2, 1), checkpoint="sharded", program="build step save"))
    passed = court._passed(case)
    assert passed == court.Judgement((), (), (), "")
    look = reference.look

    def lacking(*given: Any) -> Any:
        observed, written = look(*given)
        return {key: value for key, value in observed.items() if key.role != "step"}, written

    monkeypatch.setattr(reference, "look", lacking)
    assert court._passed(case) is None


def test_the_text_with_which_the_reference_crashed_is_explained() -> None:
    (scenario, *_) = scenarios_of(CATALOGUE["state-in-model-order"])
    found, _, notes = court.run_reference(ResolvedScenario.from_scenario(scenario))
    assert [e.mechanism for e in found.explanations] == ["size_of_another"]
    assert notes["crash"]["traceback"].startswith('Traceback (most recent call last):\n  File "')


def test_an_owner_that_lost_a_counter_is_found_behind_what_no_owner_holds() -> None:
    records = [held(0, "param"), held(0, "master"), held(1, "master"), held(0, "step")]
    assert court._losses(records) == [lost(Key(1, LIVE, "step", "w"), 1)]


@pytest.mark.parametrize(
    ("load", "role", "told"),
    [
        ("load", "param", "operation 3 (load) changes no parameter: a load that does nothing would pass"),
        ("load_model_only", "param", "operation 3 (load_model_only) changes no parameter: a load that does nothing "
         "would pass"),
        ("load_optimizer_only", "exp_avg", "operation 3 (load_optimizer_only) changes nothing that it restores: a load "
         "that does nothing would pass"),
    ],
)  # fmt: skip
def test_a_load_that_restores_what_was_there(load: str, role: str, told: str) -> None:
    ops = expand(replace(TRAIN, program=f"build step save {load}"))
    value = Value("fp32", (), bytes(4))
    same = {Key(op, LIVE, each, "w"): value for op in range(4) for each in ("param", "exp_avg")}
    changed = value._replace(data=bytes([1, 2, 3, 4]))
    other = {"param": "exp_avg", "exp_avg": "param"}[role]
    assert court._blind_load(ops, same) == told
    assert court._blind_load(ops, same | {Key(3, LIVE, other, "w"): changed}) == told
    assert court._blind_load(ops, same | {Key(3, LIVE, role, "w"): changed}) == ""
    assert court._blind_load(ops, {key: each for key, each in same.items() if key.op < 3}) == "", "it was not reached"


@pytest.mark.parametrize(
    "program", ["build step begin_save step finish_save build load", "build step keep step save_kept build load"]
)
def test_a_save_must_have_written_what_was_there_when_it_was_taken(program: str) -> None:
    scenario = Scenario(system="reference", checkpoint="gathered", mesh=Mesh(1, 2, 1), program=program)
    records = records_of(scenario)
    assert {r.op for r in records if r.where == WRITTEN} == {4}, "an operation after the one that took it"
    assert court.judge(ResolvedScenario.from_scenario(scenario), records).differences == ()
    lasts = {(r.role, r.fqn) for r in records if r.where == WRITTEN}
    later = [r._replace(op=4, where=WRITTEN) for r in records if (r.op, r.where) == (3, LIVE)]
    mixed = [r for r in records if r.where == LIVE] + [r for r in later if (r.role, r.fqn) in lasts]
    assert {d.key.op for d in court.judge(ResolvedScenario.from_scenario(scenario), mixed).differences} == {4}


def test_what_a_load_left_is_compared_with_the_run_without_loads() -> None:
    scenario = replace(RESUMED, system="reference", checkpoint="gathered", optimizer=Optimizer.parse("adamw/clip=0.5"))
    found, _, _ = court.run_reference(ResolvedScenario.from_scenario(replace(scenario, faults=("no-op-load",))))
    assert "load_without_effect" in {explanation.mechanism for explanation in found.explanations}
