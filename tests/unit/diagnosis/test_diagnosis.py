"""Diagnosis: each mechanism, applied to what the twin predicts, is recognised first; noise is not explained away.

Every case mutates the twin's own prediction, so that a rule is tested on the values that it will meet.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

import ml_dtypes
import numpy as np
import pytest
from shardproof import probe
from shardproof.diagnosis import Context, Explanation, Finding, Rule
from shardproof.diagnosis.rules import engine
from shardproof.diagnosis.rules.engine import explain
from shardproof.diff import LAZY_STATE, Difference, as_numbers, diff, numpy_dtype
from shardproof.grid import choose_grid
from shardproof.observe.assemble import assemble
from shardproof.observe.logical import Key, Logical, Problem, Value
from shardproof.observe.record import WRITTEN, Record
from shardproof.oracle import twin
from shardproof.program import expand
from shardproof.scenario import DTypePolicy, Mesh, Optimizer, Scenario

from tests.conformance.built_in import BUILT_IN
from tests.oracles import by_twin, inputs_of

pytestmark = pytest.mark.usefixtures("explained_word_for_word")

# Operations of `resume`: build step step save step | build step | build load step
STEP, SAVE, LATER_STEP, LOAD, LAST = 1, 3, 4, 8, 9
DENSE = Scenario(mesh=Mesh(1, 2, 1))


@lru_cache
def predicted(scenario: Scenario) -> Logical:
    return by_twin(scenario)


def context_of(
    expected: Logical, observed: Logical, scenario: Scenario = DENSE, cold: Logical | None = None
) -> Context:
    return Context(expected, observed, scenario, expand(scenario), cold or {}, inputs_of(scenario))


def diagnose(
    scenario: Scenario, mutate: Callable[[Logical], object], *, since: int, without_load: Logical | None = None
) -> list[Explanation]:
    """Explanations when `mutate` is applied to what the twin predicts and `since` is the last operation observed."""
    expected = {key: value for key, value in predicted(scenario).items() if key.op <= since}
    observed = dict(expected)
    mutate(observed)
    differences = diff(expected, observed, equivalences=(LAZY_STATE,))
    assert differences, "the mutation changed nothing"
    context = context_of(expected, observed, scenario, without_load)
    return explain(differences, context)


def top(explanations: list[Explanation]) -> Explanation:
    assert explanations, "nothing was explained"
    return explanations[0]


def live(op: int, role: str, fqn: str) -> Key:
    return Key(op, "live", role, fqn)


def like(value: Value, numbers: object) -> Value:
    array = np.asarray(numbers).astype(numpy_dtype(value.dtype))
    return Value(value.dtype, value.shape, array.tobytes())


def change(key: Key, how: Callable[[np.ndarray], object]) -> Callable[[Logical], None]:
    def mutate(state: Logical) -> None:
        state[key] = like(state[key], how(as_numbers(state[key]).reshape(state[key].shape).copy()))

    return mutate


# --- right bits in the wrong place -------------------------------------------------------------------------


def test_swapped_parameters_are_named_in_both_directions() -> None:
    def swap(state: Logical) -> None:
        for role in ("exp_avg", "exp_avg_sq"):
            a, b = live(LOAD, role, "a.weight"), live(LOAD, role, "b.weight")
            state[a], state[b] = state[b], state[a]

    found = top(diagnose(replace(DENSE, model="twins"), swap, since=LOAD))
    assert (found.mechanism, found.confidence) == ("permuted_parameters", "certain")
    assert {(e["name"], e["holds"]) for e in found.evidence} == {("a.weight", "b.weight"), ("b.weight", "a.weight")}
    assert found.text == (
        "Whole tensors are stored under each other's names: exp_avg and exp_avg_sq after operation 8 (load): "
        "a.weight holds b.weight's, b.weight holds a.weight's."
    )
    assert "MLM-2777" in found.bug_ids


def test_a_cycle_of_what_was_written_names_the_whole_permutation() -> None:
    def rotate(state: Logical) -> None:
        for role in ("master", "exp_avg"):
            a, b, c = (
                live(SAVE, role, name)._replace(where="written") for name in ("a.weight", "b.weight", "router.weight")
            )
            state[a], state[b], state[c] = state[b], state[c], state[a]

    scenario = replace(DENSE, model="twins", sharding="zero1", dtype=DTypePolicy.parse("bf16/master=fp32"))
    written = {key._replace(where="written"): value for key, value in predicted(scenario).items() if key.op == SAVE}
    expected = {**written, **{key: value for key, value in predicted(scenario).items() if key.op < SAVE}}
    observed = dict(expected)
    rotate(observed)
    found = top(explain(diff(expected, observed), context_of(expected, observed, scenario)))
    assert found.mechanism == "permuted_parameters"
    assert found.text.endswith(
        "written master and exp_avg after operation 3 (save): a.weight holds b.weight's, b.weight holds "
        "router.weight's, router.weight holds a.weight's."
    )


def test_a_swap_of_which_one_side_is_spoilt_is_no_permutation() -> None:
    def swap(state: Logical) -> None:
        a, b = live(LOAD, "exp_avg", "a.weight"), live(LOAD, "exp_avg", "b.weight")
        state[a], state[b] = state[b], like(state[a], as_numbers(state[a]) * 2)

    found = diagnose(replace(DENSE, model="twins"), swap, since=LOAD)
    assert "permuted_parameters" not in [e.mechanism for e in found]
    assert top(found).mechanism == "other_parameter"


def test_a_shard_of_another_parameter_is_enough() -> None:
    def swap(state: Logical) -> None:
        a, b = (as_numbers(state[live(SAVE, "exp_avg", f"{n}.weight")]).copy() for n in "ab")
        a[8:] = b[8:]
        state[live(SAVE, "exp_avg", "a.weight")] = like(state[live(SAVE, "exp_avg", "a.weight")], a)

    found = top(diagnose(replace(DENSE, model="twins"), swap, since=SAVE))
    assert (found.mechanism, found.evidence[0]["elements"]) == ("other_parameter", 8)


def test_swapped_moments() -> None:
    def swap(state: Logical) -> None:
        a, b = live(SAVE, "exp_avg", "up.weight"), live(SAVE, "exp_avg_sq", "up.weight")
        state[a], state[b] = state[b], state[a]

    assert top(diagnose(DENSE, swap, since=SAVE)).mechanism == "other_role"


def test_a_load_that_does_nothing() -> None:
    def keep(state: Logical) -> None:
        for key in [k for k in state if k.op == LOAD]:
            before = state.get(key._replace(op=LOAD - 1))
            if before is None:
                del state[key]
            else:
                state[key] = before

    found = top(diagnose(DENSE, keep, since=LOAD))
    assert (found.mechanism, found.confidence) == ("load_did_nothing", "certain")
    assert "PT-140898" in found.bug_ids


def test_an_optimizer_state_that_is_not_loaded() -> None:
    def lose(state: Logical) -> None:
        for key in [k for k in state if k.op == LOAD and k.role in ("exp_avg", "exp_avg_sq", "step")]:
            del state[key]

    found = top(diagnose(DENSE, lose, since=LOAD))
    assert (found.mechanism, found.confidence) == ("optimizer_not_loaded", "certain")
    assert "and no other parameter has any state" in found.text


def test_state_that_some_parameters_lack_is_not_an_optimizer_that_was_not_loaded() -> None:
    def lose(state: Logical) -> None:
        for key in [
            k for k in state if k.op == LOAD and k.fqn == "up.weight" and k.role in ("exp_avg", "exp_avg_sq", "step")
        ]:
            del state[key]

    assert top(diagnose(DENSE, lose, since=LOAD)).mechanism != "optimizer_not_loaded"


@pytest.mark.parametrize("program", ["model_only", "model_only_late"])
def test_masters_that_keep_an_earlier_value_beside_loaded_parameters(program: str) -> None:
    """The load did something: what the refresh missed are the optimizer's copies (MBR-3949)."""
    axes = {"sharding": "zero1", "dtype": "bf16/master=fp32", "program": program}
    scenario = DENSE.with_axes(axes)
    kinds = [op.kind for op in expand(scenario)]
    refresh = kinds.index("reload_params")

    def keep(state: Logical) -> None:
        for key in [k for k in state if k.op == refresh and k.role == "master"]:
            state[key] = state[key._replace(op=refresh - 2)]

    found = top(diagnose(scenario, keep, since=refresh))
    initial = kinds[refresh - 2] == "build"
    assert (found.mechanism, found.confidence) == ("initial_value" if initial else "stale_value", "certain")
    assert ("MBR-3949" in found.bug_ids) is initial
    assert ("its initialisation by operation 4 (build) after operation 6 (reload_params)" in found.text) is initial


