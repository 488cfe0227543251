"""Scenarios as items of pytest, and the decorator: what pytest makes of every verdict, and what it leaves alone.

*Verifies*: ids, markers, `-k`, `--lf`, exit codes, JUnit, results that travel under xdist, shares of torchrun's ranks.
*Does not verify*: verdicts. All but the last tests put results of their own in the place of a laboratory's.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from xml.etree import ElementTree

import junit_schema
import pytest
from shardproof.pytest.items import failure_message, readable_id
from shardproof.result import Result, from_elements
from shardproof.scenario import Scenario
from shardproof.store import DATABASE, Store
from shardproof.verdict import Standing, Verdict

from tests.paths import PYTHONPATH
from tests.report_samples import mismatch

pytest_plugins = ["pytester"]

MISMATCH = mismatch()

ROOT = Path(__file__).parents[3]

STAND_IN = """
import dataclasses
import shardproof.pytest.items as items
from shardproof.errors import HarnessError
from shardproof.result import Result
from shardproof.verdict import Verdict
from tests.report_samples import mismatch

MISMATCH = mismatch()
HOSTILE = "]]>\\x00\\x1b[31m\\ud800 <a href=\\"x\\" b='y'>&amp;" + "long " * 2000

def examined(bench, scenario, known):
    shown = dict(scenario=scenario, system=scenario.system, version="1.0")
    failed = dataclasses.replace(MISMATCH, **shown)
    match scenario.program:
        case "train":
            return (Result(**shown, verdict=Verdict.PASS),)
        case "resume":
            return (failed,)
        case "rollback":
            issue = "issue-7" if known.issues else None
            return (dataclasses.replace(failed, known_issue=issue, known_by="face" if issue else ""),)
        case "restart":
            return (Result(**shown, verdict=Verdict.UNSUPPORTED, reason="no restart here"),)
        case "twice":
            behind = dataclasses.replace(failed, behind="issue-7")
            return (dataclasses.replace(failed, known_issue="issue-7", known_by="part"), behind)
        case "save_first":
            return (Result(**shown, verdict=Verdict.UNKNOWN, reason="the judge died"),)
        case "model_only":
            raise HarnessError("no server")
        case "model_only_late":
            raise HarnessError(HOSTILE)
        case "load_after_step":
            return (Result(**shown, verdict=Verdict.UNSUPPORTED, reason=HOSTILE),)
items.Bench.examined = examined
"""
"""A conftest under which the program of a scenario decides what it shows."""

SPACE = """
schema = 1
[space]
title = "of a test"
exhaustive = ["program", "mesh"]
[axes]
program = [{programs}]
mesh = [{meshes}]
[system.reference]
"""

GPU_SUITE = """
import torch
from shardproof.pytest import scenarios

def test_on_a_device():
    assert torch.ones(2, device="cuda").sum().item() == 2

@scenarios(system="reference", program="train", model="short")
def test_a_scenario(): ...
"""
"""A suite for GPUs that also asks for a scenario."""

Run = Callable[..., pytest.RunResult]


@pytest.fixture
def ran(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs pytest with the plugin over a space of these programs and meshes, in this process."""
    monkeypatch.setenv("PYTHONPATH", PYTHONPATH, prepend=os.pathsep)
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    pytester.makeconftest(STAND_IN)
    pytester.makepyfile("def test_of_the_users_own(): pass")

    def run(
        *words: object, programs: str = "", meshes: str = "1x2x1", apart: bool = False, names: str = "mine.toml"
    ) -> pytest.RunResult:
        if programs:
            listed = [", ".join(f'"{text}"' for text in texts.split()) for texts in (programs, meshes)]
            pytester.path.joinpath("mine.toml").write_text(SPACE.format(programs=listed[0], meshes=listed[1]), "utf-8")
            words = ("--shardproof", names, *words)
        call = pytester.runpytest_subprocess if apart else pytester.runpytest_inprocess
        return call("-p", "shardproof.pytest", "--strict-markers", *words)

    return run


