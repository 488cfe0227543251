"""Scripts of a trainer's failures: which runs they have, what they compare, what they refuse, and how they end.

The results are written by hand, so that every arm has one. The last test runs a script in a clean interpreter: with the
bug, without it, and where something else is wrong.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from shardproof.diff import Difference
from shardproof.export.case import NoExportError
from shardproof.export.issue import Written, render_issue
from shardproof.export.job import written
from shardproof.export.newest import not_asked
from shardproof.export.software import Software
from shardproof.export.trial import run
from shardproof.observe.logical import Key
from shardproof.program import expand
from shardproof.protocol import registry
from shardproof.result import ArmResult, FailedOp, Failure, Result
from shardproof.scenario import Scenario
from shardproof.trainer.cells import scenario_of
from shardproof.trainer.described import described
from shardproof.trainer.system import register
from shardproof.verdict import Verdict
from shardproof.world.interpreter import interpreter
from trainer_texts import FIT, STEPWISE, registered

from tests.paths import ROOT

DATA = "axes = {'mesh': ['2', '4'], 'lr': [0.1, 0.2], 'offload': [False, True]}\naltered = {'lr': '%s'}"


@pytest.fixture(autouse=True)
def _systems_of_before(monkeypatch: pytest.MonkeyPatch) -> None:
    registry.all_systems()
    monkeypatch.setattr(registry, "_SYSTEMS", dict(registry._SYSTEMS))


def made(folder: Path, methods: str = STEPWISE, wins: str = "run", **values: str) -> Scenario:
    return scenario_of(registered(folder, DATA % wins, methods), values)


def at(scenario: Scenario, arm: str, kind: str, number: int = 0) -> int:
    """The index of an operation of an arm: its first of that kind, or a later one."""
    return [op.index for op in expand(scenario) if (op.arm, op.kind) == (arm, kind)][number]


def mismatch(scenario: Scenario, arm: str, op: int, keys: Sequence[tuple[str, str]] = (("exp_avg", "0.weight"),),
             verdict: Verdict = Verdict.MISMATCH, kind: str = "bits", where: str = "live") -> Result:  # fmt: skip
    found = tuple(Difference(Key(op, where, role, name), kind, (0,), 1, 4) for role, name in keys)
    arms = (ArmResult("twice", "pass", ""), ArmResult(arm, verdict.value, f"What {arm} says."))
    return Result(
        scenario, scenario.system, "2.13.0", verdict, differences=found, failed_op=FailedOp(op, "step"), arms=arms
    )  # fmt: skip


def ended(scenario: Scenario, arm: str, op: int, verdict: Verdict, kind: str) -> Result:
    error = Failure(kind, "no such key", 0, "", op)
    arms = (ArmResult(arm, verdict.value, "It broke."),)
    return Result(scenario, scenario.system, "2.13.0", verdict, error=error, failed_op=FailedOp(op, "load"), arms=arms)


def runs(script: str) -> list[str]:
    """The calls of each function of a script, in one line each, and how the functions are run."""
    functions = re.findall(r"def (\w+)\(trainer, cell\):\n((?:    .*\n)+)", script)
    called = re.findall(r"    (.*in_fresh_ranks\(.*\))", script)
    return [
        f"{name}: {' '.join(re.sub(r'trainer.|checkpoint', '', body).split())}" for name, body in functions
    ] + called


def test_a_resume_is_put_beside_the_run_without_a_break(tmp_path: Path) -> None:
    scenario = made(tmp_path, offload="true")
    found = written(mismatch(scenario, "resumed", at(scenario, "resumed", "load")), None)
    assert runs(found.script) == [
        "uninterrupted: build(cell) step(0) step(1) save((0))",
        "resumed: build(cell) load((0))",
        'expected = in_fresh_ranks(Mine, uninterrupted, CELL, mesh="2", seed=0)',
        'observed = in_fresh_ranks(Mine, resumed, CELL, mesh="2", seed=1)',
    ]
    assert 'CELL = {"lr": 0.1, "offload": True}' in found.script
    assert 'COMPARED = {"exp_avg": ("0.weight",)}' in found.script
    assert found.script.startswith('"""What resumed says.\n\nRun `python repro.py`: status 1')
    assert found.draft.beside.keys() == {"mine.py", "stand_in.py"}
    assert found.draft.beside["mine.py"] == (tmp_path / "mine.py").read_text("utf-8")