def test_a_stale_copy_names_its_moment() -> None:
    def stale(state: Logical) -> None:
        state[live(LATER_STEP, "compute_param", "up.weight")] = state[live(2, "compute_param", "up.weight")]

    found = top(diagnose(DENSE, stale, since=LATER_STEP))
    assert (found.mechanism, found.evidence[0]["value_of_op"]) == ("stale_value", 2)
    assert "has its value of operation 2 (step)" in found.text


def test_a_save_that_was_still_reading_when_training_went_on_names_the_step_of_each_tensor() -> None:
    save, step = 2, 3
    names = [("exp_avg", "up.weight"), ("step", "up.weight"), ("param", "norm.weight")]

    scenario = replace(DENSE, program="build step save step build load step")
    expected = dict(predicted(scenario))
    expected |= {key._replace(where=WRITTEN): value for key, value in expected.items() if key.op == save}
    mixed = expected | {Key(save, WRITTEN, role, name): expected[live(step, role, name)] for role, name in names}
    found = top(explain(diff(expected, mixed, equivalences=(LAZY_STATE,)), context_of(expected, mixed, scenario)))
    assert found.mechanism == "later_value"
    assert {(e["role"], e["name"], e["of_step"], e["save_of_step"]) for e in found.evidence} == {
        (role, name, 2, 1) for role, name in names
    }
    assert "written exp_avg of up.weight is of step 2 (operation 3 (step)), the save of step 1" in found.text