def test_every_standing_is_an_outcome_of_pytests(ran: Run) -> None:
    programs = "train resume rollback restart twice save_first"
    result = ran("--junitxml=run.xml", programs=programs)
    result.assert_outcomes(passed=1, failed=2, xfailed=1, skipped=1, errors=1)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["*Tensor-likes are not equal!*"])
    cases = {case.get("name", "").split("-")[3]: case for case in ElementTree.parse("run.xml").iter("testcase")}
    assert set(cases) == set(programs.split())
    tags = {name: {child.tag for child in case} - {"properties"} for name, case in cases.items()}
    assert tags["train"] == set()
    assert tags["resume"] == tags["twice"] == {"failure"}
    assert tags["rollback"] == tags["restart"] == {"skipped"}
    assert tags["save_first"] == {"error"}
    known = {each.get("name"): each.get("value") for each in cases["rollback"].iter("property")}
    assert known["shardproof.known_issue"] == "issue-7"
    assert known["shardproof.standing"] == Standing.KNOWN.value
    assert cases["rollback"].find("skipped").get("message", "").startswith("known issue issue-7")  # type: ignore[union-attr]
    assert cases["restart"].find("skipped").get("message") == "no restart here"  # type: ignore[union-attr]


def test_its_junit_is_valid_whatever_is_said(ran: Run) -> None:
    programs = "train resume rollback restart twice save_first model_only model_only_late load_after_step"
    ran("--junitxml=run.xml", programs=programs).assert_outcomes(passed=1, failed=2, xfailed=1, skipped=2, errors=3)
    assert junit_schema.complaints(Path("run.xml").read_bytes()) == []


def test_what_is_known_alone_is_no_failure(ran: Run) -> None:
    assert ran(programs="train rollback restart").ret == pytest.ExitCode.OK


def test_an_error_of_the_harness_is_no_assertion(ran: Run) -> None:
    result = ran("-rE", programs="model_only")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*HarnessError: no server*"])
    result.stdout.no_fnmatch_line("*AssertionError*")


def test_ids_are_readable_unique_and_typeable(ran: Run) -> None:
    result = ran("--collect-only", "-q", programs="train resume build+step+save", meshes="1x2x1 1x4x1 2x2x1")
    assert result.ret == pytest.ExitCode.USAGE_ERROR  # that is no program, and it is told once
    assert len([line for line in result.errlines if "program" in line]) == 1
    result = ran("--collect-only", "-q", programs="train resume", meshes="1x2x1 1x4x1 2x2x1")
    ids = [line for line in result.outlines if line.startswith("shardproof::")]
    assert len(set(ids)) == len(ids) == 6
    assert all(name.startswith("shardproof::reference/dense-fp32-") for name in ids)
    result.stdout.no_fnmatch_line("*test_of_the_users_own*")


def test_an_id_has_no_character_that_a_choice_does_not_take() -> None:
    dtypes = ("fp32/param=bf16/reduce=fp32", "bf16/master=fp32")
    versions = ("", "0.16.1+cured", "path:/some/where", "git:a/branch")
    texts = [
        readable_id(Scenario(system="reference", version=version).with_axes({"dtype": dtype, "program": program}))
        for dtype, version, program in product(dtypes, versions, ("resume", "build step save"))
    ]
    assert len(set(texts)) == len(texts)
    assert not [text for text in texts if set(text) & set(" []=,'\"") or "::" in text]
    assert texts[0].startswith("reference/dense-fp32+param:bf16+reduce:fp32-1x1x1-resume-")


@pytest.mark.parametrize(
    ("words", "passed"),
    [(("-k", "1x4x1"), 1), (("-m", "reference"), 2), (("-m", "not reference"), 0), (("-k", "train and reference"), 2)],
)
def test_pytest_chooses_as_it_does_among_tests(ran: Run, words: tuple[str, ...], passed: int) -> None:
    result = ran(*words, programs="train", meshes="1x2x1 1x4x1")
    result.assert_outcomes(passed=passed, deselected=2 - passed)
    assert result.ret == (pytest.ExitCode.OK if passed else pytest.ExitCode.NO_TESTS_COLLECTED)


def test_the_last_failed_run_again_alone_also_by_the_name_that_pytest_printed(ran: Run) -> None:
    first = ran("-rf", programs="train resume", meshes="1x2x1 1x4x1")
    first.assert_outcomes(passed=2, failed=2)
    again = ran("--lf", programs="train resume", meshes="1x2x1 1x4x1")
    again.assert_outcomes(failed=2, deselected=2)
    name = next(word for line in first.outlines for word in line.split() if word.startswith("shardproof::"))
    ran(name, programs="train resume", meshes="1x2x1 1x4x1").assert_outcomes(failed=1, deselected=3)
    other = ran("shardproof::none", programs="train")
    assert other.ret == pytest.ExitCode.USAGE_ERROR
    other.stderr.fnmatch_lines(["*not in the plan: shardproof::none*"])


