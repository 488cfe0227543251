"""Rules that see a mistake through a state dict in memory, through clipping, or in copies only: that each speaks where
a fault of that kind is planted, and is silent where one element is otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from shardproof.diagnosis import Explanation
from shardproof.diagnosis.rules.engine import explain
from shardproof.diff import diff, numpy_dtype
from shardproof.faults.catalogue import planter_of
from shardproof.laboratory import judge
from shardproof.laboratory.judge import ResolvedScenario
from shardproof.observe.assemble import assemble
from shardproof.observe.logical import Logical
from shardproof.observe.record import Record
from shardproof.reference import system as reference
from shardproof.scenario import Scenario

from tests.unit.diagnosis.test_diagnosis import context_of, diagnose, live

pytestmark = pytest.mark.usefixtures("explained_word_for_word")

Records = tuple[Record, ...]

CLIPPED: dict[str, str] = {"mesh": "1x2x1", "optimizer": "adamw/clip=1.0", "program": "train"}
KEPT_IN_MEMORY = {"program": "recall", "checkpoint": "sharded"}

CASES: dict[str, tuple[dict[str, str], str, str]] = {
    "kept-and-clipped": ({**CLIPPED, "faults": "gradients-kept"}, "gradient_kept", "likely"),
    "kept-and-clipped-in-half": (
        {**CLIPPED, "dtype": "bf16", "faults": "gradients-kept"}, "gradient_kept", "likely",
    ),
    "missing-and-clipped-in-half": (
        {**CLIPPED, "dtype": "bf16", "microbatches": "2", "faults": "overwritten-microbatch"},
        "missing_contribution", "likely",
    ),
    "narrow-and-clipped": (
        {**CLIPPED, "mesh": "2x3x1", "model": "later", "dtype": "fp32/param=bf16/reduce=fp32", "microbatches": "2",
         "program": "unfreeze", "checkpoint": "gathered", "faults": "resolved-while-frozen"},
        "narrowed_sum", "likely",
    ),
    "narrow-sums-of-three-ranks": (
        {"mesh": "1x3x1", "model": "twins", "microbatches": "2", "grad_sync": "every", "program": "train",
         "faults": "demote-reduce"},
        "narrowed_sum", "certain",
    ),
    "a-copy-that-no-step-reached": (
        {"mesh": "1x1x5", "model": "twins", "sharding": "zero1", "optimizer": "adam/impl=fused", "program": "train",
         "faults": "empty-last-tensor"},
        "not_updated", "certain",
    ),
    "a-share-as-the-whole": (
        {"mesh": "1x2x1", **KEPT_IN_MEMORY, "faults": "local-state-as-global"}, "wrong_coordinates", "certain",
    ),
    "an-empty-share-kept": (
        {"mesh": "1x4x1", "model": "short", **KEPT_IN_MEMORY, "faults": "empty-shard-wins"},
        "empty_part_kept", "likely",
    ),
    "halves-of-shares": (
        {"mesh": "1x4x1", "model": "swiglu", "checkpoint": "model_space", "program": "recall",
         "faults": "shards-swizzled-as-tensor-parallel"},
        "misplaced", "certain",
    ),
    "a-share-of-another-rank": (
        {"mesh": "1x4x1", "model": "thin_groups", "sharding": "zero1", "checkpoint": "gathered", "load": "indivisible",
         "dtype": "bf16/master=fp32", "faults": "rank-within-the-node"},
        "other_rank", "certain",
    ),
    "padding-of-tensor-parallel-parts": (
        {"mesh": "1x2x2", "model": "opaque", "program": "train", "faults": "padding-summed"},
        "padding_counted", "likely",
    ),
    "padding-before-one-tensor": (
        {"mesh": "1x2x1", "model": "mixed_unit", "program": "train", "dtype": "fp32/param=bf16",
         "faults": "padding-summed"},
        "padding_counted", "possible",
    ),
    "decay-below-the-rounding": (
        {"mesh": "1x2x1", "model": "sometimes", "dtype": "fp16/master=fp32", "sharding": "zero1",
         "optimizer": "adamw/schedule=onecycle", "program": "restart", "checkpoint": "gathered",
         "faults": "initialising-load-decays"},
        "weight_decay", "likely",
    ),
    "perhaps-not-kept": (
        {"mesh": "1x2x1", "model": "groups", "checkpoint": "model_space", "program": "recall",
         "faults": "first-optimizer-saved"},
        "not_saved", "possible",
    ),
    "the-update-of-an-earlier-weight": (
        {"mesh": "1x4x1", "model": "rare", "dtype": "bf16/reduce=fp32", "sharding": "zero1", "offload": "cpu=0.5",
         "program": "rollback", "checkpoint": "bucket_space", "faults": "stale-host-copies-after-load"},
        "continued_from", "likely",
    ),
}  # fmt: skip


@cache
def _planted(name: str) -> tuple[ResolvedScenario, Records, Records]:
    """A case, and what ranks hold without the fault and with it."""
    case = ResolvedScenario.from_scenario(Scenario.from_axes(CASES[name][0]))
    right = reference.run(case.inputs, case.placement)
    return (
        case,
        tuple(right),
        tuple(reference.run(case.inputs, case.placement, install=planter_of(case.scenario.faults))),
    )


def said(name: str, spoilt: Mapping[str, Any] | None = None) -> dict[str, Explanation]:
    """What is said of a planted fault up to an operation, where the last element of some records, those with these
    fields, is another."""
    case, *sides = _planted(name)
    last = spoilt.get("op") if spoilt else None
    right, wrong = ([record for record in side if last is None or record.op <= last] for side in sides)
    spoil = [r for r in wrong if spoilt and r.data and all(getattr(r, field) == v for field, v in spoilt.items())]
    assert bool(spoil) is bool(spoilt)
    held = [_with_another_end(record) if record in spoil else record for record in wrong]
    expected, _ = assemble(right)
    observed, problems = assemble(held)
    context = replace(context_of(expected, observed, case.scenario), records=held)
    return {e.mechanism: e for e in explain(diff(expected, observed, problems, records=held), context)}


def _with_another_end(record: Record) -> Record:
    values = np.frombuffer(record.data, numpy_dtype(record.dtype)).copy()
    values[-1] = 0.625
    return record._replace(data=values.tobytes())


@pytest.mark.parametrize("name", CASES)
def test_a_planted_fault_is_said_among_the_first_three(name: str) -> None:
    _, mechanism, confidence = CASES[name]
    found = said(name)
    assert mechanism in list(found)[:3]
    assert found[mechanism].confidence == confidence


@pytest.mark.parametrize(
    ("name", "spoilt"),
    [
        ("a-copy-that-no-step-reached", {"op": 1, "role": "param", "rank": 4}),
        ("a-share-as-the-whole", {"op": 4, "where": "live"}),
        ("an-empty-share-kept", {"op": 4, "where": "live", "fqn": "two.weight"}),
        ("halves-of-shares", {"op": 4, "fqn": "fc1.weight", "rank": 2}),
        ("a-share-of-another-rank", {"where": "live", "op": 8, "rank": 2}),
        ("padding-of-tensor-parallel-parts", {"role": "compute_param"}),
        ("padding-before-one-tensor", {"role": "compute_param", "fqn": "head.weight"}),
        ("kept-and-clipped", {"role": "grad"}),
        ("narrow-and-clipped", {"role": "grad"}),
        ("decay-below-the-rounding", {"role": "param", "where": "live"}),
        ("the-update-of-an-earlier-weight", {"role": "param", "where": "live", "op": 6}),
    ],
)
def test_where_another_element_is_wrong_too_that_is_not_said(name: str, spoilt: dict[str, Any]) -> None:
    assert CASES[name][1] not in said(name, spoilt)


UP = "up.weight"
AGAIN = Scenario.from_axes({"mesh": "1x2x1", "program": "recall"})
RECALLED = 7
"""The operation of that program at which what was kept is recalled the second time; the first is 4."""


@pytest.mark.parametrize(("wrong_before", "said_so"), [(False, True), (True, False)])
def test_a_state_dict_that_restored_once_and_then_not_has_changed(wrong_before: bool, said_so: bool) -> None:
    def mutate(state: Logical) -> None:
        for op in (4, RECALLED) if wrong_before else (RECALLED,):
            state[live(op, "exp_avg", UP)] = state[live(op - 1, "exp_avg", UP)]

    found = [e.mechanism for e in diagnose(AGAIN, mutate, since=RECALLED)]
    assert (found[0] == "kept_state_changed") is said_so
    assert ("kept_state_changed" in found) is said_so


def test_what_torch_cannot_step_without_a_load_is_explained_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's fused SGD raises where some parameters have momentum and others none."""
    run = judge.twin.run

    def without_partial_momentum(*args: Any, **options: Any) -> Logical:
        if not options.get("loads", True):
            raise TypeError("expected Tensor as element 2 in argument 2, but got NoneType")
        return run(*args, **options)

    monkeypatch.setattr(judge.twin, "run", without_partial_momentum)
    found, _, _ = judge.run_reference(ResolvedScenario.from_scenario(Scenario.from_axes(CASES["perhaps-not-kept"][0])))
    assert "state_missing" in [e.mechanism for e in found.explanations]