def test_an_initial_value_that_was_never_overwritten() -> None:
    def stale(state: Logical) -> None:
        state[live(LATER_STEP, "param", "norm.weight")] = state[live(0, "param", "norm.weight")]

    found = top(diagnose(DENSE, stale, since=LATER_STEP))
    assert (found.mechanism, found.evidence[0]["value_of_op"]) == ("initial_value", 0)


def test_the_cold_arm() -> None:
    cold = live(LAST, "param", "up.weight")
    value = predicted(DENSE)[live(6, "param", "up.weight")]
    found = diagnose(DENSE, lambda state: state.update({cold: value}), since=LAST, without_load={cold: value})
    assert "stale_copy_won" in [e.mechanism for e in found]


def test_an_update_of_the_initialisation_instead_of_what_was_loaded() -> None:
    """The host copies of an offloaded optimizer keep the initial weights (MBR-3949)."""
    scenario = replace(DENSE, program="model_only")
    step, cold = 7, twin.run(inputs_of(scenario), cold_from=0)
    assert [op.kind for op in expand(scenario)][4:8] == ["build", "load_model_only", "reload_params", "step"]

    def stale(state: Logical) -> None:
        state.update({key: cold[key] for key in state if key.op == step and key.role == "param"})

    found = top(diagnose(scenario, stale, since=step, without_load=cold))
    assert (found.mechanism, found.confidence) == ("stale_copy_won", "certain")
    assert found.evidence[0]["started_from"] == 4
    assert (
        "param of down.bias after operation 7 (step) is the update of its initialisation by operation 4 (build), "
        "not of what operation 5 (load_model_only) loaded" in found.text
    )
    assert "MBR-3949" in found.bug_ids


def test_masters_whose_low_bits_a_model_only_load_did_not_reach() -> None:
    axes = {"sharding": "zero1", "dtype": "bf16/master=fp32", "program": "model_only_late"}
    scenario = DENSE.with_axes(axes)
    refresh = 6
    assert [op.kind for op in expand(scenario)][4:7] == ["step", "load_model_only", "reload_params"]

    def keep_low_bits(state: Logical) -> None:
        key = live(refresh, "master", "up.weight")
        before = np.frombuffer(state[key._replace(op=4)].data, np.uint32) & np.uint32(0xFFFF)
        high = np.frombuffer(state[key].data, np.uint32) >> np.uint32(16)
        high = high - (before >= 0x8000).astype(np.uint32)
        state[key] = state[key]._replace(data=(high << np.uint32(16) | before).tobytes())

    found = top(diagnose(scenario, keep_low_bits, since=refresh))
    assert (found.mechanism, found.evidence[0]["value_of_op"]) == ("stale_remainder", 5)


def test_remainders_that_are_written_for_masters() -> None:
    scenario = DENSE.with_axes({"sharding": "zero1", "dtype": "bf16/master=fp32"})
    key = live(SAVE, "master", "up.weight")

    def low_bits(array: np.ndarray) -> np.ndarray:
        return (array.view(np.uint32) & np.uint32(0xFFFF)).astype(np.uint16).view(np.int16)

    found = top(diagnose(scenario, change(key, low_bits), since=SAVE))
    assert (found.mechanism, found.confidence) == ("remainder_as_value", "certain")


def test_a_moment_of_another_kernel_is_no_wrong_scale() -> None:
    """FusedAdam's 1 - beta is 2^-22 off torch's, relatively: all moments are a few units in the last place larger."""
    key = live(STEP, "exp_avg", "up.weight")
    found = top(diagnose(DENSE, change(key, lambda a: a * np.float32(1 + 2.0**-22)), since=STEP))
    assert (found.mechanism, found.confidence) == ("other_kernel", "likely")