def test_a_script_of_the_default_steps_has_fewer_than_forty_lines(tmp_path: Path) -> None:
    scenario = made(tmp_path)
    script = written(mismatch(scenario, "used", at(scenario, "used", "step", 2)), None).script
    code = script.rpartition('"""')[2]
    assert len([line for line in code.splitlines() if line.strip()]) < 40


USED = "build(cell) step(7) load((0)) step(2) step(3) save((3)) load((3)) step(4) save((3))"


@pytest.mark.parametrize(
    ("arm", "op", "told"),
    [
        ("unsaved", ("uninterrupted", "save"), ["not_saved: build(cell) step(0) step(1)",
                                                "saved: build(cell) step(0) step(1) save((0))"]),
        ("unsaved", ("unsaved", "step"), ["unsaved: build(cell) step(0)", "uninterrupted: build(cell) step(0)"]),
        ("twice", ("twice", "step"), ["uninterrupted: build(cell) step(0)", "twice: build(cell) step(0)"]),
        ("used", ("used", "load"), ["uninterrupted_to_save: build(cell) step(0) step(1) save((0))",
                                    "resumed: build(cell) load((0))", "used: build(cell) step(7) load((0))"]),
        ("used", ("used", "load", 2), ["uninterrupted_to_save: build(cell) step(0) step(1) save((0))",
                                       f"saved_again: {USED}", f"loaded_again: {USED} load((3))"]),
        ("other mesh 4", ("other mesh 4", "load"), ["uninterrupted: build(cell) step(0) step(1) save((0))",
                                                    "other_mesh: build(cell) load((0))"]),
        ("altered lr", ("altered lr", "load"), ["uninterrupted_to_save: build(cell) step(0) step(1) save((0))",
                                                "built: build(cell)", "altered: build(cell) load((0))"]),
    ],
)  # fmt: skip
def test_each_arm_has_its_runs(tmp_path: Path, arm: str, op: tuple[str, ...], told: list[str]) -> None:
    scenario = made(tmp_path)
    script = written(mismatch(scenario, arm, at(scenario, *op)), None).script
    assert [line for line in runs(script) if "in_fresh_ranks" not in line] == told
    assert ("gathered=True" in script) == arm.startswith("other mesh")
    assert ('mesh="4"' in script) == arm.startswith("other mesh")
    assert script.count('{**CELL, "lr": 0.2}') == (2 if arm.startswith("altered") else 0)


def test_where_the_checkpoint_is_to_win_an_altered_run_is_put_beside_a_resumed_one(tmp_path: Path) -> None:
    scenario = made(tmp_path, wins="checkpoint")
    script = written(mismatch(scenario, "altered lr", at(scenario, "altered lr", "load")), None).script
    assert 'expected = in_fresh_ranks(Mine, resumed, CELL, mesh="2", seed=1)' in script
    assert 'observed = in_fresh_ranks(Mine, altered, {**CELL, "lr": 0.2}, mesh="2", seed=1)' in script


def test_of_a_framework_with_a_loop_of_its_own_the_state_is_taken_after_an_update(tmp_path: Path) -> None:
    scenario = made(tmp_path, FIT)
    script = written(mismatch(scenario, "resumed", at(scenario, "resumed", "step")), None).script
    assert runs(script) == [
        "cut_to_save: fit(cell, 2, (2), None)",
        "uninterrupted: fit(cell, 4, (0), None)",
        "resumed: fit(cell, 4, None, (2))",
        'in_fresh_ranks(Mine, cut_to_save, CELL, mesh="2", seed=0)',
        'expected = in_fresh_ranks(Mine, uninterrupted, CELL, mesh="2", seed=0, after=3)',
        'observed = in_fresh_ranks(Mine, resumed, CELL, mesh="2", seed=1, after=1)',
    ]


def test_a_crash_and_a_hang_are_watched_where_they_happen(tmp_path: Path) -> None:
    scenario = made(tmp_path)
    op = at(scenario, "resumed", "load")
    crash = written(ended(scenario, "resumed", op, Verdict.CRASH, "pickle.UnpicklingError"), None).script
    assert '    with must_not_raise("UnpicklingError"):\n        trainer.load(checkpoint(0))' in crash
    assert "compare" not in crash
    hang = written(ended(scenario, "resumed", op, Verdict.HANG, "deadline"), None).script
    assert "    with must_end(60):\n        trainer.build(cell)\n        trainer.load(checkpoint(0))" in hang


