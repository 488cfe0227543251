"""Cells of a trainer as items: the decorator on functions and on classes.

*Verifies*: which items there are and what they are called, what pytest makes of each verdict, and every slip of the
keyboard. *Does not verify*: verdicts. All but the last test put results of their own in the place of a laboratory's.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from shardproof.protocol import registry
from shardproof.pytest import trainer
from shardproof.pytest.items import cell_message, readable_id
from shardproof.result import ArmResult, Failure
from shardproof.trainer import Trainer
from shardproof.trainer.system import register
from shardproof.verdict import Verdict

from tests.paths import PYTHONPATH
from tests.report_samples import cell

pytest_plugins = ["pytester"]

STAND_IN = """
import dataclasses
import shardproof.pytest.items as items
from shardproof.result import Result
from shardproof.verdict import Verdict
from tests.report_samples import cell

def examined(bench, scenario, known):
    shown = dict(scenario=scenario, system=scenario.system, version="1.0")
    failed = dataclasses.replace(cell(), **shown)
    assert any(plugin.endswith(scenario.system) or ":" in plugin for plugin in bench.modules), bench.modules
    match dict(word.split("=") for word in scenario.options).get("shows", "pass"):
        case "pass":
            return (Result(**shown, verdict=Verdict.PASS, arms=cell().arms[:1]),)
        case "mismatch":
            return (failed,)
        case "known":
            known_as = "issue-7" if known.issues else None
            return (dataclasses.replace(failed, known_issue=known_as, known_by="face" if known_as else ""),)
        case "refused":
            return (Result(**shown, verdict=Verdict.UNSUPPORTED, reason="not on this mesh"),)
        case "blind":
            return (Result(**shown, verdict=Verdict.UNKNOWN, reason="build ignores cell.seed"),)
items.Bench.examined = examined
"""
"""A conftest under which the trainer's axis `shows` decides what a cell shows."""

BODY = """
    axes = {"mesh": ["2", "4"], "shows": ["pass", "mismatch", "known", "refused", "blind"], "on": [False, True, None]}
    def build(self, cell): self.seed = cell.seed
    def step(self, index): pass
    def save(self, folder): pass
    def load(self, folder): pass
"""

MINE = f"from shardproof.trainer import Trainer\nclass Mine(Trainer):\n{BODY}"

Run = Callable[..., pytest.RunResult]


@pytest.fixture(autouse=True)
def _systems_of_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """What pytest registers in this process is not there for other tests."""
    registry.all_systems()
    monkeypatch.setattr(registry, "_SYSTEMS", dict(registry._SYSTEMS))