def test_zeroed_halves() -> None:
    def drop(array: np.ndarray) -> np.ndarray:
        array[4:] = 0
        return array

    key = live(SAVE, "exp_avg", "fc1.weight")
    found = top(diagnose(replace(DENSE, model="swiglu"), change(key, drop), since=SAVE))
    assert (found.mechanism, found.evidence[0]["elements"]) == ("zeroed", 24)
    assert "24 of 36 elements of exp_avg of fc1.weight are zero" in found.text


# --- dtypes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ["grad", "exp_avg", "param"])
def test_rounded_through_bf16(role: str) -> None:
    key = live(STEP, role, "up.weight")
    found = top(diagnose(DENSE, change(key, lambda a: a.astype(ml_dtypes.bfloat16)), since=STEP))
    assert (found.mechanism, found.confidence, found.evidence[0]["through"]) == ("narrowed", "certain", "bf16")


def test_one_shard_rounded() -> None:
    def part(array: np.ndarray) -> np.ndarray:
        array[8:] = array[8:].astype(np.float16)
        return array

    found = top(diagnose(DENSE, change(live(SAVE, "param", "up.weight"), part), since=SAVE))
    assert (found.mechanism, found.evidence[0]["through"]) == ("partly_narrowed", "fp16")


@pytest.mark.parametrize(("policy", "values"), [("fp32", "rounded to it"), ("bf16", "equal values")])
def test_another_dtype(policy: str, values: str) -> None:
    key = live(LOAD, "param", "up.weight")
    to = "bf16" if policy == "fp32" else "fp32"

    def cast(state: Logical) -> None:
        array = as_numbers(state[key]).astype(numpy_dtype(to))
        state[key] = Value(to, state[key].shape, array.tobytes())

    found = top(diagnose(replace(DENSE, dtype=DTypePolicy(policy)), cast, since=LOAD))
    assert (found.mechanism, found.confidence) == ("other_dtype", "certain")
    assert f"is {to} instead of {policy}" in found.text
    assert values in found.text


# --- gradients -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("factor", "name"), [(2.0, "the number of data-parallel ranks (2)"), (0.5, "1 / the number of data-parallel ranks")]
)
def test_scaled_gradients(factor: float, name: str) -> None:
    key = live(STEP, "grad", "up.weight")
    found = top(diagnose(DENSE, change(key, lambda a: a * np.float32(factor)), since=STEP))
    assert (found.mechanism, found.confidence) == ("scaled", "certain")
    assert name in found.text


def test_an_unknown_factor_is_likely() -> None:
    found = top(diagnose(DENSE, change(live(STEP, "grad", "up.weight"), lambda a: a * np.float32(0.37)), since=STEP))
    assert (found.mechanism, found.confidence) == ("scaled", "likely")
    assert "0.37 times" in found.text


@pytest.mark.parametrize(
    ("mesh", "microbatches", "kept", "divisor", "name"),
    [
        (Mesh(1, 4, 1), 1, lambda c: np.delete(c, 2, axis=1), 4, "all data-parallel ranks but 2"),
        (Mesh(1, 4, 1), 1, lambda c: np.delete(c, 2, axis=1), 3, "all data-parallel ranks but 2"),
        (Mesh(1, 2, 1), 3, lambda c: c[1:], 2, "the average over all microbatches but 0"),
        (Mesh(1, 2, 1), 3, lambda c: c[2:], 2, "the average of microbatch 2 alone"),
        (Mesh(1, 3, 1), 1, lambda c: c[:, 1:2], 1, "one data-parallel rank's own contribution alone"),
        (Mesh(2, 2, 1), 1, lambda c: c[:, 2:], 2, "the average over one replica group alone"),
    ],
)
def test_missing_contributions(mesh, microbatches, kept, divisor, name) -> None:  # type: ignore[no-untyped-def]
    scenario = Scenario(mesh=mesh, microbatches=microbatches)
    grid = choose_grid(("fp32",) * 3, "fp32", mesh.dp, microbatches)
    keys = probe.element_keys("up.weight", (16, 7), 0)
    contributions = np.stack([probe.rank_units(keys, 0, m, mesh.dp, grid) for m in range(microbatches)])
    wrong = kept(contributions).sum(axis=(0, 1)) * grid.unit / divisor
    found = top(diagnose(scenario, change(live(STEP, "grad", "up.weight"), lambda a: wrong), since=STEP))
    assert (found.mechanism, found.confidence) == ("missing_contribution", "certain")
    assert name in found.text