def test_many_names_of_one_role_are_all_of_that_role_and_generators_keep_theirs(tmp_path: Path) -> None:
    scenario = made(tmp_path)
    keys = [("exp_avg", f"{n}.weight") for n in range(9)] + [("rng", "rank0.torch"), ("rng", "rank1.torch")]
    script = written(mismatch(scenario, "resumed", at(scenario, "resumed", "load"), keys), None).script
    assert 'COMPARED = {"exp_avg": ("*",), "rng": ("torch",)}' in script


def test_another_arm_goes_before_that_of_a_trainer_that_is_not_deterministic(tmp_path: Path) -> None:
    scenario = made(tmp_path)
    result = mismatch(scenario, "resumed", at(scenario, "resumed", "load"))
    unsteady = ArmResult("twice", Verdict.NONDETERMINISTIC.value, "It differs.")
    assert "What resumed says." in written(replace(result, arms=(unsteady, *result.arms)), None).script


def test_the_release_that_ran_and_what_stands_beside_it_are_named(tmp_path: Path) -> None:
    trainer = registered(tmp_path, "requires = ['theirs==1.0', 'psutil', 'einops>=0.8']")
    scenario = scenario_of(trainer, {}, version="2.0")
    result = replace(mismatch(scenario, "resumed", at(scenario, "resumed", "load")), version="2.0")
    assert '    pip install theirs==2.0 psutil "einops>=0.8"\n"""' in written(result, None).script


@pytest.mark.parametrize("arm", ["again", "written", "twin", "ranks agree"])
def test_an_arm_that_compares_no_state_is_refused(tmp_path: Path, arm: str) -> None:
    scenario = made(tmp_path)
    result = mismatch(scenario, arm, at(scenario, "uninterrupted", "save"))
    with pytest.raises(NoExportError, match=f"the arm `{arm}` .*; what shows it: shardproof replay {result.id}"):
        written(result, None)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("from shardproof.pytest import trainer", "mine.py imports shardproof.pytest, which is not there without"),
        ("import theirs", "mine.py imports the package theirs that lies beside it"),
        ("import repro", "a script has a file repro.py of its own; give the trainer's another name"),
    ],
)
def test_a_file_that_needs_what_a_script_has_not_is_refused(tmp_path: Path, line: str, reason: str) -> None:
    scenario = made(tmp_path)
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs/__init__.py").touch()
    (tmp_path / "repro.py").touch()
    (tmp_path / "mine.py").write_text(f"{line}\n{(tmp_path / 'mine.py').read_text('utf-8')}", "utf-8")
    with pytest.raises(NoExportError, match=re.escape(reason)):
        written(mismatch(scenario, "resumed", at(scenario, "resumed", "load")), None)


def test_modules_beside_the_file_come_along_and_a_file_named_like_its_library_gets_another_name(tmp_path: Path) -> None:
    text = "import mine\nimport parts\n" + registered_text(tmp_path)
    (tmp_path / "parts.py").write_text("import more", "utf-8")
    (tmp_path / "more.py").write_text("import numpy", "utf-8")
    (tmp_path / "mine.py").write_text(text, "utf-8")
    scenario = scenario_of(described(str(tmp_path / "mine.py")), {})
    found = written(mismatch(scenario, "resumed", at(scenario, "resumed", "load")), None)
    assert list(found.draft.beside) == ["mine_trainer.py", "parts.py", "more.py", "stand_in.py"]
    assert "from mine_trainer import Mine" in found.script


def registered_text(folder: Path) -> str:
    registered(folder, DATA % "run")
    return (folder / "mine.py").read_text("utf-8")


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ("'tied'", "the model tied of self.probe has parameters or buffers of a kind"),
        ("chosen()", r"which model `chosen\(\)` is that self.probe gives cannot be read"),
    ],
)
def test_a_model_of_the_probe_that_a_script_cannot_have_is_refused(tmp_path: Path, model: str, reason: str) -> None:
    methods = STEPWISE.replace("build(self, cell): ...", f"build(self, cell): self.probe({model}, cell)")
    scenario = made(tmp_path, methods)
    with pytest.raises(NoExportError, match=reason):
        written(mismatch(scenario, "resumed", at(scenario, "resumed", "load")), None)


def test_a_planted_fault_is_refused(tmp_path: Path) -> None:
    scenario = replace(made(tmp_path), faults=("rank_kill",))
    with pytest.raises(NoExportError, match="its failure is a planted fault"):
        written(mismatch(scenario, "resumed", at(scenario, "resumed", "load")), None)


