"""Explanations that were wrong, or missing, where the mechanism of a known defect was at work; one test for each.

The defects are those of `issues.toml`: a test names the entry, and makes of the twin's own prediction what the defect
makes of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from shardproof import probe
from shardproof.diagnosis import Explanation
from shardproof.diagnosis.rules.engine import explain
from shardproof.diff import Difference, as_numbers, diff
from shardproof.grid import choose_grid
from shardproof.observe.assemble import assemble
from shardproof.observe.logical import Key, Logical, Problem, Value
from shardproof.observe.record import ITEMSIZE, Record
from shardproof.scenario import DTypePolicy, Mesh, Scenario

from tests.unit.diagnosis.test_diagnosis import (
    DENSE,
    LAST,
    LOAD,
    SAVE,
    STEP,
    change,
    context_of,
    diagnose,
    like,
    live,
    predicted,
    top,
)

pytestmark = pytest.mark.usefixtures("explained_word_for_word")

UP = "up.weight"


def contributions(mesh: Mesh, microbatches: int = 1) -> np.ndarray:  # type: ignore[type-arg]
    """Every microbatch's and rank's gradient of up.weight at the first step."""
    grid = choose_grid(("fp32",) * 3, "fp32", mesh.dp, microbatches)
    keys = probe.element_keys(UP, (16, 7), 0)
    return np.stack([probe.rank_units(keys, 0, m, mesh.dp, grid) for m in range(microbatches)]) * grid.unit


def with_gradient(mesh: Mesh, wrong: np.ndarray, microbatches: int = 1) -> Explanation:  # type: ignore[type-arg]
    scenario = Scenario(mesh=mesh, microbatches=microbatches)
    return top(diagnose(scenario, change(live(STEP, "grad", UP), lambda _: wrong), since=STEP))


def of_owner(alternatives: np.ndarray) -> np.ndarray:  # type: ignore[type-arg]
    """Each half of the elements follows another rank, as where each rank owns a half."""
    return np.concatenate([alternatives[0, :56], alternatives[1, 56:]])


def test_an_average_that_is_averaged_again_with_the_other_ranks_gradients() -> None:
    """megatron-fsdp-overlap-reduce-twice: was `one_rank`, possible."""
    (own,) = contributions(Mesh(1, 2, 1))
    found = with_gradient(Mesh(1, 2, 1), of_owner((own.mean(axis=0) + own.sum(axis=0) - own) / 2))
    assert (found.mechanism, found.confidence) == ("reduced_twice", "certain")
    assert "averaged once more with the other ranks' own gradients" in found.text


def test_an_average_that_is_added_to_a_ranks_own_gradient() -> None:
    """megatron-core-fsdp-one-rank-overlap: was `one_rank`, possible."""
    (own,) = contributions(Mesh(1, 2, 1))
    found = with_gradient(Mesh(1, 2, 1), of_owner(own.mean(axis=0) + own))
    assert (found.mechanism, found.confidence) == ("reduced_twice", "certain")
    assert "plus one rank's own gradient" in found.text


def test_a_buffer_that_every_microbatch_scales_again() -> None:
    """megatron-fsdp-one-rank-shard: was not explained."""
    first, second = contributions(Mesh(2, 1, 1), microbatches=2)
    wrong = ((first / 2 + second) / 2).sum(axis=0)
    found = with_gradient(Mesh(2, 1, 1), wrong, microbatches=2)
    assert (found.mechanism, found.confidence) == ("reduced_twice", "certain")
    assert "divided by 2 again with every microbatch" in found.text


def test_a_buffer_that_every_microbatch_doubles() -> None:
    """Megatron-LM's issue 6660, of which megatron-core-fsdp-one-rank is a face."""
    first, second = contributions(Mesh(1, 2, 1), microbatches=2)
    found = with_gradient(Mesh(1, 2, 1), (2 * first + second).sum(axis=0) / 2, microbatches=2)
    assert (found.mechanism, found.confidence) == ("reduced_twice", "certain")
    assert "doubled with every further microbatch" in found.text


def test_a_ring_that_adds_in_bf16_begins_with_another_rank_for_each_chunk() -> None:
    """torch-fsdp2-186998-silent: was not explained, since only the order 0, 1, 2, 3 was tried."""
    (own,) = contributions(Mesh(1, 4, 1))

    def ring(first: int) -> np.ndarray:  # type: ignore[type-arg]
        total = np.zeros(112)
        for rank in np.roll(own, -first, axis=0):
            total = (total + rank).astype(ml_dtypes.bfloat16).astype(np.float64)
        return total / 4

    found = with_gradient(Mesh(1, 4, 1), np.concatenate([ring(2)[:56], ring(3)[56:]]))
    assert (found.mechanism, found.confidence) == ("narrowed_sum", "certain")


