"""Under which conditions a cause shows: hand-made runs whose answer is known."""

from __future__ import annotations

import random
from itertools import product
from pathlib import Path

import pytest
from shardproof.protocol.registry import forget
from shardproof.report.conditions import Condition, condition_of, terms_of
from shardproof.scenario import Scenario
from shardproof.trainer.system import register

MESHES = ("1x1x1", "1x2x1", "2x2x1", "1x2x2")
OFFLOADS = ("none", "cpu=0.5", "cpu")
DTYPES = ("fp32", "bf16", "mixed/master=fp32", "bf16/master=fp32")
PROGRAMS = ("train", "resume", "twice")
EVERY = tuple(
    Scenario.from_axes({"mesh": mesh, "offload": offload, "dtype": dtype, "program": program, "sharding": "zero1"})
    for mesh, offload, dtype, program in product(MESHES, OFFLOADS, DTYPES, PROGRAMS)
)


def found(fails: object) -> Condition:
    assert callable(fails)
    condition = condition_of([s for s in EVERY if fails(s)], [s for s in EVERY if not fails(s)])
    assert condition is not None
    return condition


@pytest.mark.parametrize(
    ("fails", "terms"),
    [
        (lambda s: s.axis_text("offload") == "cpu", {"offload=cpu"}),
        (lambda s: s.offload.fraction > 0, {"offload>0"}),
        (lambda s: s.mesh.tp > 1, {"mesh=1x2x2"}),
        (lambda s: s.mesh.dp_shard > 1 and "load" in terms(s), {"dp_shard>1", "program does load"}),
        (
            lambda s: s.mesh.dp_shard > 1 and s.offload.fraction > 0 and "master=fp32" in s.axis_text("dtype"),
            {"dp_shard>1", "offload>0", "dtype has master=fp32"},
        ),
        (
            lambda s: s.axis_text("dtype") == "bf16" and s.axis_text("program") == "twice",
            {"dtype=bf16", "program=twice"},
        ),
    ],
)
def test_what_separates(fails: object, terms: set[str]) -> None:
    condition = found(fails)
    assert set(condition.terms) == terms
    assert condition.passing == 0
    assert condition.failing + condition.others == len(EVERY)


def terms(scenario: Scenario) -> set[str]:
    return {term.removeprefix("program does ") for term in terms_of(scenario)}


def test_what_passes_in_spite_of_it_is_counted_against() -> None:
    fails = [s for s in EVERY if s.axis_text("offload") == "cpu"]
    condition = condition_of(fails[:-3], [s for s in EVERY if s not in fails[:-3]])
    assert condition is not None
    assert condition.terms == ("offload=cpu",)
    assert (condition.failing, condition.passing) == (len(fails) - 3, 3)
    assert condition.text == "offload=cpu: 45 such scenarios fail and 3 pass; 96 others pass"


def test_a_cause_that_nothing_tells_from_what_passes() -> None:
    condition = condition_of(EVERY[::2], EVERY[1::2])
    assert condition is not None
    fails = list(EVERY)
    assert condition_of(fails, fails) == Condition((), len(fails), len(fails), 0)
    assert condition_of(fails, fails).text == "no axis value tells these 144 from the 144 that pass"  # type: ignore[union-attr]


def test_too_few_have_no_condition() -> None:
    assert condition_of(EVERY[:1], EVERY[1:]) is None
    assert condition_of(EVERY[1:], EVERY[:1]) is None
    assert condition_of((), ()) is None


def test_the_order_of_the_results_does_not_matter() -> None:
    fails = [s for s in EVERY if s.mesh.dp_shard > 1 and s.offload.fraction > 0]
    passes = [s for s in EVERY if s not in fails]
    mixed = random.Random(3)
    first = condition_of(fails, passes)
    for _ in range(5):
        mixed.shuffle(fails)
        mixed.shuffle(passes)
        assert condition_of(fails, passes) == first


def test_a_run_of_ten_thousand() -> None:
    draw = random.Random(1)
    axes = {"mesh": MESHES, "offload": OFFLOADS, "dtype": DTYPES, "program": PROGRAMS, "microbatches": ("1", "2", "3"),
            "model": ("dense", "many", "tied", "short"), "checkpoint": ("gathered", "sharded", "model_space"),
            "optimizer": ("adamw", "adam", "sgd")}  # fmt: skip
    every = [Scenario.from_axes({axis: draw.choice(values) for axis, values in axes.items()}) for _ in range(10_000)]
    fails = [s for s in every if s.mesh.tp > 1 and s.microbatches == 3 and s.axis_text("checkpoint") == "sharded"]
    passes = [s for s in every if s not in set(fails)]
    condition = condition_of(fails, passes)
    assert condition is not None
    assert set(condition.terms) == {"mesh=1x2x2", "microbatches=3", "checkpoint=sharded"}


def cell(options: str, system: str = "nobody_has:It") -> Scenario:
    return Scenario.from_axes({"system": system, "program": "arms", "options": options})


def test_each_axis_of_a_trainer_is_an_axis_of_its_own() -> None:
    """One axis makes it fail, whatever the others are; or the value of another that no word of `options` names."""
    bugs, meshes = ("", "bug=scheduler", "bug=group"), ("", "mesh=4")
    every = [cell("+".join(filter(None, (bug, mesh)))) for bug in bugs for mesh in meshes]
    failing = [scenario for scenario in every if "bug=scheduler" in scenario.options]
    condition = condition_of(failing, [scenario for scenario in every if scenario not in failing])
    assert condition == Condition(("bug=scheduler",), 2, 0, 4)
    failing = [scenario for scenario in every if "mesh=4" not in scenario.options]
    condition = condition_of(failing, [scenario for scenario in every if scenario not in failing])
    assert condition == Condition(("mesh=first value",), 3, 0, 3)


def test_the_first_value_of_a_trainers_axis_has_its_name_where_the_file_is_known(tmp_path: Path) -> None:
    file = tmp_path / "conditional.py"
    file.write_text(
        'class It(Trainer):\n    axes = {"mesh": ["2", "4"], "version": ["a", "b"]}\n    steps = (1, 0)\n'
        "    def build(self, cell): ...\n    def step(self, index): ...\n"
    )
    register(str(file))
    try:
        every = [cell(options, "conditional:It") for options in ("", "version=b", "mesh=4", "mesh=4+version=b")]
        assert condition_of(every[:2], every[2:]) == Condition(("mesh=2",), 2, 0, 2)
        assert condition_of(every[::2], every[1::2]) == Condition(("version of the trainer=a",), 2, 0, 2)
    finally:
        forget("conditional:It")