def test_paths_that_are_named_are_collected_too(ran: Run) -> None:
    here = Path(next(Path.cwd().glob("test_*.py"))).name
    ran(here, programs="train").assert_outcomes(passed=2)


@pytest.mark.parametrize(
    "words",
    [
        ("--shardproof", "nothing-of-that-name"),
        ("--shardproof", "smoke", "--shardproof-system", "no-such-system"),
        ("--shardproof", "smoke", "--shardproof-set", "colour=red"),
        ("--shardproof", "smoke", "--shardproof-sample", "many"),
        ("--shardproof", "smoke", "--shardproof-shard", "3/2"),
        ("--shardproof", "smoke", "--shardproof-deadline-s", "soon"),
        ("--shardproof", "smoke", "--shardproof-plugin", "no_such_module"),
    ],
)
def test_a_slip_of_the_keyboard_is_pytests_usage_error(ran: Run, words: tuple[str, ...]) -> None:
    result = ran(*words)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: shardproof: *given*allowed*for example*"])


def test_scenario_files_get_their_plain_verdicts(ran: Run, pytester: pytest.Pytester) -> None:
    pytester.path.joinpath("bug.toml").write_text('schema = 1\n[scenario]\nprogram = "rollback"\n', "utf-8")
    ran("--shardproof", "bug.toml").assert_outcomes(failed=1)


DECORATED = """
from shardproof.pytest import scenarios

@scenarios(system="reference", program="{program}", mesh=["1x2x1", "1x4x1"]{more})
def test_mine({arguments}): {body}
"""


@pytest.mark.parametrize(
    ("program", "more", "arguments", "body", "outcomes"),
    [
        ("train", "", "", "...", {"passed": 2}),
        ("train", "", "shardproof", "shardproof.check()", {"passed": 2}),
        ("resume", "", "", "...", {"failed": 2}),
        ("resume", "", "shardproof", "shardproof.check()", {"failed": 2}),
        ("resume", "", "shardproof", "assert shardproof.result.differences", {"passed": 2}),
        ("rollback", "", "", "...", {"xfailed": 2}),
        ("rollback", ", known=False", "", "...", {"failed": 2}),
        ("restart", "", "", "...", {"skipped": 2}),
        ("save_first", "", "", "...", {"errors": 2}),
    ],
)
def test_a_decorated_test_stands_for_each_scenario(
    ran: Run, pytester: pytest.Pytester, program: str, more: str, arguments: str, body: str, outcomes: dict[str, int]
) -> None:
    text = DECORATED.format(program=program, more=more, arguments=arguments, body=body)
    path = pytester.makepyfile(test_decorated=text)
    result = ran(path.name, "-v")
    result.assert_outcomes(**outcomes)
    result.stdout.fnmatch_lines([f"test_decorated.py::test_mine?reference/dense-fp32-1x?x1-{program}-*"])


def test_a_decorator_that_names_what_is_not_there_is_an_error_of_collection(
    ran: Run, pytester: pytest.Pytester
) -> None:
    path = pytester.makepyfile(test_decorated=DECORATED.format(program="jump", more="", arguments="", body="..."))
    result = ran(path.name)
    assert result.ret == pytest.ExitCode.INTERRUPTED
    (told,) = [line for line in result.stdout.lines if line.startswith("test_decorated.py:")]
    assert re.match(r"test_decorated\.py:\d+: shardproof: @scenarios: program: given 'jump'", told)
    assert not re.search("--set|Traceback|_hookexec", result.stdout.str())


def test_a_body_that_fails_is_the_failure(ran: Run, pytester: pytest.Pytester) -> None:
    body = DECORATED.format(program="train", more="", arguments="", body="assert False, 'mine'")
    result = ran(pytester.makepyfile(test_decorated=body).name)
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines(["*AssertionError: mine*"])


def test_every_difference_is_told_in_the_words_of_assert_close() -> None:
    one = MISMATCH.differences[2]
    several = replace(MISMATCH, differences=tuple(replace(one, key=one.key._replace(fqn=f"p{n}")) for n in range(40)))
    text = failure_message(several)
    assert text.startswith("Tensor-likes are not equal!\n")
    assert [n for n in range(40) if f"{one.key.role} p{n}," not in text] == []
    assert text.count("Mismatched elements: ") >= 40
    assert text.endswith(several.scenario.to_toml())
    crash = Result(MISMATCH.scenario, "reference", "1", Verdict.HANG, reason="30 s are over")
    assert failure_message(crash).startswith("hang: 30 s are over\n")