def test_copies_on_one_rank_do_not_differ_from_themselves() -> None:
    """megatron-core-chained-scaler: was "ranks [0, 1] differ from ranks [0, 1]", certain."""
    key = Key(STEP, "live", "scaler", "scale")
    scale, other = (np.float32(n).tobytes() for n in (1024, 512))
    records = [
        Record(STEP, r, "live", "scaler", "scale", "fp32", (), (), (), data) for r in (0, 1) for data in (scale, other)
    ]
    observed, problems = assemble(records)
    expected = {key: Value("fp32", (), scale)}
    (found, *_) = explain(diff(expected, observed, problems), context_of(expected, observed))
    assert found.mechanism == "replicas_diverged"
    assert "each of ranks [0, 1] holds several copies that differ in 1 of 1 elements" in found.text
    assert "differ from ranks" not in found.text
    alone = assemble([record for record in records if record.rank == 0])[1]
    assert "rank 0 holds several copies that differ" in alone[0].detail


def test_ranks_that_clip_by_different_norms() -> None:
    """transformer-engine-2713-clip: was `replicas_diverged` of moments, which is what follows."""
    expected = {key: value for key, value in predicted(DENSE).items() if key.op <= STEP}
    norm, moment = live(STEP, "norm", "total_norm"), live(STEP, "exp_avg", UP)
    expected[norm] = Value("fp32", (), np.float32(4).tobytes())
    observed = {**expected, norm: Value("fp32", (), np.float32(3).tobytes())}
    problems = [Problem(key, "replica_conflict", (1,), "in words") for key in (moment, norm)]
    found = top(explain(diff(expected, observed, problems), context_of(expected, observed)))
    assert (found.mechanism, found.confidence) == ("norms_differ", "certain")


@pytest.mark.parametrize(("got", "says"), [(3.0, "left out"), (5.0, "counted more than once")])
def test_a_norm_of_a_part_of_the_gradients(got: float, says: str) -> None:
    """megatron-core-no-initialization: was not explained."""
    key = live(STEP, "norm", "total_norm")
    expected = {key: Value("fp32", (), np.float32(4).tobytes())}
    observed = {key: Value("fp32", (), np.float32(got).tobytes())}
    found = top(explain([Difference(key, "norm", mismatched=1, total=1)], context_of(expected, observed)))
    assert (found.mechanism, found.confidence) == ("norm_of_a_part", "likely")
    assert f"total_norm is {got:g} instead of 4" in found.text
    assert says in found.text


def test_a_description_that_does_not_fit_what_is_stored() -> None:
    """torch-fsdp2-161368 and megatron-fsdp-fused-adam-save: were explained by what the load left, certain or likely."""
    key = Key(SAVE, "written", "checkpoint", "checkpoint")
    detail = (
        "/tmp/x.distcp at 9143: key 'model.head.weight': stored item: given 'fp32 of shape (0, 6)'; "
        "allowed: fp32 of shape (1, 6), as .metadata says; for example: save(path)"
    )
    found = top(explain([Difference(key, "unreadable", detail=detail)], context_of({}, {})))
    assert (found.mechanism, found.confidence) == ("boxes_lie", "certain")
    assert "model.head.weight is fp32 of shape (0, 6), and was to be fp32 of shape (1, 6)" in found.text
    assert explain([Difference(key, "unreadable", detail="cut short")], context_of({}, {})) == []


def test_what_explains_a_later_operation_only_is_possible_at_most() -> None:
    key = Key(SAVE, "written", "checkpoint", "checkpoint")

    def stale(state: Logical) -> None:
        state[live(LAST, "param", UP)] = state[live(LOAD, "param", UP)]

    expected = dict(predicted(DENSE))
    observed = dict(expected)
    stale(observed)
    differences = diff(expected, observed)
    assert top(explain(differences, context_of(expected, observed))).confidence == "certain"
    first = Difference(key, "unreadable", detail="cut short")
    found = explain([first, *differences], context_of(expected, observed))
    assert {e.confidence for e in found} == {"possible"}
    assert found[0].text.startswith("Nothing explains operation 3 (save), which differs first. ")


def test_a_model_only_load_that_restores_the_optimizer() -> None:
    """deepspeed-universal-module-only: was `initialising_step`, certain."""
    scenario = Scenario(mesh=Mesh(1, 2, 1), program="build step save build load_model_only")

    def restore(state: Logical) -> None:
        for key in [
            key for key in state if key.op == 2 and key.where == "live" and key.role in ("exp_avg", "hyperparameter")
        ]:
            state[key._replace(op=4)] = state[key]

    found = diagnose(scenario, restore, since=4)
    assert (top(found).mechanism, top(found).confidence) == ("loaded_unasked", "certain")
    assert "has its value of operation 2 (save) after operation 4 (load_model_only)" in top(found).text
    assert "initialising_step" not in [e.mechanism for e in found]


def spoken(role: str, name: str, expected: str | None, observed: str | None) -> Explanation:
    key = live(STEP, role, name)
    sides: list[Logical] = [
        {} if text is None else {key: Value("utf8", (len(text.encode()),), text.encode())}
        for text in (expected, observed)
    ]
    return top(explain(diff(sides[0], sides[1]), context_of(*sides)))


