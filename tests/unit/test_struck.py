"""What notices a fault outside the library: the table, and what each fault does to the tensors that it is about."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from harness.cli import entry
from harness.diff import Difference
from harness.faults import collectives, memory
from harness.faults.boundary import BOUNDARY
from harness.faults.strikes import plain_scenario
from harness.observe.logical import Key
from harness.observe.record import LIVE, WRITTEN
from harness.result import FailedOp, Result
from harness.struck import Struck, table
from harness.systems.registry import system_named
from harness.verdict import Verdict

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


def test_what_changes_nothing_had_no_effect_unless_nothing_must_change() -> None:
    passed = replace(RESULT, verdict=Verdict.PASS)
    assert Struck(FLIP, passed).outcome == "no effect"
    assert Struck(LATE, passed).outcome == "pass"


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


def test_two_ranks_parts_change_places() -> None:
    received = torch.arange(6.0)
    collectives.swapped(lambda: None, (received,), 3)
    assert received.tolist() == [2, 3, 0, 1, 4, 5]
    uneven = torch.arange(3.0)
    collectives.swapped(lambda: None, (uneven,), 2)
    assert uneven.tolist() == [0, 1, 2], "parts of several sizes have no places to change"


def test_a_broken_collective_says_who_broke_it() -> None:
    with pytest.raises(RuntimeError, match=r"boundary\.collective-error"):
        collectives.broken(lambda: None, (), 2)