def test_each_rank_of_torchrun_runs_its_share(ran: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("WORLD_SIZE", "2")
    passed = 0
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        outcomes = ran("-rs", programs="train rollback", meshes="1x2x1 1x4x1 1x3x1").parseoutcomes()
        assert sum(number for kind, number in outcomes.items() if kind != "warnings") == 6
        passed += outcomes.get("passed", 0) + outcomes.get("xfailed", 0)
    assert passed == 6


def test_results_are_kept_with_what_a_report_needs(ran: Run) -> None:
    ran("--shardproof-out=out", programs="train resume twice", meshes="1x2x1").assert_outcomes(passed=1, failed=2)
    with Store(Path("out") / DATABASE) as store:
        run = store.latest_run()
        assert run
        kept = store.results(run)
        assert sorted(result.counts_as.value for result in kept) == ["new", "new", "pass"]
        assert store.unfinished(run) == []
        assert store.run(run).ended_at
    assert Path("out/index.html").is_file()


def test_xdist_brings_results_and_choices_along(ran: Run) -> None:
    """And with pytest-reportlog beside it, where that is installed, a line of the log has all that is known."""
    logs = find_spec("pytest_reportlog") is not None
    words = ["-n2", "--shardproof-out=out", "-v", "-k", "not 1x3x1", *["--report-log=log.jsonl"] * logs]
    result = ran(*words, programs="train resume", meshes="1x2x1 1x3x1 1x4x1", apart=True)
    result.assert_outcomes(passed=2, failed=2)
    with Store(Path("out") / DATABASE) as store:
        kept = store.results(store.latest_run() or "")
    assert len(kept) == 4
    if logs:
        lines = map(json.loads, Path("log.jsonl").read_text("utf-8").splitlines())
        logged = [from_elements(data) for line in lines for data in line.get("shardproof", ())]
        assert {result.id: result for result in logged} == {result.id: result for result in kept}


def test_both_plugins_of_ours_are_loaded_at_once(ran: Run) -> None:
    """A suite for GPUs on an emulated device asks for scenarios, too."""
    words = ("-p", "shardproof.emulation.pytest_plugin", "--emulate=none", "--emulate-verdicts=verdicts", "test_gpu.py")
    Path("test_gpu.py").write_text(GPU_SUITE, "utf-8")
    result = ran(*words, programs="train resume restart", apart=True)
    result.assert_outcomes(passed=3, failed=1, skipped=1)
    seen = [json.loads(line) for line in Path("verdicts").read_text("utf-8").splitlines()]
    assert sum(line.get("outcome") == "passed" for line in seen) == 3


@pytest.mark.nightly
def test_real_scenarios_run_beside_an_emulated_device(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", PYTHONPATH, prepend=os.pathsep)
    pytester.makepyfile(GPU_SUITE)
    words = ("-p", "shardproof.pytest", "-p", "shardproof.emulation.pytest_plugin", "--emulate=none")
    pytester.runpytest_subprocess(*words).assert_outcomes(passed=2)


def test_without_its_options_it_loads_and_prints_nothing(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("""
        import sys
        def test_it():
            ours = {name for name in sys.modules if name.partition(".")[0] == "shardproof"}
            assert ours == {"shardproof", "shardproof.pytest"}
            assert not {"torch", "numpy", "click"} & set(sys.modules)
    """)
    os.environ["PYTHONPATH"] = PYTHONPATH
    result = pytester.run(sys.executable, "-m", "pytest", "-p", "shardproof.pytest", "-p", "no:hypothesispytest")
    result.assert_outcomes(passed=1)
    said = [line for line in result.outlines if not line.startswith("plugins: ")]  # pytest names what is installed
    assert "shardproof" not in "\n".join(said).replace(str(pytester.path), "")


def test_a_real_laboratory_judges(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass and a planted failure of the reference, with the variables of a rank around them; no ranks are forked."""
    monkeypatch.setenv("PYTHONPATH", PYTHONPATH)
    monkeypatch.setenv("MASTER_PORT", "1")
    pytester.makepyfile("""
        from shardproof.pytest import scenarios

        @scenarios(system="reference", faults="no-op-load", program=["train", "resume"])
        def test_a_load_that_loads_nothing(): ...
    """)
    result = pytester.runpytest_subprocess("-p", "shardproof.pytest", "--junitxml=run.xml")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*load_did_nothing*", "*Mismatched elements: * / *"])
    assert json.dumps(result.outlines).count("Expected ") > 10
