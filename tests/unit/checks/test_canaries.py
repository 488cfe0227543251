"""The canaries' own canary: a fault or a comparison that goes unnoticed fails the run, which says which one."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from shardproof.checks import canaries
from shardproof.checks.boundary_faults import Struck
from shardproof.checks.canaries import Detection, run_canaries
from shardproof.cli.main import entry
from shardproof.diagnosis import Explanation
from shardproof.errors import UsageError
from shardproof.faults import comparisons
from shardproof.faults.boundary import BOUNDARY, BoundaryFault
from shardproof.faults.catalogue import CATALOGUE, Fault, mechanisms, scenarios_of
from shardproof.faults.plain_scenario import strikes
from shardproof.laboratory.run_verdict import NEVER_STRUCK, NO_EFFECT
from shardproof.protocol.accepts import Accepts
from shardproof.protocol.registry import system_named
from shardproof.result import Result
from shardproof.space.constraints import impossible
from shardproof.verdict import ExitStatus, Verdict

from tests.boundary_fault_scenarios import REORDER, strikes_with

FAULT = CATALOGUE["no-op-load"]
RIGHT = mechanisms()[FAULT.mechanism][0]


def explained(mechanism: str) -> Explanation:
    return Explanation(mechanism, "likely", "text", (), ())


def detection(
    *verdicts: Verdict,
    control: Verdict = Verdict.PASS,
    explanations: tuple[Explanation, ...] = (),
    fault: Fault = FAULT,
) -> Detection:
    scenarios = scenarios_of(fault)
    planted = tuple(
        Result(scenario, "reference", "1", verdict, explanations=explanations)
        for scenario, verdict in zip(scenarios, verdicts, strict=False)
    )
    controls = tuple(Result(replace(s, faults=()), "reference", "1", control) for s in scenarios)
    return Detection(fault, planted, controls)


@pytest.mark.parametrize("verdict", Verdict)
def test_only_a_failure_of_the_system_counts_as_noticed(verdict: Verdict) -> None:
    noticed = verdict in (Verdict.MISMATCH, Verdict.CRASH, Verdict.HANG)
    assert detection(verdict).detected is noticed
    assert detection(Verdict.MISMATCH, verdict).detected is noticed
    assert detection(Verdict.MISMATCH, control=verdict).control is (verdict is Verdict.PASS)


def test_a_fault_without_a_result_is_not_noticed() -> None:
    assert not detection().detected
    assert not detection().named_within(1)


def test_top1_and_top3_are_about_what_the_catalogue_says_is_wrong() -> None:
    others = (explained("x1"), explained("x2"))
    assert detection(Verdict.MISMATCH, explanations=(explained(RIGHT), *others)).named_within(1)
    third = detection(Verdict.MISMATCH, explanations=(*others, explained(RIGHT)))
    assert (third.named_within(1), third.named_within(3)) == (False, True)
    assert not detection(Verdict.MISMATCH, explanations=(*others, explained("x3"), explained(RIGHT))).named_within(3)


def test_what_ends_the_run_cannot_be_explained() -> None:
    refused = next(fault for fault in CATALOGUE.values() if fault.mechanism == "refused")
    assert not detection(Verdict.CRASH, fault=refused).explainable
    assert not detection(Verdict.MISMATCH, fault=replace(FAULT, mechanism="")).explainable


def test_a_fault_without_effect_is_told_from_one_that_is_missed(
    outcome: dict[str, object], capsys: pytest.CaptureFixture[str]
) -> None:
    idle = detection(Verdict.PASS, Verdict.PASS)
    outcome["planted"] = [replace(idle, results=tuple(replace(r, reason=NO_EFFECT) for r in idle.results))]
    assert run_canaries(Path(), None, 1) == ExitStatus.HARNESS
    shown = capsys.readouterr().out
    assert f"HAD NO EFFECT: {FAULT.id}" in shown
    assert "NOT NOTICED" not in shown


def struck(fault: BoundaryFault, verdict: Verdict, reason: str = "") -> Struck:
    scenario = strikes_with(fault.id)[0]
    return Struck(fault, Result(scenario, scenario.system, "1", verdict, reason=reason))


def test_results_are_kept_where_explain_finds_them(
    outcome: dict[str, object], capsys: pytest.CaptureFixture[str]
) -> None:
    assert entry(["faults", "--out", "my canaries", "--fault", FAULT.id]) == ExitStatus.OK
    shown = capsys.readouterr().out
    command = next(line for line in shown.splitlines() if "explain: " in line)
    assert command.endswith(" --out 'my canaries'")
    assert entry(shlex.split(command.partition("explain: shardproof ")[2])) == ExitStatus.OK
    assert FAULT.id in capsys.readouterr().out


@pytest.fixture
def outcome(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[dict[str, object]]:
    """What the canaries find, to be spoilt by a test; everything is noticed."""
    found: dict[str, object] = {
        "planted": [detection(Verdict.MISMATCH, Verdict.MISMATCH)],
        "struck": [struck(fault, Verdict(fault.verdict)) for fault in BOUNDARY.values() if fault.id != REORDER],
    }
    monkeypatch.setattr(canaries, "_plant_all", lambda *_: found["planted"])
    monkeypatch.setattr(canaries, "_strike_all", lambda *_: found["struck"])
    monkeypatch.chdir(tmp_path)
    return found


def test_a_run_in_which_all_is_noticed(outcome: dict[str, object], capsys: pytest.CaptureFixture[str]) -> None:
    assert entry(["faults", "--json", "faults.json"]) == ExitStatus.OK
    shown = capsys.readouterr().out
    assert "1 of 1 faults noticed" in shown
    assert f"{len(comparisons.PAIRS)} of {len(comparisons.PAIRS)} noticed" in shown
    assert "NOT NOTICED" not in shown
    (row,) = json.loads(Path("faults.json").read_text())["faults"]
    assert row.keys() >= {"id", "bug_ids", "detected", "scenarios", "top1", "top3"}
    assert (row["id"], row["detected"], row["bug_ids"]) == (FAULT.id, True, list(FAULT.bug_ids))


def test_a_fault_that_goes_unnoticed_fails_the_run(
    outcome: dict[str, object], capsys: pytest.CaptureFixture[str]
) -> None:
    outcome["planted"] = [detection(Verdict.MISMATCH, Verdict.PASS)]
    assert run_canaries(Path(), Path("faults.json"), 1) == ExitStatus.HARNESS
    assert f"NOT NOTICED: {FAULT.id}" in capsys.readouterr().out
    assert json.loads(Path("faults.json").read_text())["faults"][0]["detected"] is False


def test_a_control_that_fails_fails_the_run(outcome: dict[str, object], capsys: pytest.CaptureFixture[str]) -> None:
    outcome["planted"] = [detection(Verdict.MISMATCH, Verdict.MISMATCH, control=Verdict.MISMATCH)]
    assert run_canaries(Path(), None, 1) == ExitStatus.HARNESS
    assert f"FAILS WITHOUT ITS FAULT: {FAULT.id}" in capsys.readouterr().out


@pytest.mark.parametrize("verdict", [Verdict.PASS, Verdict.UNKNOWN, Verdict.NONDETERMINISTIC])
def test_a_boundary_fault_with_another_verdict_fails_the_run(
    outcome: dict[str, object], capsys: pytest.CaptureFixture[str], verdict: Verdict
) -> None:
    fault = BOUNDARY["boundary.kill-rank"]
    strike = struck(fault, verdict, "PyPI is out of reach")
    outcome["struck"] = [strike]
    assert run_canaries(Path(), Path("faults.json"), 1) == ExitStatus.HARNESS
    shown = capsys.readouterr().out
    assert f"NOT NOTICED: {fault.id} on {strike.result.system}" in shown
    assert "(PyPI is out of reach)" in shown
    (row,) = json.loads(Path("faults.json").read_text())["boundary"]
    assert (row["id"], row["system"], row["detected"]) == (fault.id, strike.result.system, False)


def test_a_boundary_fault_that_never_struck_fails_the_run_whatever_the_verdict(
    outcome: dict[str, object], capsys: pytest.CaptureFixture[str]
) -> None:
    late = BOUNDARY["boundary.collective-late"]
    outcome["struck"] = [struck(late, Verdict.PASS, NEVER_STRUCK)]
    assert run_canaries(Path(), None, 1) == ExitStatus.HARNESS
    assert f"({NEVER_STRUCK})" in capsys.readouterr().out


def test_a_comparison_that_finds_nothing_fails_the_run(
    outcome: dict[str, object], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(canaries, "found_kind", lambda a, b: None)
    assert run_canaries(Path(), None, 1) == ExitStatus.HARNESS
    assert all(f"NOT NOTICED: {name}" in capsys.readouterr().out for name in list(comparisons.PAIRS)[:1])


def test_every_canary_is_a_scenario_that_its_system_runs() -> None:
    planted = [scenario for fault in CATALOGUE.values() for scenario in scenarios_of(fault)]
    for scenario in [*planted, *strikes()]:
        assert scenario.faults
        assert system_named(scenario.system).refusal(scenario) is None
        assert impossible(scenario) is None


def test_every_boundary_fault_strikes_some_system() -> None:
    named = {fault.partition("@")[0] for scenario in strikes() for fault in scenario.faults}
    assert named | {REORDER} == set(BOUNDARY)
    assert REORDER not in named, "a system has two collectives under way at once here: it need no longer stand alone"
    assert len(set(strikes())) == len(strikes())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("schema = 2", "schema: given 2"),
        ("schema = 1\nstrikes = []", "key: given 'strikes' (did you mean strike?); allowed: schema, axes, strike"),
        ("schema = 1\n[[strike]]\naxes = {}", "faults too"),
        ("schema = 1\n[[strike]]\nfaults = 'boundary.none'", "faults: given 'boundary.none'; allowed: boundary"),
        ("schema = 1\n[axes]\nfaults = 'boundary.kill-rank'", "axis: given 'faults'"),
        ("schema = 1\n[[strike]]\nfaults = 'boundary.kill-rank'\naxes = { mash = '1x2x1' }", "axis: given 'mash'"),
        ("schema = 1\n[axes]\nmesh = '2'\n[[strike]]\nfaults = 'boundary.kill-rank'", "mesh: given '2'"),
    ],
)
def test_a_malformed_file_of_strikes_is_a_clear_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str, said: str
) -> None:
    (tmp_path / "conformance.toml").write_text(text)
    system = SimpleNamespace(name="x", folder=tmp_path, accepts=Accepts("x"))
    monkeypatch.setattr("shardproof.faults.plain_scenario.all_systems", lambda: [system])
    with pytest.raises(UsageError) as refused:
        strikes()
    assert said in str(refused.value)


def test_a_planted_fault_is_noticed_and_its_control_passes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(canaries, "CATALOGUE", {FAULT.id: FAULT})
    (found,) = canaries._plant_all(1, tmp_path)
    assert found.detected
    assert found.control
    assert found.named_within(3)
    assert len(found.results) == len(FAULT.scenario_axes)


@pytest.mark.nightly
@pytest.mark.real
def test_a_struck_rank_comes_to_its_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(canaries, "strikes", lambda: strikes_with("boundary.kill-rank"))
    assert [(s.result.system, s.result.verdict) for s in canaries._strike_all(1)] == [
        ("megatron-core", Verdict.CRASH),
        ("torch-fsdp2", Verdict.CRASH),
    ]
