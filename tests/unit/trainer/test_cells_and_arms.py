"""The cells of a trainer, as scenarios and back; and the sessions of each."""

from __future__ import annotations

from itertools import combinations, product
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shardproof.errors import UsageError
from shardproof.program import NO_CHECKPOINT
from shardproof.protocol import registry
from shardproof.scenario import Scenario
from shardproof.trainer.arms import expand, program_of, sessions_of
from shardproof.trainer.cells import cells, scenario_of, settings_of, values_of
from shardproof.trainer.described import Described
from shardproof.trainer.system import CellWords, TrainerSystem
from trainer_texts import FIT, STEPWISE, registered

from tests.effort import examples

AXES = {"a": ("1", "2"), "b": ("x", "y", "z")}
SIZES = st.lists(st.integers(1, 4), min_size=1, max_size=5)


@pytest.fixture(autouse=True)
def _systems_of_before(monkeypatch: pytest.MonkeyPatch) -> None:
    registry.all_systems()
    monkeypatch.setattr(registry, "_SYSTEMS", dict(registry._SYSTEMS))


def test_the_package_of_a_system_is_imported_as_the_system_says(tmp_path: Path) -> None:
    for name, imports in (("megatron-core", "megatron.core"), ("my-stack", "my_stack")):
        registered(tmp_path, f"requires = ['{name}==0.16.1', 'psutil']")
        package = registry.system_named("mine:Mine").own_package
        assert (package.imports, package.newest.version, package.beside) == (imports, "0.16.1", ("psutil",))


def with_axes(axes: dict[str, tuple[str, ...]]) -> Described:
    return Described(Path("mine.py"), "Mine", "", axes)


@settings(max_examples=examples(30), deadline=None)
@given(SIZES, st.integers(1, 4), st.integers(0, 9))
def test_few_cells_have_every_combination(sizes: list[int], strength: int, seed: int) -> None:
    axes = {f"a{n}": tuple(map(str, range(size))) for n, size in enumerate(sizes)}
    found = cells(with_axes(axes), {}, strength, seed)
    assert found[0] == dict.fromkeys(axes, "0")
    for some in combinations(axes, min(strength, len(axes))):
        assert {tuple(c[axis] for axis in some) for c in found} == set(product(*(axes[axis] for axis in some)))
    assert found == cells(with_axes(axes), {}, strength, seed)


def test_a_sample_is_drawn_by_the_seed_in_the_order_of_the_cells() -> None:
    trainer = with_axes({"a": tuple(map(str, range(30))), "b": ("x", "y")})
    every = cells(trainer, {})
    drawn = [cells(trainer, {}, sample=7, seed=seed) for seed in range(4)]
    assert all(some == [cell for cell in every if cell in some] and len(some) == 7 for some in drawn)
    assert drawn[1] == cells(trainer, {}, sample=7, seed=1) != drawn[2]
    assert cells(trainer, {}, sample=100) == every


def test_every_cell_comes_back_from_its_scenario_and_has_an_id_of_its_own() -> None:
    trainer = with_axes(AXES)
    found = cells(trainer, {})
    made = [scenario_of(trainer, cell) for cell in found]
    assert [values_of(trainer, scenario) for scenario in made] == found
    assert len({scenario.id for scenario in made}) == len(found) == 6


@pytest.mark.parametrize("more", [{"c": ("p", "q")}, {"b": ("x", "y", "z", "w")}])
def test_an_axis_or_a_value_that_is_added_renames_no_cell(more: dict[str, tuple[str, ...]]) -> None:
    old, new = with_axes(AXES), with_axes(AXES | more)
    ids = {scenario_of(new, cell).id for cell in cells(new, {})}
    assert {scenario_of(old, cell).id for cell in cells(old, {})} < ids


def test_settings() -> None:
    assert settings_of(with_axes(AXES), ["b=y,x,y", "a=2"]) == {"b": ("y", "x"), "a": ("2",)}


@pytest.mark.parametrize(
    ("texts", "told"),
    [(["b"], "AXIS=VALUE"), (["b="], "AXIS=VALUE"), (["a=1", "a=2"], "each axis once"), (["c=1"], "allowed: a, b"),
     (["a=3"], "another value has to stand in `axes` of mine.py")],
)  # fmt: skip
def test_wrong_settings(texts: list[str], told: str) -> None:
    with pytest.raises(UsageError, match=r"for example: --set a=2") as error:
        settings_of(with_axes(AXES), texts)
    assert told in str(error.value)


