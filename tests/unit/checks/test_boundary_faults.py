"""What notices a fault outside the library: the table, and what each fault does to the tensors that it is about."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from shardproof.checks import boundary_faults as struck_module
from shardproof.checks.boundary_faults import Struck, strike, table
from shardproof.cli.main import entry
from shardproof.diff import Difference
from shardproof.errors import UsageError
from shardproof.faults import collectives, memory
from shardproof.faults.boundary import BOUNDARY, all_came, boundary_fault, never_struck
from shardproof.faults.plain_scenario import plain_scenario
from shardproof.faults.requested import require_faults
from shardproof.laboratory.run_verdict import NEVER_STRUCK, NOTHING_IN_IT
from shardproof.models import model_spec
from shardproof.observe.logical import Key
from shardproof.observe.record import LIVE, WRITTEN
from shardproof.ownership import is_planted
from shardproof.program import expand
from shardproof.protocol.registry import system_named
from shardproof.protocol.system import RankContext, RankSystem
from shardproof.result import FailedOp, Failure, Result
from shardproof.scenario import Scenario
from shardproof.verdict import Verdict
from torch.distributed import Work

FLIP, LATE = BOUNDARY["boundary.memory-param"], BOUNDARY["boundary.collective-late"]
RESULT = Result(plain_scenario(system_named("torch-fsdp2")), "torch-fsdp2", "2.13.0", Verdict.MISMATCH)
SEEN = replace(
    RESULT,
    failed_op=FailedOp(1, "step"),
    differences=(Difference(Key(1, LIVE, "param", "a"), "bits"), Difference(Key(2, WRITTEN, "param", "a"), "bits")),
)


def test_what_is_seen_first_and_what_a_checkpoint_carries_on() -> None:
    struck = Struck(FLIP, SEEN)
    assert (struck.outcome, struck.seen, struck.carried) == ("mismatch", "1 step: param bits", True)
    assert not Struck(FLIP, replace(SEEN, differences=SEEN.differences[:1])).carried


def test_what_changes_nothing_went_unseen_unless_nothing_must_change_or_nothing_was_struck() -> None:
    passed = replace(RESULT, verdict=Verdict.PASS)
    assert Struck(FLIP, passed).outcome == "unseen"
    assert Struck(FLIP, replace(passed, reason=NEVER_STRUCK)).outcome == "no effect"
    assert Struck(LATE, passed).outcome == "pass"
    assert Struck(LATE, replace(passed, reason=NEVER_STRUCK)).outcome == "no effect"


def test_only_what_struck_is_noticed() -> None:
    assert Struck(LATE, replace(RESULT, verdict=Verdict.PASS)).noticed
    assert not Struck(LATE, replace(RESULT, verdict=Verdict.PASS, reason=NEVER_STRUCK)).noticed
    assert not Struck(FLIP, replace(SEEN, reason=NEVER_STRUCK)).noticed


@pytest.mark.parametrize(
    ("error", "raised", "said"),
    [
        (Failure("RuntimeError", "no"), "library", "the library raised"),
        (Failure("RuntimeError", "no", planted=True), "fault", "the fault's own error"),
        (Failure("died", "rank 0 ended without a word"), "rank lost", "a rank was lost"),
    ],
)
def test_an_error_is_told_by_whom_it_is(error: Failure, raised: str, said: str) -> None:
    struck = Struck(FLIP, replace(RESULT, verdict=Verdict.CRASH, error=error))
    assert (struck.outcome, struck.raised) == ("error", raised)
    assert table([struck]).endswith(f"({said})")
    assert Struck(FLIP, SEEN).raised == ""


def test_the_table_has_a_line_for_each_fault_below_its_system() -> None:
    lines = table([Struck(FLIP, SEEN), Struck(LATE, replace(RESULT, verdict=Verdict.PASS))]).splitlines()
    assert lines[0] == "torch-fsdp2 2.13.0"
    assert lines[2].split() == ["boundary.memory-param", "mismatch", "yes", "1", "step:", "param", "bits"]
    assert lines[3].split() == ["boundary.collective-late", "pass", "-"]


def test_ranks_that_are_simulated_cannot_be_struck(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert entry(["faults", "--strike", "reference", "--out", str(tmp_path)]) == 2
    assert "given 'reference'; allowed: automodel, " in capsys.readouterr().err


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int16, torch.uint8])
def test_one_bit_of_the_first_element_flips(dtype: torch.dtype) -> None:
    tensor = torch.ones(3, dtype=dtype)
    before = tensor.clone()
    memory.flip(tensor)
    changed = tensor.view(torch.uint8) ^ before.view(torch.uint8)
    assert sum(int(byte).bit_count() for byte in changed.tolist()) == 1
    assert torch.equal(tensor[1:], before[1:])
    memory.flip(tensor)
    assert torch.equal(tensor, before)


def collective(
    make: Callable[..., object], *args: object, func: object = None, world: int = 2
) -> tuple[collectives.Collective, list[str]]:
    """One call of a collective, and what it notes."""
    struck: list[str] = []
    return collectives.Collective(func or make, args, {}, world, lambda: struck.append("struck")), struck


def test_two_ranks_parts_change_places() -> None:
    received = torch.arange(6.0)
    one, struck = collective(lambda *_: None, received, world=3)
    collectives.swapped(one)
    assert (received.tolist(), struck) == ([2, 3, 0, 1, 4, 5], ["struck"])
    uneven = torch.arange(3.0)
    one, struck = collective(lambda *_: None, uneven)
    collectives.swapped(one)
    assert (uneven.tolist(), struck) == ([0, 1, 2], []), "parts of several sizes have no places to change"


def test_a_broken_collective_says_who_broke_it() -> None:
    one, struck = collective(lambda *_: None)
    with pytest.raises(RuntimeError, match=r"boundary\.collective-error") as raised:
        collectives.broken(one)
    assert is_planted(raised.value)
    assert struck == ["struck"]


def test_a_dropped_collective_leaves_what_it_would_have_written_and_has_ended() -> None:
    output, never = torch.full((4,), 7.0), SimpleNamespace(namespace="c10d", _schema=SimpleNamespace(returns=(1, 2)))
    one, struck = collective(lambda *_: None, output, torch.ones(2), func=never)
    given, handle = collectives.dropped(one)
    assert given is output
    assert Work.unbox(handle).wait()
    assert (output.tolist(), struck) == ([7.0] * 4, ["struck"])
    one, _ = collective(
        lambda *_: None, torch.ones(2), 2, "none", func=torch.ops._c10d_functional.all_gather_into_tensor.default
    )
    assert collectives.dropped(one).tolist() == [0.0] * 4


@pytest.mark.parametrize(
    "fault", ["boundary.none", "boundary.none@2", "boundary.kill-in-save@2", "boundary.collective-late@0"]
)
def test_only_faults_of_many_events_take_a_number(fault: str) -> None:
    with pytest.raises(UsageError, match="given 'boundary"):
        boundary_fault(fault)


def test_a_number_chooses_the_collective() -> None:
    fault = boundary_fault("boundary.collective-lost@3")
    assert (fault.id, fault.verdict) == ("boundary.collective-lost@3", "mismatch")
    assert fault is boundary_fault("boundary.collective-lost@3")


class Answering:
    """In the place of `Laboratory`: a fault's event number `ends` is not there, the one before may have nothing in it
    to strike, and the `stops`-th question is cut off."""

    stops, ends, empty = 100, 3, False

    def __init__(self, **options: object) -> None:
        self.asked: list[str] = []

    def __enter__(self) -> Answering:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def examine_one(self, scenario: Scenario, *, confirm: bool) -> Result:
        self.asked += scenario.faults
        if len(self.asked) == self.stops:
            raise KeyboardInterrupt
        number = int(scenario.faults[0].partition("@")[2] or 1)
        reason = NEVER_STRUCK if number == self.ends else ""
        if self.empty and number == self.ends - 1:
            reason = NOTHING_IN_IT
        return replace(RESULT, scenario=scenario, verdict=Verdict.PASS, reason=reason)

    side_by_side = staticmethod(map)


def struck_every(*only: str, every: bool) -> tuple[list[str], list[tuple[int, int | None]], bool]:
    told: list[tuple[int, int | None]] = []
    only = only or (LATE.id, "boundary.truncate")
    found, cut_off = strike(
        [system_named("torch-fsdp2")], 1, (), lambda done, of: told.append((done, of)), every=every, only=only
    )
    return [one.fault.id for one in found], told, cut_off


def test_every_event_is_struck_until_one_finds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(struck_module, "Laboratory", Answering)
    first, numbered, killed = LATE.id, f"{LATE.id}@2", "boundary.truncate"
    assert struck_every(every=True) == (
        [killed, first, numbered], [(1, None), (2, None), (3, None), (4, None)], False
    )  # fmt: skip
    assert struck_every(every=False) == ([killed, first], [(1, 2), (2, 2)], False)
    assert struck_every(f"{first}@3", every=False) == ([f"{first}@3"], [(1, 1)], False)  # asked for, and not there


def test_an_event_with_nothing_in_it_is_told_and_not_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(struck_module, "Laboratory", Answering)
    monkeypatch.setattr(Answering, "empty", True)
    monkeypatch.setattr(Answering, "ends", 5)
    found, _ = strike([system_named("torch-fsdp2")], 1, (), lambda *_: None, every=True, only=(LATE.id,))
    assert [(one.number, one.outcome) for one in found] == [(0, "pass"), (2, "pass"), (3, "pass"), (4, "no effect")]


@pytest.mark.parametrize(
    ("elements", "notes"), [((4, 4), (False, True)), ((4, 3, 4), (True, True)), ((4,), (True, False))]
)
def test_a_collective_with_nothing_to_strike_is_told_from_one_that_does_not_come(
    elements: tuple[int, ...], notes: tuple[bool, bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What rank 0 receives of so many elements, of which two ranks' parts cannot change places if they are not even."""
    fault = boundary_fault("boundary.collective-swap@2")
    scenario = Scenario(program="build step", faults=(fault.id,))
    contract = system_named("torch-fsdp2").contract
    context = RankContext(scenario, model_spec(scenario.model), scenario.mesh, 0, tmp_path, contract, fault.id)
    met: list[collectives.Meet] = []
    monkeypatch.setattr(collectives, "meeting", lambda meet, _: nullcontext(met.append(meet)))

    def step() -> None:
        for number in elements:
            met[0](collectives.Collective(lambda *_: None, (torch.arange(number),), {}, 2, context.struck))

    fault.around(step, expand(scenario)[1], context, cast("RankSystem", None))
    assert (never_struck(scenario, tmp_path), all_came(scenario, tmp_path)) == notes