def test_settings_marks_and_warnings_are_no_tensors() -> None:
    """automodel-2419-e was not explained, policy-text was `wrong_shape`; tags and pending-gather were state."""
    found = spoken("resolved", "pipeline.dtype", "bf16", "None")
    assert found.mechanism == "resolved_otherwise"
    assert "pipeline.dtype is 'None' instead of 'bf16'" in found.text
    assert spoken("resolved", "policy", "refused", "None").mechanism == "resolved_otherwise"
    assert spoken("tag", UP, "dim 0", None).text.endswith("up.weight has no mark after operation 1 (step).")
    assert spoken("tag", UP, None, "dim 0").mechanism == "marks"
    warned = spoken("warning", "rank0.0", None, "UserWarning: still\n  pending")
    assert warned.mechanism == "warned"
    assert "rank0.0 says “UserWarning: still pending”" in warned.text


def test_values_that_were_not_rounded_to_the_dtype_of_the_contract() -> None:
    """automodel-2419-d: was "with other values"."""
    key = live(STEP, "buffer", "inv_freq")
    wide = np.linspace(0.1, 1.0, 7, dtype=np.float32)
    expected = {key: Value("bf16", (7,), wide.astype(ml_dtypes.bfloat16).tobytes())}
    observed = {key: Value("fp32", (7,), wide.tobytes())}
    found = top(explain(diff(expected, observed), context_of(expected, observed)))
    assert "buffer of inv_freq is fp32 instead of bf16, with values that were not rounded to bf16" in found.text


def test_a_cut_that_goes_through_the_next_tensor() -> None:
    """megatron-core-5077: was `zeroed`, likely."""
    expected = {key: value for key, value in predicted(DENSE).items() if key.op <= SAVE}
    for name in ("down.weight", UP):
        expected[Key(SAVE, "written", "exp_avg", name)] = expected[live(SAVE, "exp_avg", name)]
    key = Key(SAVE, "written", "exp_avg", "down.weight")
    flat = [as_numbers(expected[key._replace(fqn=name)]).reshape(-1) for name in ("down.weight", UP)]
    observed = {**expected, key: like(expected[key], np.concatenate([np.zeros(40), flat[1][20:92]]))}
    found = explain(diff(expected, observed), context_of(expected, observed))
    assert (top(found).mechanism, top(found).confidence) == ("from_neighbours", "certain")
    assert (
        "72 of 112 elements of written exp_avg of down.weight are those of up.weight from element 20 on"
        in top(found).text
    )


def test_of_two_certain_mechanisms_that_are_as_close_the_one_that_explains_more_of_the_gradients() -> None:
    """megatron-core-fsdp-hybrid-no-overlap: was `scaled`, whose moments were counted beside few gradients."""
    scenario = Scenario(mesh=Mesh(2, 2, 1), dtype=DTypePolicy())
    mutate: list[Callable[[Logical], object]] = []
    grid = choose_grid(("fp32",) * 3, "fp32", 4, 1)
    model = {"up.weight": (16, 7), "down.weight": (7, 16), "embed.weight": (12, 5)}
    for name, shape in model.items():
        units = probe.rank_units(probe.element_keys(name, shape, 0), 0, 0, 4, grid) * grid.unit
        alone = units[:2].sum(axis=0) / 4
        mutate.append(change(live(STEP, "grad", name), lambda _, wrong=alone: wrong))
    for name in ("up.bias", "down.bias", "norm.weight"):
        mutate.append(change(live(STEP, "exp_avg", name), lambda a: a / 2))
    mutate.append(change(live(STEP, "grad", "up.bias"), lambda a: a / 2))
    found = diagnose(scenario, lambda state: [each(state) for each in mutate], since=STEP)
    assert [e.mechanism for e in found[:2]] == ["missing_contribution", "scaled"]


FLOATS = [
    dtype for dtype in ITEMSIZE if as_numbers(Value(dtype, (0,), b"")).dtype.kind not in "iub" and dtype != "utf8"
]


@pytest.mark.parametrize("optimizer", ["adamw", "adam", "sgd/momentum=0.9"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_every_rule_bears_moments_of_every_dtype(dtype: str, optimizer: str) -> None:
    """A rule once looked for the roundings of fp8 in a table that had none, and the judge ended with `unknown`."""
    scenario = replace(Scenario.from_axes({"optimizer": optimizer}), mesh=Mesh(1, 2, 1))
    roles = ("exp_avg", "exp_avg_sq", "momentum")
    expected = {
        key: like(Value(dtype, value.shape, b""), as_numbers(value)) if key.role in roles else value
        for key, value in predicted(scenario).items()
    }
    observed = {
        key: like(value, as_numbers(value).astype(np.float32) * 0.5 + 0.25)
        if key.role in roles and key.op >= 1
        else value
        for key, value in expected.items()
    }
    differences = diff(expected, observed)
    assert {difference.key.role for difference in differences} & set(roles)
    explain(differences, context_of(expected, observed, scenario))  # raises nothing