@pytest.fixture
def ran(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs pytest with the plugin on a test file of this text, beside a trainer's file."""
    monkeypatch.setenv("PYTHONPATH", PYTHONPATH, prepend=os.pathsep)
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    pytester.makeconftest(STAND_IN)
    folder = pytester.mkdir("below")
    (folder / "my_trainer.py").write_text(MINE, "utf-8")

    def run(text: str, *words: str, apart: bool = False) -> pytest.RunResult:
        head = "from shardproof.pytest import trainer\nfrom shardproof.trainer import Trainer\n"
        (folder / "test_it.py").write_text(head + text, "utf-8")
        call = pytester.runpytest_subprocess if apart else pytester.runpytest_inprocess
        return call("-p", "shardproof.pytest", "--strict-markers", "-p", "no:cacheprovider", *words)

    return run


def one(shows: str, body: str = "...", arguments: str = "", more: str = "") -> str:
    settings = f'{{"shows": "{shows}", "mesh": "2", "on": False}}'
    return f'@trainer("my_trainer.py", set={settings}{more})\ndef test_mine({arguments}): {body}\n'


@pytest.mark.parametrize(
    ("text", "outcomes"),
    [
        (one("pass"), {"passed": 1}),
        (one("pass", arguments="result"), {"passed": 1}),
        (one("mismatch"), {"failed": 1}),
        (one("mismatch", arguments="result"), {"failed": 1}),
        (one("mismatch", "repr(result)", arguments="result"), {"failed": 1}),
        (one("mismatch", "assert result.failed_arm.name == 'resumed'", arguments="result"), {"passed": 1}),
        (one("mismatch", "shardproof.check()", arguments="shardproof"), {"failed": 1}),
        (one("mismatch", "assert shardproof.result.arms", arguments="shardproof"), {"passed": 1}),
        (one("pass", "assert False, 'mine'", arguments="result"), {"failed": 1}),
        (one("known"), {"xfailed": 1}),
        (one("known", more=", known=False"), {"failed": 1}),
        (one("refused"), {"skipped": 1}),
        (one("blind"), {"errors": 1}),
    ],
)
def test_a_verdict_is_an_outcome_of_pytests(ran: Run, text: str, outcomes: dict[str, int]) -> None:
    ran(text).assert_outcomes(**outcomes)


def test_each_cell_is_an_item_that_says_what_differs_from_the_first_values(ran: Run) -> None:
    text = '@trainer("my_trainer.py", set={"shows": "pass"})\ndef test_mine(): ...\n'
    result = ran(text, "-v")
    result.assert_outcomes(passed=6)
    for name in ("plain", "mesh:4", "on:true", "mesh:4+on:none"):
        result.stdout.fnmatch_lines([f"below/test_it.py::test_mine?my_trainer:Mine/{name}-????????????? PASSED*"])
    ran(text, "-k", "mesh:4 and on:true").assert_outcomes(passed=1, deselected=5)
    ran(text, "-m", "my_trainer.Mine").assert_outcomes(passed=6)
    ran(text, "-m", "not my_trainer.Mine").assert_outcomes(deselected=6)


def test_few_cells_have_every_pair(ran: Run) -> None:
    text = '@trainer("my_trainer.py", set={"shows": ["pass", "refused"]}, strength=2)\ndef test_mine(): ...\n'
    outcomes = ran(text).parseoutcomes()
    assert 6 <= sum(outcomes.values()) < 12


def test_a_failure_says_the_failing_arms_sentences_and_no_python_of_ours(ran: Run) -> None:
    result = ran(one("mismatch"))
    result.stdout.fnmatch_lines(
        [
            "*mismatch of my_trainer:Mine, shows=mismatch",
            "*resumed: `load` restored no *",
            "*used: A trainer that has stepped*",
            "*shardproof trainer */below/my_trainer.py:Mine*--set shows=mismatch*",
        ]
    )
    result.stdout.no_fnmatch_line("*twice*")


@pytest.mark.parametrize(
    "head",
    ["@trainer\nclass TestIt(Trainer):", "@trainer()\nclass It(Trainer):", "@trainer(known=False)\nclass It(Trainer):"],
)
def test_a_class_is_a_test_of_its_own_file_whatever_its_name(ran: Run, head: str) -> None:
    result = ran(head + BODY, "-v", "-k", "mesh:4")
    known = "known" not in head
    expected = {"passed": 3, "failed": 3 if known else 6, "skipped": 3, "errors": 3, "deselected": 15}
    result.assert_outcomes(**expected, xfailed=3 if known else 0)
    result.stdout.fnmatch_lines(["*::test_arms?test_it:*/mesh:4-*"])


def test_a_class_may_say_more_in_a_method_of_its_own_and_hand_it_down(ran: Run) -> None:
    """The class below has cells of its own, and the test that it inherits."""
    more = '    def test_arms(self, result): assert result.verdict.value == "mismatch"\n'
    below = 'class TestBelow(TestIt):\n    axes = {"shows": ["pass", "mismatch"]}\n'
    result = ran(f'@trainer(set={{"shows": "mismatch"}})\nclass TestIt(Trainer):{BODY}{more}{below}', "-v")
    result.assert_outcomes(passed=7)
    result.stdout.fnmatch_lines(["*TestBelow::test_arms?test_it:TestBelow/*"])


def test_a_class_that_is_imported_is_no_test_of_the_importing_file(ran: Run, pytester: pytest.Pytester) -> None:
    file = pytester.path / "below" / "of_others.py"
    head = "from shardproof.pytest import trainer\nfrom shardproof.trainer import Trainer\n"
    file.write_text(f"{head}@trainer\nclass Mine(Trainer):{BODY}", "utf-8")
    assert ran("from of_others import Mine\n").ret == pytest.ExitCode.NO_TESTS_COLLECTED


def test_a_class_with_an_init_is_refused_since_pytest_would_leave_it_out() -> None:
    class WithInit(Trainer):
        def __init__(self) -> None:
            pass

    with pytest.raises(TypeError, match="use build or fit"):
        trainer(WithInit)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('@trainer("none.py")\ndef test_mine(): ...\n', "a Python file that is there"),
        ('@trainer("my_trainer.py:Other")\ndef test_mine(): ...\n', "Mine"),
        ('@trainer("my_trainer.py", set={"depth": 2})\ndef test_mine(): ...\n', "mesh, shows, on"),
        ('@trainer("my_trainer.py", set={"mesh": 3})\ndef test_mine(): ...\n', "2, 4"),
        ('@trainer("my_trainer.py", program="arms 1")\ndef test_mine(): ...\n', "arms 1 1 resumed"),
        ("@trainer()\ndef test_mine(): ...\n", "names no trainer"),
    ],
)
def test_a_slip_of_the_keyboard_is_told_at_collection(ran: Run, text: str, told: str) -> None:
    result = ran(text)
    assert result.ret == pytest.ExitCode.INTERRUPTED
    assert told in result.stdout.str()
    assert not re.search("--set|Traceback|_hookexec", result.stdout.str())


