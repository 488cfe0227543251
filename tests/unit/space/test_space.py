"""Spaces, constraints and plans on real space files and on small ones written here."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from datetime import date
from itertools import groupby
from pathlib import Path

import pytest
from shardproof.errors import UsageError
from shardproof.models import ONE_MORE, zoo
from shardproof.program import PROGRAMS
from shardproof.protocol.accepts import Constraint
from shardproof.protocol.registry import all_systems, system_named
from shardproof.scenario import LOAD_RELATIONS, Mesh, Scenario
from shardproof.space.axis_values import meshes
from shardproof.space.constraints import CONSTRAINTS, constraints_of
from shardproof.space.files import ALL, WALKED_AXES, load_space, parse_settings, parse_strength, space_names
from shardproof.space.plan import Plan, Selection, in_shard, make_plan, parse_shard
from shardproof.space.plan_text import render_plan
from shardproof.space.preparation import servers_of
from shardproof.trainer import models as trainer_models

pytestmark = pytest.mark.usefixtures("shipped")

SMALL = """
schema = 1
[space]
title = "small"
exhaustive = ["dtype", "mesh"]
strength = 2
[axes]
dtype = ["fp32", "bf16", "mixed"]
mesh = ["world<=2"]
load = ["same", "grow", "shrink"]
model = ["dense", "short", "mixed_unit"]
program = ["resume", "train"]
[system.torch-fsdp2]
budget_s = 100
"""


def refusal(scenario: Scenario) -> str | None:
    """Why its system refuses a scenario, asked limit by limit."""
    return system_named(scenario.system).refusal(scenario)


@pytest.fixture
def small(tmp_path: Path) -> str:
    path = tmp_path / "small.toml"
    path.write_text(SMALL)
    return str(path)


def violated(scenario: Scenario) -> Constraint | None:
    """The first constraint that leaves a scenario out of a walk, or None."""
    return next((c for c in constraints_of(scenario.system) if c.excludes(scenario)), None)


EXCLUDED = [
    ("load-mesh", {"mesh": "1x8x1", "load": "grow"}),
    ("load-unused", {"program": "train", "load": "grow", "mesh": "1x2x1"}),
    ("checkpoint-unused", {"program": "train", "checkpoint": "full"}),
    ("tp-nothing", {"mesh": "1x1x2", "model": "unused"}),
    ("tp-change-nothing", {"load": "tp_change", "model": "unused"}),
    ("reshard-divisor", {"mesh": "1x4x1", "reshard_after_forward": "3"}),
    ("reshard-divisor", {"mesh": "1x4x1", "reshard_after_forward": "4"}),
    ("reshard-divisor", {"mesh": "1x4x1", "reshard_after_forward": "2", "load": "indivisible"}),
    ("reshard-zero1", {"sharding": "zero1", "reshard_after_forward": "false"}),
    ("sync-single", {"grad_sync": "every"}),
    ("uneven-single", {"grad_sync": "uneven", "sharding": "zero1", "mesh": "1x2x1"}),
    ("uneven-single", {"grad_sync": "uneven", "sharding": "zero1", "microbatches": "2"}),
    ("uneven-gather", {"grad_sync": "uneven", "microbatches": "2", "mesh": "1x2x1"}),
    (
        "uneven-model",
        {"grad_sync": "uneven", "microbatches": "2", "mesh": "1x2x1", "sharding": "zero1", "model": "lone"},
    ),
    ("schedule-nothing", {"program": "schedule_only"}),
    ("overflow-scale", {"program": "overflow"}),
    ("accumulation-single", {"program": "accumulation"}),
    ("group-schedule", {"program": "add_group", "model": "later", "optimizer": "adamw/schedule=halve"}),
    ("rare-decay", {"model": "rare", "optimizer": "sgd"}),
    ("muon-matrices", {"optimizer": "muon", "model": "dense"}),
    ("muon-impl", {"optimizer": "muon/impl=fused", "model": "twins"}),
    ("cycle-momentum", {"optimizer": "sgd/momentum=0.0/schedule=onecycle"}),
    ("tensor-lr", {"optimizer": "adamw/tensor_lr=true"}),
    ("unfreeze-nothing", {"program": "unfreeze"}),
    ("later-never", {"model": "later"}),
    ("master-sharding", {"dtype": "bf16/master=fp32"}),
    ("stages-sharding", {"sharding": "zero1", "dtype": "fp32/param=bf16"}),
    ("dtype-repeats", {"dtype": "bf16/param=bf16"}),
    ("dtype-repeats", {"dtype": "fp32/param=bf16/reduce=bf16"}),
    ("offload-fraction", {"offload": "cpu=0.5"}),
    ("replicate-instances", {"sharding": "replicate", "mesh": "2x2x1"}),
    ("experts-nothing", {"expert_parallel": "2", "mesh": "1x2x1"}),
    ("experts-load-mesh", {"model": "moe", "expert_parallel": "2", "mesh": "1x2x1", "load": "shrink"}),
    ("fp16-eps", {"dtype": "fp16"}),
    ("capturable-device", {"optimizer": "adamw/capturable=true"}),
    ("capturable-device", {"optimizer": "adamw/capturable=true", "device": "cuda", "offload": "cpu"}),
    ("capturable-device", {"optimizer": "sgd/capturable=true", "device": "cuda"}),
    ("kernel-0", {"optimizer": "sgd/impl=fused", "dtype": "bf16"}),
    ("kernel-0", {"optimizer": "sgd/impl=fused", "dtype": "mixed"}),
]


@pytest.mark.parametrize(("constraint", "axes"), EXCLUDED)
def test_each_constraint_excludes_its_example(constraint: str, axes: dict[str, str]) -> None:
    found = violated(Scenario().with_axes(axes))
    assert found is not None
    assert found.id == constraint


def test_every_constraint_has_an_example_and_a_reason_of_its_own() -> None:
    assert {name for name, _ in EXCLUDED} == {c.id for c in CONSTRAINTS}
    assert len({c.reason for c in CONSTRAINTS}) == len(CONSTRAINTS)


def test_a_systems_own_constraints_come_after_those_of_all_and_repeat_none() -> None:
    for system in all_systems():
        found = constraints_of(system.name)
        assert found == (*CONSTRAINTS, *system.accepts.constraints)
        assert len({c.id for c in found}) == len({c.reason for c in found}) == len(found), system.name


@pytest.mark.parametrize(
    "axes",
    [
        {},
        {"mesh": "1x4x1", "reshard_after_forward": "2"},
        {"mesh": "1x8x1", "program": "rollback"},
        {"program": "overflow", "optimizer": "adamw/loss_scale=8.0"},
        {"program": "unfreeze", "model": "later"},
        {"sharding": "zero1", "dtype": "bf16/master=fp32", "offload": "cpu=0.5", "checkpoint": "bucket_space"},
        {"sharding": "zero1", "dtype": "bf16/master=fp32", "optimizer": "sgd/impl=fused"},
        {"dtype": "mixed/reduce=fp32"},
        {"sharding": "replicate", "mesh": "2x1x1", "dtype": "bf16/master=fp32"},
        {"model": "moe", "expert_parallel": "2", "mesh": "1x2x1", "load": "grow"},
    ],
)
def test_sound_scenarios_are_left_in(axes: dict[str, str]) -> None:
    assert violated(Scenario().with_axes(axes)) is None


def test_there_are_38_meshes_up_to_world_8() -> None:
    assert len(meshes(8)) == 38
    assert meshes(2) == [Mesh(), Mesh(1, 1, 2), Mesh(1, 2, 1), Mesh(2, 1, 1)]


def test_the_plan_holds_every_valid_cell_and_no_excluded_scenario(small: str) -> None:
    plan = make_plan([load_space(small)])
    cells = {(str(s.dtype), str(s.mesh)) for s in plan.scenarios if not refusal(s)}
    assert cells == {(d, str(m)) for d in ("fp32", "bf16", "mixed") for m in meshes(2)}
    assert all(violated(s) is None for s in plan.scenarios)
    assert len(set(plan.scenarios)) == len({s.id for s in plan.scenarios}) == len(plan.scenarios)
    assert all(c.complete for w in plan.walked for c in w.coverages if c.strength == 2)


def test_what_a_system_refuses_is_planned_counted_and_last(small: str) -> None:
    plan = make_plan([load_space(small)])
    refused = [refusal(s) is not None for s in plan.scenarios]
    assert refused == sorted(refused)
    assert sum(refused) == sum(plan.unsupported.values()) > 0
    assert {(s.model, str(s.dtype)) for s in plan.scenarios if refusal(s)} == {("mixed_unit", "mixed")}
    assert all(plan.estimate_s(s) == 0 for s in plan.scenarios if refusal(s))


def test_exclusions_carry_their_reason_and_count(small: str) -> None:
    plan = make_plan([load_space(small)])
    unused = next(c.reason for c in CONSTRAINTS if c.id == "load-unused")
    assert plan.excluded[unused] == 2  # (grow, train) and (shrink, train)


def test_the_same_seed_gives_the_same_plan(small: str) -> None:
    first, second, other = (make_plan([load_space(small)], Selection(seed=seed)) for seed in (0, 0, 1))
    assert first.scenarios == second.scenarios
    assert first.scenarios != other.scenarios


def test_shards_partition_the_plan_by_id(small: str) -> None:
    whole = make_plan([load_space(small)])
    parts = [make_plan([load_space(small)], Selection(shard=(i, 3))).scenarios for i in (1, 2, 3)]
    assert sorted(s.id for part in parts for s in part) == sorted(s.id for s in whole.scenarios)
    assert all(sum(in_shard(s, (i, 3)) for i in (1, 2, 3)) == 1 for s in whole.scenarios)


def test_samples_are_distinct_valid_supported_and_seeded(small: str) -> None:
    plans = [make_plan([load_space(small)], Selection(sample=20, seed=seed)) for seed in (0, 0, 1)]
    assert plans[0].scenarios == plans[1].scenarios != plans[2].scenarios
    assert len(set(plans[0].scenarios)) == 20
    assert not any(violated(s) or refusal(s) for s in plans[0].scenarios)
    everything = make_plan([load_space(small)], Selection(sample=10**6))
    assert len(everything.scenarios) == everything.walked[0].valid


@pytest.mark.parametrize("number", [1, 5, 60])
def test_a_sample_is_a_number_in_all(number: int) -> None:
    """A sample is spread over the walks, evenly; where there are too many walks, some have none."""
    space = load_space("nightly")
    plan = make_plan([space], Selection(sample=number, systems=("torch-fsdp2", "deepspeed")))
    walks = [walk for walk in space.walks if walk.system in ("torch-fsdp2", "deepspeed")]
    drawn = [len(walked.supported) for walked in plan.walked]
    assert len(plan.scenarios) == number
    assert sum(drawn) == number
    assert len(drawn) == min(number, len(walks))
    assert max(drawn) - min(drawn) <= 1


def test_a_walk_with_few_scenarios_leaves_its_part_to_the_others() -> None:
    settings = {"mesh": ("1x2x1",), "dtype": ("bf16",), "program": ("resume",)}
    asked = Selection(sample=40, axes=settings, systems=("reference", "torch-fsdp2"))
    plan, whole = (make_plan([load_space("smoke")], replace(asked, sample=n)) for n in (40, 10**6))
    assert len(plan.scenarios) == min(40, len(whole.scenarios))


def test_a_part_of_a_space_has_the_walks_of_that_name_alone() -> None:
    part = load_space("nightly/switched")
    assert part.walks == tuple(walk for walk in load_space("nightly").walks if walk.part == "switched")
    assert len({walk.system for walk in part.walks}) >= 3
    with pytest.raises(UsageError, match=r"given 'nightly/none' .*allowed: .*nightly/switched"):
        load_space("nightly/none")


def test_strength_all_is_every_valid_scenario(small: str) -> None:
    plan = make_plan([load_space(small)], Selection(strength=ALL))
    supported = [s for s in plan.scenarios if not refusal(s)]
    assert len(supported) == plan.walked[0].valid
    with pytest.raises(UsageError, match=r"strength all on .*: given '\d+ scenarios'; allowed: up to 200000"):
        make_plan([load_space("nightly")], Selection(strength=ALL))


def test_set_replaces_and_widens_axes(small: str) -> None:
    chosen = parse_settings(["dtype=bf16", "seed=1,2", "dtype=fp32"])
    plan = make_plan([load_space(small)], Selection(axes=chosen))
    assert set(plan.counts("dtype")) == {"bf16", "fp32"}
    assert set(plan.counts("seed")) == {"1", "2"}


def test_a_comma_joins_faults_and_a_repeated_option_separates_them() -> None:
    assert parse_settings(["faults=a,b", "faults=c"]) == {"faults": ("a,b", "c")}


def test_systems_can_be_chosen_with_a_version(small: str) -> None:
    plan = make_plan([load_space(small)], Selection(systems=("torch-fsdp2@2.13.0",)))
    assert {(s.system, s.version) for s in plan.scenarios} == {("torch-fsdp2", "2.13.0")}


def test_a_plan_over_its_budget_is_refused_with_what_to_relax(small: str) -> None:
    space = load_space(small)
    plan = make_plan([space])
    plan.require_budget()
    Path(small).write_text(SMALL.replace("budget_s = 100", "budget_s = 0.5"))
    with pytest.raises(UsageError, match=r"time of torch-fsdp2: given '\d+ s'; allowed: up to 0 s.*--shard 1/\d+"):
        make_plan([load_space(small)]).require_budget()


def test_scenario_files_are_planned_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "one.toml"
    wanted = Scenario(system="torch-fsdp2", mesh=Mesh(1, 2, 1), model="twins")
    path.write_text(wanted.to_toml("a bug"))
    space = load_space(str(path))
    plan = make_plan([space])
    assert plan.scenarios == (wanted,)
    assert space.title == "a bug"
    assert not plan.is_walk


def test_a_scenario_file_may_ask_for_what_walks_leave_out_as_a_repetition(tmp_path: Path) -> None:
    path = tmp_path / "one.toml"
    path.write_text(Scenario(system="torch-fsdp2", grad_sync="every").to_toml())
    assert len(make_plan([load_space(str(path))]).scenarios) == 1
    path.write_text(Scenario(system="torch-fsdp2", program="overflow").to_toml())
    with pytest.raises(UsageError, match="overflow-scale"):
        make_plan([load_space(str(path))])


def test_a_file_may_list_several_scenarios(tmp_path: Path) -> None:
    path = tmp_path / "two.toml"
    path.write_text(
        'schema = 1\n[[scenario]]\nmodel = "short"\n[[scenario]]\nmicrobatches = 2\nsystem = "torch-fsdp2"\n'
    )
    found = [str(s) for s in load_space(str(path)).scenarios]
    assert found == ["model=short checkpoint=gathered", "system=torch-fsdp2 microbatches=2"]


@pytest.mark.parametrize("name", ["smoke", "nightly", pytest.param("weekly", marks=pytest.mark.nightly)])
def test_shipped_spaces_are_complete_at_their_strength_within_budget(name: str) -> None:
    plan = make_plan([load_space(name)])
    plan.require_budget()
    for walked in (walked for walked in plan.walked if not walked.walk.sample):
        reached = {c.strength: c.complete for c in walked.coverages if len(c.axes) == len(walked.coverages[0].axes)}
        assert reached[walked.walk.strength], walked.walk.system
        assert all(c.complete for c in walked.coverages if set(c.axes) <= set(walked.walk.three_way))
    text = render_plan(plan)
    assert text.startswith(f"{len(plan.scenarios)} scenarios")
    headings = [line.partition(": ")[0] for line in text.splitlines() if " valid scenarios, about " in line]
    assert len(headings) == len(set(headings)), "every walk is called otherwise"


def test_no_value_of_an_axis_is_told_as_none() -> None:
    text = render_plan(Plan((Scenario(), Scenario(options=("calibrating",)))))
    assert "  options               none 1, calibrating 1\n" in text


def test_the_main_walk_is_called_so_beside_the_parts_of_its_system() -> None:
    plan = make_plan([load_space("nightly")], Selection(systems=("torch-fsdp2",), sample=12))
    lines = render_plan(plan).splitlines()
    assert any(line.startswith("torch-fsdp2@+cured, the main walk: ") for line in lines)
    assert any(line.startswith("torch-fsdp2@+cured, part models: ") for line in lines)
    assert lines[1] == "  not counted: the search for a simpler scenario of each new cause, up to 5 min each"


def test_smoke_is_small() -> None:
    plan = make_plan([load_space("smoke")])
    assert 40 <= len(plan.scenarios) <= 80
    assert sum(plan.seconds.values()) < 40
    assert max(s.mesh.world for s in plan.scenarios) <= 4


OF_TRAINERS = {model.name for model in trainer_models.MODELS}
"""Models that only trainers build: `make nightly` walks those by themselves."""
SPECIAL = {"lr_groups", "moe", "sandwich", "ragged_unit"}
"""Models that anybody can build and that show defects of a few systems: the others need not walk them."""


@pytest.mark.parametrize("name", ["nightly", "weekly"])
def test_the_nightly_and_weekly_walk_everything_there_is(name: str) -> None:
    walks = load_space(name).walks
    walked = {axis: {text for walk in walks for text in walk.axes.get(axis, ())} for axis in WALKED_AXES}
    assert {text.removesuffix(ONE_MORE) for text in walked["model"]} == set(zoo()) - OF_TRAINERS
    assert walked["program"] == set(PROGRAMS)
    assert walked["load"] == set(LOAD_RELATIONS)
    for walk in walks:
        if not walk.part:
            assert {"dtype", "mesh", "offload"} <= set(walk.exhaustive)


@pytest.mark.parametrize("name", ["nightly", "weekly"])
def test_a_system_that_is_walked_is_walked_with_its_own_models(name: str) -> None:
    walks = load_space(name).walks
    for system in all_systems():
        own = [set(walk.axes["model"]) for walk in walks if walk.system == system.name]
        assert not own or {model.name for model in system.models} <= set().union(*own)


@pytest.mark.parametrize("name", ["nightly", "weekly"])
def test_the_reference_leaves_out_no_mesh_model_program_relation_or_format(name: str) -> None:
    (walk,) = (walk for walk in load_space(name).walks if (walk.system, walk.part) == ("reference", ""))
    others = (system for system in all_systems() if system.name != walk.system)
    of_systems = {model.name for system in others for model in system.models}
    of_others_too = {"moe", "gated", "gdn"}  # whose experts and fused weights the reference takes apart as well
    assert set(walk.axes["model"]) == (set(zoo()) - of_systems - SPECIAL - OF_TRAINERS) | of_others_too
    assert set(walk.axes["mesh"]) == {str(mesh) for mesh in meshes(8)}
    assert set(walk.axes["program"]) == set(PROGRAMS)
    assert set(walk.axes["load"]) == set(LOAD_RELATIONS)
    assert set(walk.axes["checkpoint"]) == {"gathered", "bucket_space", "model_space", "sharded"}


def test_the_scenarios_of_a_server_follow_each_other_and_the_cheap_servers_come_first() -> None:
    plan = make_plan([load_space("smoke")], Selection())
    servers = servers_of(plan.scenarios)
    turns = [name for name, _ in groupby(servers)]
    assert len(turns) == len(set(turns)) > 1
    costs = [sum(plan.estimate_s(s) for s, own in zip(plan.scenarios, servers, strict=True) if own == name)
             for name in turns]  # fmt: skip
    assert costs == sorted(costs)


def test_the_exposed_cells_come_first(small: str) -> None:
    selection = Selection(axes={"offload": ("none", "cpu"), "program": ("resume",)})
    plan = make_plan([load_space(small)], selection)
    first = plan.scenarios[0]
    assert str(first.offload) == "cpu"
    assert str(first.dtype) != "fp32"


def test_shipped_names_are_listed() -> None:
    assert {"smoke", "nightly", "weekly"} <= set(space_names())
    assert not {"costs", "known_issues"} & set(space_names())


def test_strengths_and_shards_parse() -> None:
    assert (parse_strength("2"), parse_strength("all")) == (2, ALL)
    assert len(WALKED_AXES) == ALL
    assert parse_shard("2/4") == (2, 4)
    nights = [parse_shard("tonight/3", date(2026, 12, day)) for day in (30, 31)] + [
        parse_shard("tonight/3", date(2027, 1, 1))
    ]
    assert sorted(nights) == [(1, 3), (2, 3), (3, 3)], "three nights in a row, over a year's end too, walk all"
    for refused in ("tonight/0", "tonight", "tonight/1/2", "today/2"):
        with pytest.raises(UsageError, match="--shard"):
            parse_shard(refused)


def test_planning_imports_nothing_heavy() -> None:
    heavy = "('torch', 'hypothesis', 'rich')"
    program = "import sys, shardproof.space.plan_text; "
    program += f"print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('modle = "moe"', r"mine\.toml: scenario 1: axis: given 'modle' \(did you mean model\?\).*: dtype = \"bf16\"$"),
        ('model = "moee"', r"mine\.toml: scenario 1: model: given 'moee' \(did you mean moe\?\)"),
        ('dtype = "bf61"', r"dtype storage: given 'bf61' \(did you mean bf16\?\)[^\n]*$"),
        ('dtype = "fp64"', r"dtype storage: given 'fp64'; allowed"),
        ('mehs = "1x2x1"', r"axis: given 'mehs' \(did you mean mesh\?\)"),
        ('system = "megatron"', r"mine\.toml: scenario 1: system: given 'megatron'"),
        ('checkpoint = "sharde"', r"1: checkpoint: given 'sharde' \(did you mean sharded\?\); [^\n]*$"),
        ('system = "torch-fsdp2"\ncheckpoint = "dcp+no_stric"', r"1: switch of checkpoint 'dcp': given 'no_stric'"),
        ('system = "torch-fsdp2"\ncheckpoint = "orbax"', r"1: checkpoint: given 'orbax'; allowed: dcp, .*\ninstead: "),
        ('faults = "stale-mastres"', r"mine\.toml: scenario 1: faults: given 'stale-mastres' \(did you mean stale-m"),
        ('options = ["none"]', r"mine\.toml: scenario 1: options: given \['none'\]; allowed: a text; for example: opt"),
        ('system = "torch-fsdp2"\noptions = "as_retured"', r"1: options: given 'as_retured' \(did you mean as_r"),
        ('program = "build step sve"', r"1: program 'build step sve': operation: given 'sve' \(did you mean save\?\)"),
    ],
)
def test_an_error_in_a_scenario_names_its_file(line: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(f'schema = 1\ntitle = "Mine"\n\n[scenario]\n{line}\n', "utf-8")
    with pytest.raises(UsageError, match=said):
        load_space(str(file))