def test_an_interrupt_keeps_the_events_that_were_struck(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(struck_module, "Laboratory", Answering)
    monkeypatch.setattr(Answering, "stops", 2)
    assert struck_every(every=True) == ([LATE.id], [(1, None)], True)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--fault", "stale-masters@3"), "given 'stale-masters@3'"),
        (("--strike", "torch-fsdp2", "--fault", "stale-masters"), "allowed: boundary."),
        (("--strike", "torch-fsdp2", "--fault", "boundary.kill-in-save@2"), "allowed: @N, from 1, behind boundary."),
        (("--strike", "torch-fsdp2", "--fault", "boundary.collective-drop@0"), "allowed: @N, from 1, behind boundary."),
    ],
)
def test_a_fault_that_there_is_not_or_that_has_no_events_is_refused(
    words: tuple[str, ...], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert entry(["faults", *words, "--out", str(tmp_path)]) == 2
    assert said in capsys.readouterr().err


def test_an_event_of_a_fault_is_one_of_what_may_be_asked_for() -> None:
    asked = ["boundary.collective-drop@3", "boundary.kill-rank"]
    require_faults(asked, logical=False)
    for wrong in ("boundary.collective-drop@0", "boundary.collective-dropped@3", "collective-drop@3", "stale-masters"):
        with pytest.raises(UsageError, match=wrong):
            require_faults([*asked, wrong], logical=False)
    with pytest.raises(UsageError, match=r"did you mean stale-masters\?"):
        require_faults(["stale-master"])
