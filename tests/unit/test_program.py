"""Programs: legal sequences, and what `expand` decides for every operation."""

from __future__ import annotations

import pytest
from shardproof.errors import UsageError
from shardproof.program import PROGRAMS, does, expand, operations, require_telling, sessions
from shardproof.scenario import Mesh, Scenario


def test_every_named_program_is_legal_and_ends_with_something_to_compare() -> None:
    for name in PROGRAMS:
        assert operations(name)[-1] == "step", name


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("", "given ''"),
        ("resum", "given 'resum'"),
        ("build fly", "program 'build fly': operation: given 'fly'"),
        ("step", r"operation 0 \(step\) comes before a build"),
        ("build load", r"operation 1 \(load\) comes before any save"),
        ("build save reshard load", r"operation 3 \(load\) comes before a build"),
        ("build save reshard", "it ends without a build"),
    ],
)
def test_illegal_programs_are_refused_with_the_operation(program: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        operations(program)


WRONG = {
    "build step save load step": "build step save step load step",
    "build save load_model_only": "build save step load_model_only",
    "build step save step load load": "build step save step load step load",
    "build save build load_model_only load": "build save build load_model_only step load",
    "build step save unfreeze load": "build step save unfreeze step load",
    "step": "build step",
    "build load": "build step save build load",
    "load step": "build step save build load step",
    "build save reshard load": "build save reshard build load",
    "build step save restart": "build step save restart build",
    "reshard step": "reshard build step",
    "build step save load_previous step": "build step save step save step load_previous step",
    "build load_previous": "build step save build step save step load_previous",
    "build step recall step": "build step keep step recall step",
    "build keep restart build recall": "build keep restart build keep step recall",
    "build keep recall": "build keep step recall",
    "build apply_gradients": "build compute_gradients apply_gradients",
    "build compute_gradients step": "build compute_gradients apply_gradients step",
    "build step save accumulate load step": "build step save accumulate step load step",
    "build compute_gradients accumulate": "build compute_gradients apply_gradients accumulate",
}


@pytest.mark.parametrize("program", WRONG)
def test_a_wrong_program_is_refused_with_one_that_is_right(program: str) -> None:
    with pytest.raises(UsageError) as caught:
        require_telling(program)
    proposed = str(caught.value).rpartition("correct form: ")[2].strip("'")
    assert proposed == WRONG[program]
    require_telling(proposed)


IDLE = (
    "build step save keep build load recall",  # what is kept is what was saved
    "build step compute_gradients save apply_gradients save load_previous compute_gradients apply_gradients load",
    "build reshard build step save restart build step load_optimizer_only",  # the same gradient
    "build keep step recall save step load_optimizer_only step load_optimizer_only save step load_previous step "
    "load_optimizer_only step load",
    "build step save build load_optimizer_only load",  # the optimizer may have restored the parameters too
)


@pytest.mark.parametrize("program", IDLE)
def test_a_load_of_what_was_made_again_or_kept_twice_is_refused(program: str) -> None:
    with pytest.raises(UsageError, match="finds what it restores"):
        require_telling(program)


def test_a_step_after_another_load_makes_something_else() -> None:
    require_telling("build step save step save build load_previous step step load")


def test_every_named_program_tells_something() -> None:
    for name in PROGRAMS:
        require_telling(name)


def test_a_load_of_the_checkpoint_before_the_latest_is_a_load_in_the_plan() -> None:
    ops = expand(Scenario(program="previous"))
    (load,) = (op for op in ops if op.kind.startswith("load"))
    assert (load.kind, load.checkpoint, load.iteration) == ("load", 0, 1)
    assert does(Scenario(program="previous"), "load")


def test_what_is_kept_in_memory_has_its_own_iteration() -> None:
    ops = expand(Scenario(program="build keep step step save step recall step load step"))
    assert [op.iteration for op in ops if op.kind == "step"] == [0, 1, 2, 0, 2]


def test_half_a_step_takes_none_and_its_other_half_does() -> None:
    ops = expand(Scenario(program="pending"))
    found = [(op.kind, op.iteration) for op in ops if op.kind.endswith("gradients") or op.kind == "step"]
    assert found[:3] == [("step", 0), ("compute_gradients", 1), ("apply_gradients", 1)]


@pytest.mark.parametrize("between", ["step", "unfreeze", "reload_params", "load"])
def test_gradients_that_wait_are_stepped_with_before_anything_else(between: str) -> None:
    with pytest.raises(UsageError, match="comes while gradients of compute_gradients wait"):
        operations(f"build save compute_gradients {between} apply_gradients")


def test_a_load_that_crashes_needs_no_step_before_it() -> None:
    """The shrinker takes it away, and its scenario is still run."""
    assert operations("build save load") == ("build", "save", "load")


def test_resume_has_three_arms() -> None:
    ops = expand(Scenario(mesh=Mesh(1, 2, 1), load="grow"))
    assert [op.arm for op in ops] == ["main"] * 4 + ["uninterrupted"] + ["cold"] * 3 + ["resumed"] * 2
    assert [op.kind for op in ops] == [
        "build",
        "step",
        "step",
        "save",
        "step",
        "build",
        "step",
        "build",
        "load",
        "step",
    ]


def test_iterations_follow_the_trajectory_and_a_load_restores_them() -> None:
    ops = expand(Scenario())
    assert [op.iteration for op in ops if op.kind == "step"] == [0, 1, 2, 0, 2]


def test_a_model_only_load_keeps_the_iteration() -> None:
    ops = expand(Scenario(program="model_only"))
    assert [op.iteration for op in ops if op.kind == "step"] == [0, 1, 0, 1]


def test_every_build_starts_from_other_values() -> None:
    builds = [op for op in expand(Scenario(program="twice")) if op.kind == "build"]
    assert [op.init_seed for op in builds] == [0, 1, 2]


def test_loads_read_the_latest_checkpoint() -> None:
    ops = expand(Scenario(program="twice"))
    assert [(op.kind, op.checkpoint) for op in ops if op.checkpoint >= 0] == [
        ("save", 0),
        ("load", 0),
        ("save", 1),
        ("load", 1),
    ]


def test_reshard_keeps_the_ranks_on_the_same_mesh_and_restart_never_does() -> None:
    same, grown = Scenario(), Scenario(mesh=Mesh(1, 2, 1), load="grow")
    restart = Scenario(program="restart")
    assert [len(sessions(expand(s))) for s in (same, grown, restart)] == [1, 2, 2]
    assert {op.mesh for op in expand(grown) if op.session == 1} == {Mesh(1, 4, 1)}


def test_indices_are_positions_in_what_is_observed() -> None:
    for name in PROGRAMS:
        ops = expand(Scenario(program=name))
        assert [op.index for op in ops] == list(range(len(ops)))


def test_a_relation_without_an_answer_is_refused_only_where_it_is_needed() -> None:
    stuck = Scenario(mesh=Mesh(1, 8, 1), load="grow")
    with pytest.raises(UsageError, match="a relation that mesh 1x8x1 can follow within world 8"):
        expand(stuck)
    assert expand(stuck.with_axes({"program": "train"}))


def test_the_arms_of_a_trainer_are_telling() -> None:
    require_telling("arms 1 1 resumed")