def test_the_gradient_explains_what_follows_from_it() -> None:
    """Moments and parameters deviate too, in ways of their own; the cause comes first."""

    def rounded_gradient(state: Logical) -> None:
        change(live(STEP, "grad", "up.weight"), lambda a: a * 2)(state)
        change(live(STEP, "exp_avg", "up.weight"), lambda a: a.astype(ml_dtypes.bfloat16))(state)
        change(live(STEP, "param", "up.weight"), lambda a: a.astype(ml_dtypes.bfloat16))(state)

    mechanisms = [e.mechanism for e in diagnose(DENSE, rounded_gradient, since=STEP)]
    assert mechanisms[:2] == ["scaled", "narrowed"]


def test_an_overflow_that_was_applied() -> None:
    scenario = replace(DENSE, program="overflow", optimizer=Optimizer(loss_scale=1024.0))
    key = live(2, "param", "up.weight")

    def poison(array: np.ndarray) -> np.ndarray:
        array[0, 0] = np.nan
        return array

    found = top(diagnose(scenario, change(key, poison), since=2))
    assert (found.mechanism, found.confidence) == ("overflow_not_skipped", "certain")


def test_the_last_microbatch_added_after_the_reduction() -> None:
    """Each rank adds its own last microbatch, so that the halves of a sharded gradient differ in the rank."""
    scenario = Scenario(mesh=Mesh(1, 2, 1), microbatches=2)
    grid = choose_grid(("fp32",) * 3, "fp32", 2, 2)
    keys = probe.element_keys("up.weight", (16, 7), 0)
    first, last = (probe.rank_units(keys, 0, m, 2, grid) * grid.unit for m in range(2))
    wrong = first.mean(axis=0) + np.where(np.arange(112) < 56, last[0], last[1])
    found = top(diagnose(scenario, change(live(STEP, "grad", "up.weight"), lambda a: wrong), since=STEP))
    assert (found.mechanism, found.confidence) == ("missing_contribution", "certain")
    assert "all microbatches but the last plus one rank's own last one" in found.text


def test_accumulation_in_a_narrower_dtype() -> None:
    scenario = Scenario(mesh=Mesh(1, 2, 1), microbatches=3)
    grid = choose_grid(("fp32",) * 3, "fp32", 2, 3)
    keys = probe.element_keys("up.weight", (16, 7), 0)
    total = np.zeros((2, 112))
    for microbatch in range(3):
        total = total + probe.rank_units(keys, 0, microbatch, 2, grid) * grid.unit
        total = total.astype(ml_dtypes.bfloat16).astype(np.float64)
    wrong = total.sum(axis=0) / 2
    found = top(diagnose(scenario, change(live(STEP, "grad", "up.weight"), lambda a: wrong), since=STEP))
    assert (found.mechanism, found.confidence) == ("narrowed_sum", "certain")
    assert "accumulated over microbatches in bf16" in found.text


def test_gradients_that_were_not_cleared() -> None:
    def keep(state: Logical) -> None:
        now, before = live(2, "grad", "up.weight"), live(1, "grad", "up.weight")
        state[now] = like(state[now], as_numbers(state[now]) + as_numbers(state[before]))

    found = top(diagnose(DENSE, keep, since=2))
    assert (found.mechanism, found.confidence, found.evidence[0]["since_op"]) == ("gradient_kept", "certain", 1)


# --- order ---------------------------------------------------------------------------------------------------


def test_ten_before_nine() -> None:
    scenario = replace(DENSE, model="many")
    order = sorted(range(12), key=str)
    found = top(diagnose(scenario, change(live(LOAD, "param", "layers.3.weight"), lambda a: a[order]), since=LOAD))
    assert (found.mechanism, found.confidence) == ("permuted", "certain")
    assert found.evidence[0]["order"] == order
    assert "the 12 chunks sorted as text" in found.text
    assert "DS-5342" in found.bug_ids


def test_strided_shards_read_as_plain_ones() -> None:
    scenario = replace(DENSE, mesh=Mesh(1, 3, 2))
    order = [0, 1, 6, 7, 2, 3, 8, 9, 4, 5, 10, 11]
    found = top(diagnose(scenario, change(live(LOAD, "param", "embed.weight"), lambda a: a[order]), since=LOAD))
    assert found.mechanism == "permuted"
    assert "with the two levels of sharding exchanged" in found.text


def test_permuted_columns() -> None:
    found = top(diagnose(DENSE, change(live(LOAD, "param", "down.weight"), lambda a: a[:, ::-1]), since=LOAD))
    assert (found.mechanism, found.evidence[0]["dim"]) == ("permuted", 1)