def test_the_text_of_an_issue_has_the_calls_and_every_file(tmp_path: Path) -> None:
    scenario = made(tmp_path)
    found = written(mismatch(scenario, "resumed", at(scenario, "resumed", "load")), None)
    software = Software("3.11", {"torch": "2.13.0"})
    text = render_issue(found, "exp_avg: expected this, observed that", software, not_asked(found.case.result))
    opening = (
        "# What resumed says\n\n## Describe the bug\n\n`resumed` below should leave the same state as `uninterrupted`"
    )
    assert text.startswith(opening)
    assert text.count("def resumed(trainer, cell):\n    trainer.build(cell)\n    trainer.load(checkpoint(0))\n") == 1
    assert "`python repro.py` shows it, with status 1. It needs `mine.py` and `stand_in.py` beside it." in text
    assert "<details><summary><code>mine.py</code></summary>" in text
    assert "GPU" not in text


# Scripts that are run

PLAIN, PROBED = ROOT / "tests/trainers/plain_ddp.py", ROOT / "tests/trainers/probed_ddp.py"


def exported(file: Path, folder: Path, arm: str, keys: Sequence[tuple[str, str]], **values: str) -> Written:
    """The script of a difference after the load of an arm, in a folder with what it needs."""
    trainer = register(str(file)).trainer
    assert trainer is not None
    scenario = scenario_of(trainer, values)
    found = written(mismatch(scenario, arm, at(scenario, arm, "load"), keys), None)
    (folder / "repro.py").write_text(found.script, "utf-8")
    for name, text in found.draft.beside.items():
        (folder / name).write_text(text, "utf-8")
    return found


@pytest.mark.nightly
@pytest.mark.real
def test_a_script_ends_with_1_with_the_bug_and_with_0_and_125_otherwise(tmp_path: Path) -> None:
    here = interpreter(None)
    found = exported(PLAIN, tmp_path, "resumed", [("exp_avg", "weight"), ("step", "bias")], what="forgets")
    shown = run(tmp_path / "repro.py", here.path, (Path(here.site),))
    assert (shown.status, shown.shows) == (1, True), shown
    assert re.search(
        r"exp_avg of model.weight on rank 0: expected \[.*\] \(torch.float32, .*\), observed nothing", shown.said
    )

    (tmp_path / "repro.py").write_text(found.script.replace('"forgets"', '"sound"'), "utf-8")
    assert run(tmp_path / "repro.py", here.path, (Path(here.site),)).status == 0

    (tmp_path / "repro.py").write_text(found.script.replace('"forgets"', '"refuses"'), "utf-8")
    refused = run(tmp_path / "repro.py", here.path, (Path(here.site),))
    assert (refused.status, "Unsupported: this stack has no such thing" in refused.errors) == (125, True)

    text = found.draft.beside["plain_ddp.py"]
    (tmp_path / "plain_ddp.py").write_text(f"import no_such_library\n{text}", "utf-8")
    assert run(tmp_path / "repro.py", here.path, (Path(here.site),)).status == 125


@pytest.mark.nightly
@pytest.mark.real
def test_what_is_compared_has_to_be_there(tmp_path: Path) -> None:
    here = interpreter(None)
    exported(PLAIN, tmp_path, "resumed", [("exp_avg", "no_such.weight")], what="sound")
    outcome = run(tmp_path / "repro.py", here.path, (Path(here.site),))
    assert (outcome.status, outcome.shows) == (125, False)


@pytest.mark.real
def test_a_model_of_the_probe_is_part_of_the_script(tmp_path: Path) -> None:
    here = interpreter(None)
    found = exported(PROBED, tmp_path, "other mesh 4", [("param", "up.weight"), ("exp_avg", "up.weight")])
    assert '"up": {"weight": (' in found.draft.beside["stand_in.py"]
    outcome = run(tmp_path / "repro.py", here.path, (Path(here.site),))
    assert (outcome.status, outcome.said) == (0, "expected equal bits, and observed them in 4 values\n")


def test_a_failure_on_an_emulated_gpu_is_refused(tmp_path: Path) -> None:
    scenario = scenario_of(registered(tmp_path, "emulates = 'cuda'", STEPWISE), {})
    with pytest.raises(NoExportError, match="ran on an emulated GPU, which a script without shardproof has not"):
        written(mismatch(scenario, "resumed", at(scenario, "resumed", "load")), None)