def test_two_trainers_of_one_name_would_be_taken_for_each_other(ran: Run, pytester: pytest.Pytester) -> None:
    other = pytester.mkdir("other")
    (other / "my_trainer.py").write_text(MINE, "utf-8")
    result = ran(one("pass") + one("pass").replace("my_trainer.py", "../other/my_trainer.py").replace("mine", "other"))
    assert result.ret in (pytest.ExitCode.INTERRUPTED, pytest.ExitCode.USAGE_ERROR)
    assert "names that differ" in result.stdout.str() + result.stderr.str()


@pytest.mark.nightly
def test_xdist_has_the_same_items(ran: Run) -> None:
    text = '@trainer("my_trainer.py", set={"mesh": "2", "on": True})\ndef test_mine(): ...\n'
    result = ran(text, "-n", "2", apart=True)
    result.assert_outcomes(passed=1, failed=1, xfailed=1, skipped=1, errors=1)


def test_a_crash_is_told_with_its_traceback_and_its_command(tmp_path: Path) -> None:
    file = tmp_path / "my_trainer.py"
    file.write_text('class Mine(Trainer):\n    axes = {"mesh": ["2", "4"], "forgets": [False, True]}\n'
                    "    def fit(self, cell, until, folder, resume): pass\n", "utf-8")  # fmt: skip
    register(str(file))
    error = Failure("builtins.ValueError", "no", 1, "Traceback\n  File 'x.py'\x1b[31m\nValueError: no")
    arms = (ArmResult("resumed", "crash", "`fit` raised ValueError: no."), ArmResult("cold", "pass", ""))
    scenario = cell().scenario.with_axes({"program": "arms 1 1 resumed"})
    crash = replace(cell(), scenario=scenario, verdict=Verdict.CRASH, arms=arms, error=error, differences=())
    text = cell_message(crash)
    assert text.startswith("crash of my_trainer:Mine, forgets=true mesh=4\n\n  resumed: `fit` raised ValueError: no.\n")
    assert "  ValueError: no\n" in text
    assert "\x1b" not in text
    command = f"  shardproof trainer {file}:Mine --set mesh=4 --set forgets=true --program 'arms 1 1 resumed'"
    assert text.endswith(command)
    assert readable_id(scenario).startswith("my_trainer:Mine/forgets:true+mesh:4-arms+1+1+resumed-")


REAL = """
import torch
import torch.distributed as dist
from shardproof.pytest import trainer
from shardproof.trainer import Trainer


@trainer(program="arms 1 1 resumed")
class TestMine(Trainer):
    axes = {"forgets": [False, True]}

    def build(self, cell):
        torch.manual_seed(cell.seed)
        self.cell, self.model = cell, torch.nn.Linear(4, 4)
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def step(self, index):
        self.model(torch.full((2, 4), index + 1.0)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def save(self, folder):
        if self.cell.rank == 0:
            torch.save([self.model.state_dict(), self.optimizer.state_dict()], folder / "last.pt")
        dist.barrier()

    def load(self, folder):
        model, optimizer = torch.load(folder / "last.pt")
        self.model.load_state_dict(model)
        if not self.cell.forgets:
            self.optimizer.load_state_dict(optimizer)
"""
"""A trainer in a test file, of which one cell forgets its optimizer."""


@pytest.mark.real
def test_a_real_trainer_is_judged_by_its_arms(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", PYTHONPATH)
    pytester.makepyfile(REAL)
    result = pytester.runpytest_subprocess("-p", "shardproof.pytest", "--strict-markers")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*TestMine, forgets=true*", "*resumed: After the resume the optimizer starts again*"])