def test_uneven_shards_read_at_floor_offsets() -> None:
    """Rank 1 of 3 reads rows 5 to 10 of 16 where its own are 6 to 11; rank 2 rows 10 to 13 instead of 12 to 15."""
    order = [*range(6), *range(5, 11), *range(10, 14)]
    found = top(diagnose(DENSE, change(live(LOAD, "param", "up.weight"), lambda a: a[order]), since=LOAD))
    assert (found.mechanism, found.confidence) == ("misplaced", "certain")
    assert "slice 6 holds 5, 7 holds 6" in found.text


def test_transposed() -> None:
    scenario = replace(DENSE, model="experts")
    found = top(diagnose(scenario, change(live(LOAD, "param", "experts.w1"), lambda a: a.swapaxes(1, 2)), since=LOAD))
    assert (found.mechanism, found.evidence[0]["dims"]) == ("transposed", [1, 2])


@pytest.mark.parametrize("by", [2, -3])
def test_shifted_by_padding(by: int) -> None:
    def shift(array: np.ndarray) -> np.ndarray:
        flat = array.reshape(-1).copy()
        flat[20:] = 0.5
        moved = array.reshape(-1)[20:]
        flat[20:] = np.concatenate([moved[by:], [0.5] * by]) if by > 0 else np.concatenate([[0.5] * -by, moved[:by]])
        return flat

    found = top(diagnose(DENSE, change(live(LOAD, "exp_avg", "up.weight"), shift), since=LOAD))
    assert (found.mechanism, found.evidence[0]["elements"], found.evidence[0]["from"]) == ("shifted", by, 20)


# --- counters and groups -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "how"), [(3.0, "is 1 ahead"), (1.0, "is 1 behind"), (0.0, "is back at 0")])
def test_step_counters(count: float, how: str) -> None:
    found = top(diagnose(DENSE, change(live(LOAD, "step", "up.weight"), lambda a: np.array(count)), since=LOAD))
    assert (found.mechanism, found.confidence) == ("counter_off", "certain")
    assert f"step of up.weight {how} after operation 8 (load)" in found.text


def test_integer_buffers_count_too() -> None:
    scenario = replace(DENSE, model="frozen_tower")
    key = live(LOAD, "buffer", "tower.vision.batches")
    assert top(diagnose(scenario, change(key, lambda a: a + 5), since=LOAD)).mechanism == "counter_off"


@pytest.mark.parametrize(
    ("group", "number", "source"),
    [
        ("group2.lr", 0.03125, "that of group0"),
        ("group1.weight_decay", 0.01, "torch's default"),
        ("group1.weight_decay", 0.125, "that of group0"),
        ("group0.beta2", 0.999, "torch's default"),
        ("group0.lr", 0.7, "no known source"),
    ],
)
def test_hyperparameters(group: str, number: float, source: str) -> None:
    scenario = replace(DENSE, model="groups")
    found = top(diagnose(scenario, change(live(LOAD, "hyperparameter", group), lambda a: np.array(number)), since=LOAD))
    assert (found.mechanism, found.evidence[0]["source"]) == ("hyperparameter", source)


def test_a_schedule_that_was_not_loaded() -> None:
    scenario = replace(DENSE, optimizer=Optimizer(schedule="halve"))
    key = live(LOAD, "hyperparameter", "group0.lr")
    found = top(diagnose(scenario, change(key, lambda a: np.array(0.0625)), since=LOAD))
    assert "its value of operation 7 (build)" in found.text


@pytest.mark.parametrize(
    ("line", "how"),
    [("float", "is `float` instead of `tensor float32 ()`"), (None, "is gone; it was `tensor float32 ()`")],
)
def test_a_key_of_a_group_that_changed(line: str | None, how: str) -> None:
    key = live(LOAD, "setting", "group0.lr")
    was, now = b"tensor float32 ()", (line or "").encode()
    expected = {key: Value("utf8", (len(was),), was)}
    observed = {key: Value("utf8", (len(now),), now)} if line else {}
    found = top(explain(diff(expected, observed), context_of(expected, observed)))
    assert (found.mechanism, found.confidence) == ("setting_changed", "certain")
    assert how in found.text


@pytest.mark.parametrize(("names", "how"), [("reversed", "another order"), ("lost", "lacks ['b.weight']")])
def test_group_members(names: str, how: str) -> None:
    key = live(LOAD, "hyperparameter", "group2.params")
    scenario = replace(DENSE, model="groups", optimizer=Optimizer())

    def reorder(state: Logical) -> None:
        order = live(LOAD, "hyperparameter", "group0.params")
        chosen = order if names == "reversed" else key
        members = state[chosen].data.decode().split("\n")
        text = "\n".join(members[::-1] if names == "reversed" else []).encode()
        state[chosen] = Value("utf8", (len(text),), text)

    found = top(diagnose(scenario, reorder, since=LOAD))
    assert (found.mechanism, found.confidence) == ("group_members", "certain")
    assert how in found.text


