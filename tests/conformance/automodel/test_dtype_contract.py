"""The dtype contract: its table, its documentation, and the function that applies it.

*Verifies*: every rule decides somewhere; the documented table is the code's; widening is torch's promote_types; the
promises that the founding bug broke. *Does not verify*: that a library keeps them (tests/conformance does).
"""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from shardproof.scenario import DTypePolicy, Scenario
from shardproof.systems.automodel.accepts import ACCEPTS
from shardproof.systems.automodel.dtype_contract import AUTO, RULES, Policy, Tensor, dtypes, recipe, wider

DOCUMENT = Path(__file__).parents[3] / "docs" / "dtype-contract.md"
HALF = Policy("bf16", "bf16")
TORCH = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def every_case() -> list[tuple[Tensor, str, Policy, bool]]:
    tensors = [
        Tensor(file, pinned=pinned, frozen=frozen, buffer=buffer, sharded=sharded, native=native)
        for file in ("bf16", "fp32", None)
        for pinned, frozen, buffer, sharded, native in itertools.product((False, True), repeat=5)
    ]
    policies = [Policy(), Policy("bf16"), Policy("bf16", "fp32"), Policy(None, "fp32")]
    return list(itertools.product(tensors, ("fp32", "bf16", AUTO), policies, (False, True)))


def test_the_documented_table_is_the_one_in_code() -> None:
    rows = [f"| `{r.id}` | {r.stage} | {r.when} | {r.then} | {r.source} |" for r in RULES]
    table = [line for line in DOCUMENT.read_text().splitlines() if line.startswith("| `")]
    assert table == rows


def test_every_rule_decides_somewhere_and_only_rules_decide() -> None:
    reasons = {why for t, asked, policy, by in every_case() for why in dtypes(t, asked, policy, by_dtype=by).reasons}
    assert reasons == {rule.id for rule in RULES}


def test_reasons_are_in_the_order_of_the_stages() -> None:
    stage = {rule.id: rule.stage for rule in RULES}
    for tensor, asked, policy, by in every_case():
        found = dtypes(tensor, asked, policy, by_dtype=by).reasons
        assert [stage[why] for why in found] == ["storage", "compute", "reduce", "state"]


@pytest.mark.parametrize(("first", "second"), list(itertools.product(TORCH, repeat=2)))
def test_wider_is_torchs_promotion(first: str, second: str) -> None:
    assert TORCH[wider(first, second)] == torch.promote_types(TORCH[first], TORCH[second])


def test_a_storage_dtype_that_the_loader_cannot_be_asked_for_is_refused_and_breaks_no_rule() -> None:
    scenario = Scenario(system="automodel", model="llama", dtype=DTypePolicy("mixed_fp16"), checkpoint="safetensors")
    refused = {limit.id: limit.reason for limit in ACCEPTS.limits if limit.refuses(scenario)}
    assert "from_pretrained is asked for one dtype" in refused["dtype-storage"]


def test_an_explicit_request_is_storage_and_the_policy_computes() -> None:
    found = dtypes(Tensor("bf16"), "fp32", Policy("bf16", "fp32"), by_dtype=False)
    assert (found.storage, found.compute, found.reduce, found.state) == ("fp32", "bf16", "fp32", "fp32")


def test_fp32_islands_survive_a_half_precision_request() -> None:
    assert dtypes(Tensor("fp32"), "bf16", HALF, by_dtype=True).storage == "fp32"
    assert dtypes(Tensor("fp32"), AUTO, HALF, by_dtype=True).compute == "fp32"


def test_pins_beat_the_record_and_the_record_beats_the_policy() -> None:
    assert dtypes(Tensor("bf16", pinned=True), "fp32", HALF, by_dtype=True).compute == "fp32"
    assert dtypes(Tensor("bf16"), "fp32", Policy("fp16"), by_dtype=True).compute == "bf16"
    assert dtypes(Tensor("bf16"), "fp32", Policy("fp16"), by_dtype=False).compute == "fp16"


def test_where_nothing_was_recorded_fp32_storage_is_a_master_and_any_other_computes_as_it_is() -> None:
    native = Tensor("fp32", native=True)
    assert dtypes(native, "fp32", HALF, by_dtype=True).compute == "bf16"
    assert dtypes(native, "fp32", Policy(), by_dtype=True).compute == "fp32"
    assert dtypes(native, "bf16", Policy("fp16"), by_dtype=True).compute == "bf16"
    assert dtypes(Tensor("bf16", pinned=True, native=True), "bf16", HALF, by_dtype=True).storage == "fp32"


def test_what_computes_in_fp32_is_reduced_in_fp32() -> None:
    assert dtypes(Tensor("fp32"), AUTO, HALF, by_dtype=True).reduce == "fp32"
    assert dtypes(Tensor(native=True), "fp32", Policy(reduce="bf16"), by_dtype=True).reduce == "fp32"


def test_frozen_plain_parameters_and_buffers_are_cast_and_sharded_ones_are_not() -> None:
    assert dtypes(Tensor("fp32", frozen=True, sharded=False), "fp32", HALF, by_dtype=False).storage == "bf16"
    assert dtypes(Tensor("fp32", frozen=True, buffer=True), "fp32", HALF, by_dtype=False).storage == "bf16"
    assert dtypes(Tensor("fp32", frozen=True), "fp32", HALF, by_dtype=False).storage == "fp32"
    assert (
        dtypes(Tensor("fp32", frozen=True, pinned=True, sharded=False), "fp32", HALF, by_dtype=False).storage == "fp32"
    )


def test_texts_of_recipes() -> None:
    assert recipe("recipe_pipeline", HALF, None) == {"pipeline.dtype": "bf16"}
    assert recipe("recipe_pipeline", HALF, "fp32") == {"pipeline.dtype": "fp32"}
    refused = dict.fromkeys(("unknown_dtype", "unknown_target", "no_mapping"), "refused")
    assert recipe("recipe_policy", HALF, None) == {"good": "param_dtype=bf16", **refused}
    assert recipe("recipe_storage", HALF, None)["auto"] == "fp32"
    with pytest.raises(ValueError, match="no 'nothing'"):
        recipe("nothing", HALF, None)