def test_an_open_axis_takes_any_value_and_brackets_hold_commas_together() -> None:
    trainer = Described(Path("mine.py"), "Mine", "", AXES, open=frozenset({"b"}))
    assert settings_of(trainer, ["b=x,C(k=1,l=(2,3)),y"]) == {"b": ("x", "C(k=1,l=(2,3))", "y")}
    scenario = scenario_of(trainer, {"a": "1", "b": "C(k=1,l=(2,3))"})
    assert values_of(trainer, scenario) == {"a": "1", "b": "C(k=1,l=(2,3))"}
    assert Scenario.from_axes(scenario.axis_values()) == scenario
    with pytest.raises(UsageError, match="or another value without blanks"):
        settings_of(trainer, ["b=C(k = 1)"])


def test_a_system_takes_the_values_of_its_open_axes(tmp_path: Path) -> None:
    trainer = registered(tmp_path, "axes = {'a': [1, 2], 'kind': ['adamw', ...]}")
    system = registry.system_named(trainer.system)
    assert isinstance(system, TrainerSystem)
    words = CellWords({}, trainer)
    assert not words.refuses(("a=2", "kind=torch.optim.SGD(lr=1)"))
    assert all(words.refuses((word,)) for word in ("a=3", "b=1", "kind=x y"))
    assert system.refusal(scenario_of(trainer, {"a": "2", "kind": "mine.Own"})) is None


def test_too_many_cells() -> None:
    with pytest.raises(UsageError, match="given 1048576; allowed: up to 100000"):
        cells(with_axes({f"a{n}": ("0", "1") for n in range(20)}), {}, 2)


# Arms

ALL = [
    "uninterrupted",
    "twice",
    "unsaved",
    "resumed",
    "second resume",
    "used",
    "other mesh 2x2",
    "other mesh 1",
    "altered lr",
]
DATA = "axes = {'mesh': ['2', '2x2'], 'lr': [1, 2]}\naltered = {'lr': 'run'}"


def arms_of(folder: Path, methods: str, program: str = "arms") -> dict[str, str]:
    scenario = scenario_of(registered(folder, DATA, methods), {}, program=program)
    ops = expand(scenario)
    assert [op.index for op in ops] == list(range(len(ops)))
    assert [op.session for op in ops] == sorted(op.session for op in ops)
    found = sessions_of(scenario)
    assert all(op.mesh.world == {"2x2": 4, "1": 1}.get(s.of, 2) and op.arm == s.name for s in found for op in s.ops)
    return {s.name: " ".join(f"{op.kind}{op.iteration}" for op in s.ops) for s in found}


def test_the_sessions_of_a_stepwise_trainer(tmp_path: Path) -> None:
    found = arms_of(tmp_path, STEPWISE)
    assert list(found) == ALL
    assert found["twice"] == found["uninterrupted"] == "build0 step0 step1 save2 step2 step3"
    assert found["unsaved"] == "build0 step0 step1 step2 step3"
    assert found["resumed"] == "build0 load2 save2 step2 save3 step3"
    assert found["second resume"] == "build0 load3 step3"
    assert found["used"] == "build0 step7 load2 step2 step3 save4 load4 step4 save5 load5"
    assert found["other mesh 2x2"] == found["other mesh 1"] == "build0 load2 step2 step3"
    assert found["altered lr"] == "build0 load2 step2"


def test_the_sessions_of_a_trainer_with_fit(tmp_path: Path) -> None:
    found = arms_of(tmp_path, FIT)
    assert list(found) == [*ALL[:3], "cut", "resumed", "stopped", "second resume", *ALL[6:]]
    assert found["uninterrupted"] == "fit4 step0 step1 step2 step3"
    assert (found["cut"], found["resumed"], found["altered lr"]) == (
        "fit2 step0 step1",
        "fit4 step2 step3",
        "fit3 step2",
    )
    assert (found["stopped"], found["second resume"]) == ("fit3 step2", "fit4 step3")