# --- updates -------------------------------------------------------------------------------------------------


def test_a_step_that_started_from_stale_masters() -> None:
    scenario = replace(DENSE, program="model_only")
    load, step = 5, 7
    ops = [op.kind for op in expand(scenario)]
    assert (ops[load], ops[step]) == ("load_model_only", "step")
    key = live(step, "param", "up.weight")

    def stale(state: Logical) -> None:
        init, before = (as_numbers(state[key._replace(op=i)]) for i in (load - 1, step - 1))
        state[key] = like(state[key], init + (as_numbers(state[key]) - before) * np.float32(0.9))

    found = top(diagnose(scenario, stale, since=step))
    assert (found.mechanism, found.evidence[0]["continued_from"]) == ("continued_from", load - 1)
    assert "MBR-3949" in found.bug_ids


def test_a_rank_that_was_left_out_of_the_step() -> None:
    def keep(state: Logical) -> None:
        now, before = (as_numbers(state[live(op, "param", "up.weight")]).copy() for op in (2, 1))
        now[98:] = before[98:]
        state[live(2, "param", "up.weight")] = like(state[live(2, "param", "up.weight")], now)

    found = top(diagnose(DENSE, keep, since=2))
    assert (found.mechanism, found.confidence) == ("not_updated", "certain")
    assert "14 of 112 elements of param of up.weight are as before operation 2 (step)" in found.text


def test_decay_by_an_initialising_step() -> None:
    key = live(LOAD, "param", "up.weight")
    factor = np.float32(1 - 0.03125 * 0.125)
    found = top(diagnose(DENSE, change(key, lambda a: a * factor), since=LOAD))
    assert (found.mechanism, found.evidence[0]["times"]) == ("weight_decay", 1)


def test_decay_that_was_forgotten() -> None:
    key = live(LATER_STEP, "param", "up.weight")
    amount = np.float32(0.03125 * 0.125)

    def undecayed(state: Logical) -> None:
        before = as_numbers(state[key._replace(op=SAVE)])
        state[key] = like(state[key], as_numbers(state[key]) + before * amount)

    found = top(diagnose(DENSE, undecayed, since=LATER_STEP))
    assert (found.mechanism, found.evidence[0]["times"]) == ("weight_decay", -1)


def test_one_ulp_is_the_kernel() -> None:
    def nudge(array: np.ndarray) -> np.ndarray:
        array[::3] = np.nextafter(array[::3], np.float32(9))
        return array

    found = top(diagnose(DENSE, change(live(STEP, "param", "up.weight"), nudge), since=STEP))
    assert (found.mechanism, found.confidence) == ("other_kernel", "likely")


# --- ranks, ties, presence -----------------------------------------------------------------------------------


def test_tied_names_that_differ() -> None:
    scenario = replace(DENSE, model="tied")
    key = live(LATER_STEP, "param", "head.weight")
    found = top(diagnose(scenario, change(key, lambda a: a + np.float32(0.25)), since=LATER_STEP))
    assert (found.mechanism, found.confidence) == ("tie_split", "certain")
    assert "head.weight and embed.weight differ" in found.text


def test_replicas_and_partitions() -> None:
    for kind, mechanism in (("replica_conflict", "replicas_diverged"), ("gap", "bad_partition")):
        expected = predicted(DENSE)
        key = live(STEP, "param", "up.weight")
        observed = dict(expected) if kind == "replica_conflict" else {k: v for k, v in expected.items() if k != key}
        differences = diff(expected, observed, [Problem(key, kind, (1,), "in words")])
        found = top(explain(differences, context_of(expected, observed)))
        assert (found.mechanism, found.confidence) == (mechanism, "certain")
        assert "in words" in found.text


