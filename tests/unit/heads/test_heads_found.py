"""What a port puts together from results, with a laboratory that only answers: causes, cures, repairs, Ctrl-C."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from shardproof.heads import port as ported
from shardproof.heads.claims import Answered, Claim
from shardproof.heads.port import Asked, Port, port
from shardproof.heads.regressions import RegressionRun, State, beyond, judged, regressions
from shardproof.issues.cure_check import NOT_SHOWN, REPAIRED, STALE, CureCheck
from shardproof.issues.findings import section_of
from shardproof.issues.known_issues import KnownIssues, known_issues_of
from shardproof.protocol.system import System
from shardproof.result import Failure, Result
from shardproof.scenario import Scenario
from shardproof.verdict import Verdict
from shardproof.world.interpreter import interpreter
from shardproof.world.overlay import Overlay
from shardproof.world.resolved import Resolved, named

from tests.unit.heads_system import HEADS_SYSTEM, TRAIN, write_tree

FINDINGS = section_of(HEADS_SYSTEM).findings
KNOWN = KnownIssues(known_issues_of(HEADS_SYSTEM))
ASKED = Asked(HEADS_SYSTEM, "git:head", "1.0", quick=True)
Answer = Callable[[Scenario], Result]


@dataclass
class Laboratory:
    """Answers as it is told. after: a Ctrl-C comes after so many results of scenarios side by side."""

    answer: Answer
    after: int | None = None

    def examine_one(self, scenario: Scenario, *, confirm: bool = True) -> Result:
        return self.answer(scenario)

    def confirmed(self, result: Result) -> Result:
        return result

    def witness(self, issue: object, result: Result) -> Result:
        return result

    def side_by_side(self, work: Callable[[Scenario], Any], scenarios: Iterable[Scenario]) -> Iterator[Any]:
        for number, scenario in enumerate(scenarios):
            if number == self.after:
                raise KeyboardInterrupt
            yield work(scenario)


def a(verdict: Verdict, **more: Any) -> Answer:
    return lambda scenario: Result(scenario, "heads", "1.1+git.abc", verdict, **more)


def ported_by(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: Answer, *, after: int | None = None,
    checks: tuple[CureCheck, ...] = (), train: str = TRAIN,
) -> Port:  # fmt: skip
    """A port of a tree on which every scenario gives that answer, and the conformance kit is content."""
    trees = {"1.0": write_tree(tmp_path / "base"), "git:head": write_tree(tmp_path / "head", train=train)}

    class Places:
        def __init__(self, *_: object) -> None: ...

        def resolve(self, system: System, version: str) -> Resolved:
            return named(system, version, interpreter())

        def install(self, software: Resolved) -> Resolved:
            head, tree = software.is_tree, trees[software.release]
            return software.on(
                Overlay("1.1+git.abc" if head else "1.0", (tree,), walked=not head, offers=() if head else None)
            )

    monkeypatch.setattr(ported, "Environments", Places)
    monkeypatch.setattr(ported, "_stale", lambda *_: {"77": "the code moved: headslib/core/defects.py, line 1"})
    monkeypatch.setattr(ported, "log_between", lambda *_: None)
    monkeypatch.setattr(ported, "check_system", lambda *_: iter(()))
    monkeypatch.setattr(ported, "checked", lambda *_: list(checks))
    kept: list[Result] = []
    found = port(ASKED, Laboratory(answer, after), KNOWN, None, kept.append, lambda line: None)  # type: ignore[arg-type]
    assert len(kept) >= found.reached
    return found


def test_one_reason_is_one_line_whatever_rank_met_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = iter(range(100))

    def answer(scenario: Scenario) -> Result:
        return a(Verdict.UNKNOWN, reason=f"our reader does not know `x`\nrank {next(ranks)}")(scenario)

    found = ported_by(tmp_path, monkeypatch, answer)
    (misfit,) = found.misfits
    assert misfit.what == "our reader does not know `x`"
    assert len(misfit.results) == found.reached == found.hidden == found.planned
    assert found.status == 3
    assert (found.new, found.repaired) == ((), ())


@pytest.mark.parametrize("verdict", [Verdict.UNKNOWN, Verdict.CRASH])
def test_what_ran_into_a_renamed_argument_is_ours_whoever_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verdict: Verdict
) -> None:
    said = "train() got an unexpected keyword argument 'depth'"
    error = Failure("TypeError", said, 0) if verdict is Verdict.CRASH else None
    answer = a(verdict, reason="" if error else f"TypeError: {said}", error=error)
    found = ported_by(tmp_path, monkeypatch, answer, train=TRAIN.replace("depth", "layers"))
    (misfit,) = found.misfits
    assert misfit.what == "train() takes no 'depth' any more; new there: 'layers'"
    assert misfit.place == "headslib/core/loop.py:1"
    assert found.read_only == ()
    assert found.new == ()


def test_what_is_gone_and_nothing_ran_into_changes_no_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = ported_by(tmp_path, monkeypatch, a(Verdict.PASS), train=TRAIN.replace("depth", "layers"))
    assert [each.argument for each in found.read_only] == ["depth"]
    assert found.misfits == ()
    assert found.status == 0


def test_entries_whose_regressions_pass_are_repaired(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = ported_by(tmp_path, monkeypatch, a(Verdict.PASS))
    assert [repair.name for repair in found.repaired] == ["heads-77", "heads-elsewhere"]


def test_a_failure_that_no_entry_has_is_new_once_for_a_signature(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = ported_by(tmp_path, monkeypatch, a(Verdict.CRASH, error=Failure("KeyError", "'moment'", 0)))
    (new,) = found.new
    assert len(new.results) == found.reached
    assert new.names == ("77", "elsewhere")
    assert found.status == 1


def test_ctrl_c_keeps_what_was_reached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = ported_by(tmp_path, monkeypatch, a(Verdict.PASS), after=1)
    assert (found.interrupted, found.reached, found.status) == (True, 2, 130)
    assert found.planned > 2


@pytest.mark.parametrize(
    ("standing", "shows", "said"),
    [(STALE, "crash: step: x", ["cure 77 is stale: the code moved; crash: step: x"]),
     (NOT_SHOWN, "unsupported: no", ["cure 77 is not shown: the code moved; unsupported: no"]),
     (REPAIRED, "", [])],
)  # fmt: skip
def test_a_cure_that_moved_is_told_unless_its_defect_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, standing: str, shows: str, said: list[str]
) -> None:
    check = CureCheck("heads", "git:head", "77", "the code moved: headslib/core/defects.py, line 1", standing, shows)
    found = ported_by(tmp_path, monkeypatch, a(Verdict.PASS), checks=(check,))
    assert [misfit.what for misfit in found.misfits] == said
    assert [misfit.place for misfit in found.misfits] == ["headslib/core/defects.py:1"] * len(said)


def test_what_a_limit_refuses_on_the_head_alone_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = ported_by(tmp_path, monkeypatch, a(Verdict.UNSUPPORTED, reason="a limit"))
    assert [misfit.what for misfit in found.misfits] == ["refused there, and not on 1.0: a limit"]


def test_a_regression_that_another_known_defect_ends_is_seen_with_everything_else_cured() -> None:
    (kept, _) = regressions(HEADS_SYSTEM, FINDINGS)
    other = a(Verdict.CRASH, known_issue="heads-elsewhere", error=Failure("KeyError", "'x'", 0))(kept.scenario)
    asked: list[Scenario] = []

    def passes(scenario: Scenario) -> Result:
        asked.append(scenario)
        return a(Verdict.PASS)(scenario)

    seen = beyond(kept, other, KNOWN, passes)
    assert seen.verdict is Verdict.PASS
    assert [scenario.version for scenario in asked] == ["+cured:-77"]
    assert judged(kept, [seen], "1.0", KNOWN).state is State.REPAIRED
    assert judged(kept, [other], "1.0", KNOWN).state is State.NOTHING
    own = replace(other, known_issue="heads-77+heads-elsewhere")
    unexplained = replace(other, known_issue=None)
    assert [beyond(kept, each, KNOWN, passes) for each in (own, unexplained)] == [own, unexplained]
    assert len(asked) == 1


# --- claims --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fixed", "states", "word", "wrong"),
    [
        ("", [State.REPAIRED], "repaired", True),
        ("main", [State.AS_SAID], "repaired", False),
        ("", [State.REPAIRED, State.THERE], "repaired in part", True),
        ("", [State.THERE, State.NOTHING], "still there", False),
        ("1.1", [State.THERE], "still there", True),
        ("1.2", [State.THERE], "still there", False),
        ("", [State.OTHERWISE], "other failure", False),
        ("", [State.NOTHING], "says nothing", False),
    ],
)
def test_what_makes_a_claim_out_of_date(fixed: str, states: list[State], word: str, *, wrong: bool) -> None:
    (kept, _) = regressions(HEADS_SYSTEM, FINDINGS)
    claim = Claim(replace(FINDINGS[0], fixed=fixed), (), ("77",))
    result = a(Verdict.PASS)(kept.scenario)
    answer = Answered(claim, tuple(RegressionRun(kept, result, state) for state in states), "1.1")
    assert answer.word == word
    assert bool(answer.wrong) is wrong
