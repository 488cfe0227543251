"""The reference against the twin on a spread of scenarios, live and written, and what its entry promises."""

import os

os.environ["ATEN_CPU_CAPABILITY"] = "default"  # read by torch when its first kernel runs

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from shardproof.errors import UsageError
from shardproof.faults.catalogue import planter_of
from shardproof.models import ZOO
from shardproof.observe.assemble import assemble
from shardproof.observe.logical import Key, Logical
from shardproof.observe.record import ITEMSIZE, LIVE, WRITTEN, every_rank, pack, unpack
from shardproof.program import PROGRAMS, WRITES, expand, load_mesh, operations
from shardproof.protocol.registry import contract_of, system_named
from shardproof.reference import system as reference
from shardproof.reference.observe import Observation, Observer, Sheet, values_of
from shardproof.reference.placement import Catalogue
from shardproof.reference.state import Session
from shardproof.scenario import Scenario
from shardproof.space.constraints import CONSTRAINTS
from shardproof.systems.reference.accepts import ACCEPTS
from shardproof.systems.reference.models import MODELS

from tests.oracles import by_reference, by_twin, records_of

FORMATS = tuple(ACCEPTS.axes["checkpoint"].switches)
MESHES = ("1x1x1", "1x2x1", "1x3x1", "1x4x1", "2x2x1", "1x2x2", "2x1x1", "2x2x2", "1x3x2", "1x1x2", "1x8x1")


BESIDE = {model.name for model in MODELS}
"""Models that keep something of which the twin knows nothing."""


def observed(scenario: Scenario) -> Logical:
    logical, problems = assemble(records_of(scenario))
    assert problems == []
    return logical


def predicted(scenario: Scenario, logical: Logical) -> Logical:
    norms = {key.op: float(np.frombuffer(v.data, np.float32)[0]) for key, v in logical.items() if key.role == "norm"}
    return by_twin(scenario, norms)


def assert_equals_twin(scenario: Scenario) -> None:
    logical = observed(scenario)
    expected = predicted(scenario, logical)
    assert {k for k in logical if k.where == LIVE} == set(expected), scenario
    ops = expand(scenario)
    for key, value in logical.items():
        if key.role == "norm":
            continue
        at = ops[key.op].taken if key.where == WRITTEN else key.op
        assert value == expected[key._replace(op=at, where=LIVE)], (str(scenario), key)
    for op in ops:
        if op.kind in WRITES:
            written = {
                key._replace(op=op.taken, where=LIVE) for key in logical if key.op == op.index and key.where == WRITTEN
            }
            lasts = {k for k in expected if k.op == op.taken and k.role not in ("buffer", "schedule")}
            assert lasts <= written, scenario


def draw(rng: random.Random) -> Scenario:
    """A scenario over every axis the reference has."""
    sharding, storage = rng.choice(("fully_shard", "zero1", "replicate")), rng.choice(("fp32", "bf16", "fp16", "mixed"))
    stages = ("param", "reduce") if sharding == "fully_shard" else ("reduce", "master")
    chosen = [f"/{stage}={rng.choice(('fp32', 'bf16'))}" for stage in stages if rng.random() < 0.5]
    kind = rng.choice(
        ("sgd", "sgd/nesterov=true", "sgd/momentum=0.0", "adam/eps=0.0009765625", "adamw/eps=0.0009765625")
    )
    schedule = f"schedule={rng.choice(('halve', 'linear'))}"
    options = ("groups=one", "clip=1.0", "loss_scale=1024.0", schedule)
    optimizer = f"{kind}/impl={rng.choice(('forloop', 'foreach', 'fused'))}"
    axes = {
        "model": rng.choice([name for name in ZOO if name not in BESIDE]),
        "mesh": rng.choice(MESHES),
        "load": rng.choice(("same", "grow", "shrink", "indivisible", "tp_change", "1x3x2")),
        "sharding": sharding,
        "dtype": storage + "".join(chosen),
        "offload": rng.choice(("none", "cpu=0.3", "cpu=0.5", "cpu")),
        "optimizer": "/".join([optimizer, *(o for o in options if rng.random() < 0.3)]),
        "microbatches": rng.choice("123"),
        "grad_sync": rng.choice(("last", "every")),
        "checkpoint": rng.choice(FORMATS),
        "program": rng.choice((*PROGRAMS, "build step save step load_model_only step")),
        "seed": str(rng.randrange(9)),
    }
    return Scenario().with_axes(axes)


def torch_refuses(scenario: Scenario) -> bool:
    """Where the twin has no answer: GradScaler on fp16 gradients, fused SGD on old and new momenta together."""
    ask, policy = scenario.optimizer, scenario.dtype
    scaled_fp16 = ask.loss_scale > 0 and policy.storage == "fp16" and not policy.master
    return scaled_fp16 or (ask.kind == "sgd" and ask.impl == "fused" and "unfreeze" in operations(scenario.program))