def test_one_rank_alone_is_the_last_resort() -> None:
    key = live(STEP, "param", "up.weight")
    truth = predicted(DENSE)[key]
    halves = [truth.data[: len(truth.data) // 2], np.full(56, 7.5, np.float32).tobytes()]
    records = [
        Record(*key[:1], r, *key[1:], "fp32", (16, 7), (8 * r, 0), (8, 7), half) for r, half in enumerate(halves)
    ]
    observed = assemble(records)[0]
    expected = {key: truth}
    differences = diff(expected, observed, records=records)
    assert [d.ranks for d in differences] == [(1,)]
    found = top(explain(differences, context_of(expected, observed)))
    assert (found.mechanism, found.confidence) == ("one_rank", "possible")
    assert "deviates on rank 1, the last one of 2" in found.text


@pytest.mark.parametrize(
    ("where", "op", "mechanism"), [("live", STEP, "state_missing"), ("written", SAVE, "not_saved")]
)
def test_missing_state(where: str, op: int, mechanism: str) -> None:
    expected = {key: value for key, value in predicted(DENSE).items() if key.op <= op}
    key = Key(op, where, "exp_avg", "up.weight")
    expected[key] = expected[live(op, "exp_avg", "up.weight")]
    observed = {k: v for k, v in expected.items() if k != key}
    found = top(explain(diff(expected, observed), context_of(expected, observed)))
    assert found.mechanism == mechanism


def test_a_save_that_creates_state() -> None:
    scenario = replace(DENSE, program="save_first")

    def create(state: Logical) -> None:
        for role in ("exp_avg", "exp_avg_sq"):
            state[live(1, role, "up.weight")] = like(state[live(1, "param", "up.weight")], np.zeros(112))
        state[live(1, "step", "up.weight")] = Value("fp32", (), np.float32(1).tobytes())

    found = top(diagnose(scenario, create, since=1))
    assert (found.mechanism, found.confidence) == ("initialising_step", "certain")
    assert "was created by operation 1 (save)" in found.text


def test_invented_and_misshapen_state() -> None:
    key = live(STEP, "exp_avg", "padding")
    extra = diagnose(DENSE, lambda s: s.update({key: Value("fp32", (1,), b"1234")}), since=STEP)
    assert top(extra).mechanism == "state_invented"
    step = live(STEP, "step", "up.weight")
    shape = diagnose(DENSE, lambda s: s.update({step: s[step]._replace(shape=(1,))}), since=STEP)
    assert top(shape).mechanism == "wrong_shape"


# --- the engine ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ["param", "grad", "exp_avg"])
def test_noise_is_never_explained_with_certainty(role: str) -> None:
    noise = np.random.default_rng(3).normal(size=(16, 7)).astype(np.float32)
    found = diagnose(DENSE, change(live(STEP, role, "up.weight"), lambda a: noise), since=STEP)
    assert not [e for e in found if e.confidence != "possible"]


def test_the_first_failing_operation_is_explained() -> None:
    def two(state: Logical) -> None:
        change(live(LOAD, "step", "up.weight"), lambda a: a + 1)(state)
        change(live(STEP, "grad", "up.weight"), lambda a: a * 2)(state)

    assert [e.mechanism for e in diagnose(DENSE, two, since=LOAD)] == ["scaled"]


def test_nothing_to_explain() -> None:
    assert explain([], context_of({}, {})) == []
    (vacuous,) = diff({}, {})
    assert explain([vacuous], context_of({}, {})) == []


def test_explanations_are_plain_data() -> None:
    found = diagnose(DENSE, change(live(STEP, "grad", "up.weight"), lambda a: a * 2), since=STEP)
    for explanation in found:
        assert json.loads(json.dumps(explanation.evidence)) == list(explanation.evidence)


def test_a_plugin_can_register_a_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    def always(difference: Difference, context: Context) -> Finding:
        return Finding("certain", f"{difference.key.fqn} offends it", {})

    monkeypatch.setattr(engine, "_RULES", [])
    engine.register(Rule("mine", "My rule", always))
    found = diagnose(DENSE, change(live(STEP, "grad", "up.weight"), lambda a: a * 2), since=STEP)
    assert [(e.mechanism, e.text) for e in found] == [("mine", "My rule: up.weight offends it.")]


def test_a_system_may_have_rules_of_its_own_after_those_of_all() -> None:
    def certain(difference: Difference, context: Context) -> Finding:
        return Finding("certain", f"{difference.key.fqn} offends it", {})

    key = live(STEP, "grad", "up.weight")
    expected = {k: value for k, value in predicted(DENSE).items() if k.op <= STEP}
    observed = dict(expected)
    change(key, lambda a: a * 2)(observed)
    differences, context = diff(expected, observed), context_of(expected, observed)
    (general,) = explain(differences, context)
    found = explain(differences, context, [Rule("theirs", "Their rule", certain)])
    assert found == [general, Explanation("theirs", "certain", "Their rule: up.weight offends it.", ({},), ())]


def test_rules_are_documented_and_unique() -> None:
    rules = [*engine.rules(), *(rule for system in BUILT_IN for rule in system.rules)]
    mechanisms = [rule.mechanism for rule in rules]
    assert len(set(mechanisms)) == len(mechanisms)
    for rule in rules:
        assert rule.find.__doc__, f"{rule.mechanism} does not say where it comes from"
