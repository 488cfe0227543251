"""What `shardproof explain` prints, word for word."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import report_samples as samples
from shardproof.diff import Difference
from shardproof.issues.known_issues import KnownIssues, known_issues_of
from shardproof.observe.logical import Key
from shardproof.observe.record import LIVE, WRITTEN
from shardproof.protocol.registry import system_named
from shardproof.report.failure_text import render_explained
from shardproof.result import Failure, Result

PICTURED = """\
mismatch  torch-fsdp2 2.13.0  {id}
Loading gave up.weight and its moments, counts and more wrong bits
  effect: The resumed run goes on from another state than the one that was saved.

  scenario: system=torch-fsdp2 dtype=bf16 mesh=1x2x1 offload=cpu
  failed at operation 8 (load)

  counts bits, exp_avg bits, exp_avg_sq bits, host bits, param bits, quant bits (8 differences)

operation 8 (load), first to diverge: 6 values
  exp_avg (first moments), 1 tensor: bits × 1
    up.weight  bits  2 of 40 elements, up to 16924 ULP; on ranks 0, 1; expected 3.0 (0x4040) but got 9.0 (0x4110)
  exp_avg_sq (second moments), 1 tensor: bits × 1
    up.weight  bits  1 of 24 elements, 1 NaN; on rank 0; expected 5.0 (0x4500) but got nan (0x7e00)
  param (parameters), 1 tensor: bits × 1
    up.weight  bits  3 of 24 elements, up to 2130706432 ULP; on ranks 0, 1; expected 1.0 (0x3f800000) but got -1.0 (0xbf800000)
  counts, 1 tensor: bits × 1
    up.weight  bits  1 of 5 elements, up to 4611686018427387906 ULP; on rank 1; expected 2 (0x0000000000000002) but got -4611686018427387904 (0xc000000000000000)
  host (the split between host and device), 1 tensor: bits × 1
    up.weight  bits  1 of 4 elements; on rank 0; expected False (0x00) but got True (0x01)
  quant, 1 tensor: bits × 1
    up.weight  bits  2 of 9 elements, up to 46 ULP; on ranks 0, 1; expected 0.0 (0x00) but got -0.0 (0x80)

operation 9 (step), follows: 2 values
  step (step counters), 1 tensor: missing × 1
    up.weight  missing  2.0
  master, 1 tensor: extra × 1
    up.weight  extra  2 elements; on rank 0

first difference: element [3] of exp_avg of up.weight
  expected  0 10000000 1000000  3.0  0x4040
  observed  0 10000010 0010000  9.0  0x4110
  208 ULP apart; 3 bits differ, the highest is 8

"""  # noqa: E501


def test_groups_and_bits() -> None:
    told = render_explained(samples.pictured(), KnownIssues())
    assert told.startswith(PICTURED.format(id=samples.pictured().id))
    commands = [line.split("  ")[0] for line in told.splitlines()[-3:]]
    own = samples.pictured().id
    assert commands == [
        f"shardproof replay {own}", f"shardproof shrink {own} --toml bug.toml", f"shardproof export {own}"
    ]  # fmt: skip


def test_what_is_known_of_a_defect_is_said_first() -> None:
    stored = Path(__file__).parent / "exports" / "torch-fsdp2-164929.json"
    result = Result.from_json(json.loads(stored.read_text("utf-8")))
    told = render_explained(result, KnownIssues(known_issues_of(system_named("torch-fsdp2"))))
    for line in (
        "  public: https://github.com/pytorch/pytorch/issues/164929",
        "  where: torch/distributed/checkpoint/state_dict.py:629 (2.13.0), _init_optim_state",
        "  # operation 1: save, mesh 1x1x1",
        "  dcp.save(state_dicts(model, optimizer), checkpoint_id=CHECKPOINT)",
        "the cure 164929",
        "  +    for param in optim.state.keys() - known:  # as if no step had been taken",
        f"shardproof export {result.id} --cured          a script of the library's own calls, and the text of an issue",
    ):
        assert line in told.splitlines()


def test_a_bare_assertion_has_its_place() -> None:
    trace = 'File "/x/site-packages/lib/load.py", line 7, in load\n    assert same(a, b)\n'
    error = Failure("AssertionError", "", 0, trace, 8)
    told = render_explained(replace(samples.crash(), error=error, system="reference"), KnownIssues())
    assert "Saving failed an assertion in load (load.py:7)\n" in told
    assert "  raised at: lib/load.py:7, in load: assert same(a, b)\n" in told
    assert "    assert same(a, b)\n" in told
    assert "without the library's calls: reference has no scripts yet\n" in told


def test_colour_changes_nothing_but_colour() -> None:
    for result in (samples.pictured(), samples.crash(), samples.passing(), samples.unknown(), samples.hang()):
        plain, coloured = (render_explained(result, samples.ISSUES, colour) for colour in (False, True))
        assert re.sub(r"\x1b\[[0-9;]*m", "", coloured) == plain
        assert "\x1b" not in plain


def test_hostile_text_cannot_control_the_terminal() -> None:
    told = render_explained(replace(samples.unknown(), reason="\x1b[2J\x07gone"), KnownIssues())
    assert "\x1b" not in told
    assert "\x07" not in told


def test_where_the_ranks_were_stands_below_what_happened() -> None:
    told = render_explained(samples.struck(), KnownIssues())
    assert "\n\nRank 1 raised KeyError in the observation of operation 1 (`step`) after 0.21 s. " in told
    assert "Rank 1 raised" not in render_explained(samples.crash(), KnownIssues())


def test_what_a_checkpoint_holds_is_what_a_rank_wrote_and_copies_are_explained() -> None:
    key = Key(2, WRITTEN, "param", "up.weight")
    copies = Difference(key, "replica_conflict", detail="copy 1, on ranks [0], differs from copy 0", ranks=(0,))
    told = render_explained(replace(samples.mismatch(), differences=(copies,)), KnownIssues())
    assert "copy 1, on ranks [0], differs from copy 0; as rank 0 wrote it\n" in told
    assert "\n  Copies of a value are numbered from 0" in told
    assert "Copies of a value" not in render_explained(samples.mismatch(), KnownIssues())


def test_what_an_earlier_operation_says_is_counted_and_not_told_again() -> None:
    def conflict(op: int, name: str, detail: str) -> Difference:
        return Difference(Key(op, LIVE, "param", name), "replica_conflict", detail=detail, ranks=(1,))

    found = (conflict(1, "a", "x"), conflict(1, "b", "y"), conflict(2, "a", "x"), conflict(2, "b", "z"))
    told = render_explained(replace(samples.mismatch(), differences=found), KnownIssues())
    assert told.count("  x; on rank 1") == 1
    assert "    b  replica_conflict  z; on rank 1\n  as told above: 1 value of param\n" in told
