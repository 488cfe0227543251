"""What a walk leaves out: counted with its reason, absent from the plan, refused where it is malformed."""

from __future__ import annotations

from pathlib import Path

import pytest
from shardproof.errors import UsageError
from shardproof.space.files import load_space
from shardproof.space.plan import Selection, make_plan

SPACE = """
schema = 1
[space]
title = "small"
strength = 2
[axes]
mesh = ["1x1x1", "1x2x1"]
program = ["resume", "train"]
checkpoint = ["gathered"]
[system.reference]
[[system.reference.leave_out]]
reason = "too slow for tonight"
axes = { mesh = "1x2*", program = ["resume"] }
"""


def test_left_out_combinations_are_absent_and_counted(tmp_path: Path) -> None:
    plan = make_plan([load_space(str(_written(tmp_path, SPACE)))], Selection())
    kept = {(str(s.mesh), s.program) for s in plan.scenarios}
    assert kept == {("1x1x1", "resume"), ("1x1x1", "train"), ("1x2x1", "train")}
    assert plan.excluded["too slow for tonight"] == 1


@pytest.mark.parametrize(
    ("table", "named"),
    [
        ('reason = "no axes"', "leave_out 1: given .*; allowed: axes, or a predicate"),
        ('axes = { mesh = "1x2*" }', "leave_out 1: keys: .*reason too"),
        ('reason = 3\naxes = { mesh = "1x2*" }', "leave_out 1: reason: given 3"),
        ('reason = "why"\naxes = { mesh = "1x2*" }\nother = 1', "leave_out 1: key: given 'other'"),
        ('reason = "why"\naxes = { flavour = "sweet" }', r"leave_out 1: axis: given 'flavour'"),
    ],
)
def test_a_malformed_rule_is_refused(tmp_path: Path, table: str, named: str) -> None:
    head = SPACE[: SPACE.index("reason =")]
    with pytest.raises(UsageError, match=named):
        load_space(str(_written(tmp_path, f"{head}{table}\n")))


def test_a_cured_walk_has_a_plain_sample_beside_it(tmp_path: Path) -> None:
    """Every value of every axis occurs in the sample; a version that is asked for takes the place of both."""
    text = SPACE[: SPACE.index("[system.reference]")] + "[system.torch-fsdp2]\ncured = true\nexhaustive = ['mesh']\n"
    space = load_space(str(_written(tmp_path, text.replace('["gathered"]', '["dcp", "full"]'))))
    cured, sample = make_plan([space], Selection()).walked
    assert (cured.walk.version, sample.walk.version, sample.walk.sample) == ("+cured", "", True)
    assert {s.version for s in sample.supported} == {""}
    for axis in ("mesh", "program", "checkpoint"):
        assert {getattr(s, axis) for s in sample.supported} == {getattr(s, axis) for s in cured.supported}
    assert len(sample.supported) < len(cured.supported)
    for selection, versions in (
        (Selection(("torch-fsdp2",)), ["+cured", ""]),
        (Selection(("torch-fsdp2@2.13.0",)), ["2.13.0"]),
        (Selection(sample=2), ["+cured"]),
    ):
        assert [walked.walk.version for walked in make_plan([space], selection).walked] == versions


def test_a_part_of_a_cured_walk_may_run_plain(tmp_path: Path) -> None:
    table = "cured = true\n[[system.torch-fsdp2.plain]]\nreason = 'not yet'\naxes = { mesh = '1x2x1' }\n"
    text = SPACE[: SPACE.index("[system.reference]")] + "[system.torch-fsdp2]\n" + table
    plan = make_plan([load_space(str(_written(tmp_path, text.replace("gathered", "dcp"))))])
    walk, _ = plan.walked
    assert {(str(s.mesh), s.version) for s in walk.supported} == {("1x1x1", "+cured"), ("1x2x1", "")}


def _written(folder: Path, text: str) -> Path:
    path = folder / "small.toml"
    path.write_text(text)
    return path