def test_the_way_with_the_first_mesh_runs_on_it(tmp_path: Path) -> None:
    data = "axes = {'mesh': ['1', '2'], 'way': ['a', 'b']}\nalike = {'mesh': 'rounding', 'way': 'bits'}"
    trainer = registered(tmp_path, data, STEPWISE)
    found = sessions_of(scenario_of(trainer, {"mesh": "2", "way": "b"}, program="arms 1 0"))
    assert {session.name: session.ops[0].mesh.world for session in found} == {
        "uninterrupted": 2, "twice": 2, "alike mesh": 1, "alike way": 2,
    }  # fmt: skip
    first = sessions_of(scenario_of(trainer, {"mesh": "1", "way": "b"}, program="arms 1 0"))
    assert [session.name for session in first] == ["uninterrupted", "twice", "alike way"]


def test_the_second_save_lies_as_far_on_as_the_first_where_steps_are_left(tmp_path: Path) -> None:
    found = arms_of(tmp_path, STEPWISE, "arms 2 4 resumed second-resume")
    assert found["resumed"] == "build0 load2 save2 step2 step3 save4 step4 step5"
    assert found["second resume"] == "build0 load4 step4 step5"
    (tmp_path / "fit").mkdir()
    found = arms_of(tmp_path / "fit", FIT, "arms 2 3 second-resume")
    assert (found["stopped"], found["second resume"]) == ("fit4 step2 step3", "fit5 step4")


def test_a_program_chooses_steps_and_sessions(tmp_path: Path) -> None:
    found = arms_of(tmp_path, STEPWISE, "arms 1 1 resumed")
    assert found == {"uninterrupted": "build0 step0 save1 step1", "resumed": "build0 load1 save1 step1"}
    assert list(arms_of(tmp_path, FIT, "arms 1 1 resumed")) == ["uninterrupted", "cut", "resumed"]
    assert "resumed" in arms_of(tmp_path, STEPWISE, "arms 1 1 used")  # with which it is compared
    assert "cut" in arms_of(tmp_path, FIT, "arms 1 1 other-mesh")  # whose checkpoint it loads
    assert "cut" in arms_of(tmp_path, FIT, "arms 1 2 stopped")
    assert list(arms_of(tmp_path, STEPWISE, "arms other-mesh")) == ["uninterrupted", "other mesh 2x2", "other mesh 1"]


@pytest.mark.parametrize(("methods", "first"), [(STEPWISE, "build0"), (FIT, "fit2")])
def test_without_steps_after_the_save_nothing_is_saved(tmp_path: Path, methods: str, first: str) -> None:
    steps = f"{first} step0 step1"
    assert arms_of(tmp_path, methods, "arms 2 0") == {"uninterrupted": steps, "twice": steps}
    assert arms_of(tmp_path, methods, "arms 2 0 uninterrupted") == {"uninterrupted": steps}
    ops = expand(scenario_of(registered(tmp_path, DATA, methods), {}, program="arms 2 0"))
    assert {op.checkpoint for op in ops} == {NO_CHECKPOINT}
    with pytest.raises(UsageError, match="no save: uninterrupted, twice, alike"):
        arms_of(tmp_path, methods, "arms 2 0 resumed")


def test_a_trainer_that_cannot_save_is_asked_for_no_save() -> None:
    trainer = Described(Path("mine.py"), "Mine", "", AXES, steps=(3, 0), saves=False)
    assert program_of(trainer, "arms") == (3, 0, frozenset())
    with pytest.raises(UsageError, match="the trainer has no save and no load"):
        program_of(trainer, "arms 1 1")


@pytest.mark.parametrize(("methods", "first"), [(STEPWISE, "build0"), (FIT, "fit4")])
def test_another_way_to_compute_the_same_has_a_session(tmp_path: Path, methods: str, first: str) -> None:
    trainer = registered(tmp_path, f"{DATA}\nalike = {{'lr': 'bits'}}", methods)
    names = {lr: [s.name for s in sessions_of(scenario_of(trainer, {"lr": lr}))] for lr in ("1", "2")}
    assert names["2"] == [*names["1"][:3], "alike lr", *names["1"][3:]]
    alike = next(s for s in sessions_of(scenario_of(trainer, {"lr": "2"})) if s.name == "alike lr")
    assert " ".join(f"{op.kind}{op.iteration}" for op in alike.ops) == f"{first} step0 step1 step2 step3"


@pytest.mark.parametrize("program", ["arm", "arms 1", "arms 0 1", "arms 1 101", "arms 1 x", "arms 1 1 absent"])
def test_wrong_programs(program: str) -> None:
    with pytest.raises(UsageError, match="for example: arms 1 1 resumed"):
        program_of(with_axes(AXES), program)