def sample(seed: int) -> Iterator[Scenario]:
    rng = random.Random(seed)
    while True:
        scenario = draw(rng)
        if (
            load_mesh(scenario)
            and not torch_refuses(scenario)
            and not system_named("reference").refusal(scenario)
            and not any(c.excludes(scenario) for c in CONSTRAINTS)
        ):
            yield scenario


@pytest.mark.parametrize("seed", range(6))
def test_reference_equals_twin_on_a_sample(seed: int) -> None:
    for scenario in itertools.islice(sample(seed), 8):
        assert_equals_twin(scenario)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("load", ["1x2x1", "1x3x1", "1x2x2", "2x2x1"])
def test_every_format_loads_onto_every_mesh(form: str, load: str) -> None:
    for mesh, model in (("1x4x1", "dense"), ("2x2x2", "mixed_unit"), ("1x3x2", "swiglu")):
        axes = {"sharding": "zero1", "dtype": "mixed/reduce=fp32/master=fp32", "checkpoint": form, "load": load}
        assert_equals_twin(Scenario().with_axes({**axes, "mesh": mesh, "model": model}))


@pytest.mark.parametrize("sharding", ["zero1", "fully_shard"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_every_program(program: str, sharding: str) -> None:
    schedule = "" if "add_group" in operations(program) else "/schedule=halve"
    optimizer = f"adamw/loss_scale=1024.0{schedule}/clip=0.5"
    axes = {"program": program, "sharding": sharding, "optimizer": optimizer, "checkpoint": "sharded"}
    axes |= {"microbatches": "2"} if "accumulate" in operations(program) else {}
    for model, mesh in (("later", "1x2x1"), ("frozen_tower", "2x1x2"), ("tied", "1x4x1")):
        assert_equals_twin(
            Scenario().with_axes(
                {**axes, "model": model, "mesh": mesh, "load": "shrink" if mesh == "1x4x1" else "same"}
            )
        )


def test_eleven_shards() -> None:
    axes = {"model": "many", "mesh": "1x12x1", "load": "1x11x1", "sharding": "zero1", "checkpoint": "bucket_space"}
    assert_equals_twin(Scenario().with_axes(axes))


def test_observing_some_operations_gives_their_records_and_changes_nothing() -> None:
    scenario = Scenario().with_axes({"mesh": "1x2x1", "checkpoint": "sharded"})
    last = len(expand(scenario)) - 1
    everything = records_of(scenario)
    assert records_of(scenario) == everything
    assert records_of(scenario, [last]) == [r for r in everything if r.op == last]
    assert records_of(scenario, []) == []


def test_every_rank_observes_every_operation() -> None:
    scenario = Scenario().with_axes({"mesh": "2x2x2", "load": "1x3x1", "checkpoint": "gathered"})
    seen = {(r.op, r.rank) for r in records_of(scenario) if r.where == LIVE}
    assert seen == {(op.index, rank) for op in expand(scenario) for rank in range(op.mesh.world)}


@pytest.mark.parametrize(("faults", "alike"), [((), True), (("shard-group-only",), False)], ids=["alike", "apart"])
def test_what_replicas_hold_alike_is_one_record(faults: tuple[str, ...], alike: bool) -> None:
    scenario = Scenario().with_axes({"mesh": "2x2x1", "model": "twins", "program": "train", "checkpoint": "gathered"})
    held = reference.run(*contract_of(scenario).resolve(scenario), install=planter_of(faults))
    gradients = [r for r in held if r.role == "grad"]
    assert {r.others for r in gradients} == ({(2,), (3,)} if alike else {()})
    assert {r.rank for r in every_rank(gradients)} == {0, 1, 2, 3}
    assert list(unpack(pack(held))) == list(every_rank(held)), "stored, every rank has its own"


@pytest.mark.parametrize(
    "axes",
    [
        {"mesh": "2x2x1", "model": "twins"},
        {"mesh": "1x2x2", "sharding": "zero1", "dtype": "bf16/master=fp32", "model": "mixed_unit"},
        {"mesh": "1x3x1", "model": "tied", "load": "1x2x1"},
    ],
    ids=["hsdp", "zero1-tp", "tied"],
)
def test_the_short_way_tells_what_the_records_tell(axes: dict[str, str]) -> None:
    scenario = Scenario().with_axes({"checkpoint": "gathered", "program": "resume", **axes})
    values, written = reference.look(*contract_of(scenario).resolve(scenario))
    assert values == by_reference(scenario)
    assert written == [record for record in records_of(scenario) if record.where == WRITTEN]


@pytest.mark.parametrize("axes", [{"mesh": "2x2x1"}, {"mesh": "1x2x2", "sharding": "zero1", "model": "mixed_unit"}])
def test_the_short_way_tells_nothing_of_what_is_not_sound(axes: dict[str, str]) -> None:
    """One flipped bit in any copy, or a piece that is missing or lies in another's place: the records are asked."""
    scenario = Scenario().with_axes({"checkpoint": "gathered", "program": "train", **axes})
    sound = last_observation(scenario)
    assert values_of([sound]) is not None
    refused = 0
    for number, (part, sheet) in enumerate(sound.sheets):
        first, *others = sheet.view.first
        if sheet.view.copies > 1:
            assert values_of([exchanged(sound, number, part, flipped(sheet, len(sheet.blob) - 1))]) is None
        for window in sheet.view.first:
            split = ZOO[scenario.model].param(window.fqn).spec.tp_dim is not None
            if scenario.mesh.tp > 1 and not split:  # the other tensor-parallel coordinate has a copy
                at = window.begin * ITEMSIZE[sheet.dtype]
                assert values_of([exchanged(sound, number, part, flipped(sheet, at))]) is None
        for windows in (others, [first._replace(start=(1, *first.start[1:])), *others], [first, first, *others[1:]]):
            view = replace(sheet.view, first=tuple(windows))
            damaged = exchanged(sound, number, part, sheet._replace(view=view))
            joined, problems = assemble(damaged.records())
            assert values_of([damaged]) in ((None, joined) if not problems else (None,))
            refused += values_of([damaged]) is None
    assert refused


def last_observation(scenario: Scenario) -> Observation:
    """What the ranks of the reference hold at the end of a program."""
    seen: list[Observer] = []
    install = lambda ranks: seen.append(ranks.observer)  # noqa: E731
    records_of(scenario, install=install)
    inputs, _ = contract_of(scenario).resolve(scenario)
    return seen[-1].look(inputs.operations[-1])


def flipped(sheet: Sheet, at: int) -> Sheet:
    return sheet._replace(blob=sheet.blob[:at] + bytes([sheet.blob[at] ^ 1]) + sheet.blob[at + 1 :])


def exchanged(observation: Observation, number: int, part: int, sheet: Sheet) -> Observation:
    sheets = list(observation.sheets)
    sheets[number] = part, sheet
    return replace(observation, sheets=sheets)


def test_overflow_changes_the_scale_and_counters_only() -> None:
    axes = {"program": "overflow", "optimizer": "adamw/loss_scale=1024.0/schedule=halve", "model": "frozen_tower"}
    logical = observed(Scenario().with_axes({**axes, "checkpoint": "sharded", "mesh": "1x2x1"}))
    after = {op: {(k.role, k.fqn): v for k, v in logical.items() if k.op == op} for op in (1, 2)}
    changed = {key for key in after[1] if key in after[2] and after[1][key] != after[2][key]}
    assert {role for role, _ in changed} == {"scaler", "buffer", "compute_param"}
    assert np.frombuffer(after[2]["scaler", "scale"].data, np.float32) == 512
    assert not any(role in ("grad", "norm") for role, _ in after[2])


def test_parameters_without_a_gradient_never_get_state() -> None:
    logical = observed(Scenario().with_axes({"model": "unused", "program": "train"}))
    unused = {p.fqn for p in ZOO["unused"].unique_params if not p.spec.used}
    assert unused
    assert not [k for k in logical if k.fqn in unused and k.role not in ("param", "master")]


def test_master_is_the_widened_storage_at_build() -> None:
    axes = {"sharding": "zero1", "dtype": "bf16/master=fp32", "program": "train"}
    logical = observed(Scenario().with_axes(axes))
    param, master = (logical[Key(0, LIVE, role, "up.weight")] for role in ("param", "master"))
    assert (param.dtype, master.dtype) == ("bf16", "fp32")
    assert np.array_equal(np.frombuffer(master.data, np.uint32) >> 16, np.frombuffer(param.data, np.uint16))


def test_foreach_sgd_in_half_precision_beside_a_parameter_without_momentum() -> None:
    axes = {"model": "later", "dtype": "fp16/reduce=fp32", "mesh": "1x3x1", "program": "unfreeze", "seed": "5"}
    assert_equals_twin(Scenario().with_axes({**axes, "optimizer": "sgd/groups=one", "checkpoint": "gathered"}))


def test_offload_takes_whole_fragments_in_installed_order() -> None:
    axes = {"sharding": "zero1", "dtype": "mixed/master=fp32", "model": "twins", "mesh": "1x2x1", "offload": "cpu=0.5"}
    scenario = Scenario().with_axes(axes)
    spec = ZOO["twins"]
    inputs, placement = contract_of(scenario).resolve(scenario)
    session = Session(inputs, placement, spec, Catalogue(spec, inputs.seed), inputs.operations[0])
    session.build()
    assert session.installed == [["router.weight", "scale.weight", "a.weight", "b.weight"]]
    on_host = {s.stages.storage: s.offloaded for s in session.shards}
    assert on_host["fp32"] is not None
    assert on_host["fp32"].all()
    assert on_host["bf16"] is not None
    assert not on_host["bf16"].any()


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(ValueError, match="no checkpoint format 'dcp'"):
        records_of(Scenario(checkpoint="dcp"))


def test_an_unknown_fault_is_refused() -> None:
    with pytest.raises(UsageError, match="no-such-fault"):
        records_of(Scenario(faults=("no-such-fault",)))
