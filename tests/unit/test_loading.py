"""Ranks that load with dtypes, or a release, of their own: what they see, and that a load which rounds otherwise than
to the nearest is noticed."""

from __future__ import annotations

import os

os.environ["ATEN_CPU_CAPABILITY"] = "default"  # read by torch when its first kernel runs

from typing import Any

import numpy as np
import pytest
from shardproof.axes_read import Noting
from shardproof.errors import UsageError
from shardproof.laboratory.judge import ResolvedScenario, judge, run_reference
from shardproof.loading import as_loaded, scenario_during, with_other
from shardproof.program import LOAD_AXES, changes, expand, sessions
from shardproof.protocol.registry import system_named
from shardproof.reference import system as reference
from shardproof.reference.system import Ranks
from shardproof.scenario import AXES, Scenario
from shardproof.space.constraints import constraints_on, impossible
from shardproof.space.cost import CostModel

ROUNDED = Scenario.from_axes({"mesh": "1x2x1", "checkpoint": "sharded", "load_dtype": "bf16"})


def test_ranks_that_load_have_the_dtypes_and_the_release_that_are_asked_for() -> None:
    scenario = Scenario.from_axes({
        "system": "megatron-core", "version": "0.15.3+cured", "dtype": "bf16/master=fp32",
        "load_dtype": "fp16/master=fp32", "load_version": "0.16.1",
    })  # fmt: skip
    loaded = as_loaded(scenario)
    assert (str(loaded.dtype), loaded.version) == ("fp16/master=fp32", "0.16.1+cured")
    assert as_loaded(loaded) == loaded
    assert expand(loaded) == expand(scenario)


@pytest.mark.parametrize(("asked", "gets"), [("same", "0.15.3"), ("newest", ""), ("0.16.0", "0.16.0")])
def test_the_release_that_loads(asked: str, gets: str) -> None:
    scenario = Scenario.from_axes({"version": "0.15.3", "load_version": asked})
    assert as_loaded(scenario).version == gets
    assert changes(scenario) is (asked != "same")


@pytest.mark.parametrize("axes", [{"load_version": "newest"}, {"load_dtype": "bf16"}])
def test_the_sessions_of_ranks_that_load_are_counted(axes: dict[str, str]) -> None:
    costs = CostModel({"torch-fsdp2": (0.5, 1.0)}, {}, {})
    scenario = Scenario.from_axes({"system": "torch-fsdp2", "mesh": "1x2x1", "program": "resume"})
    assert costs.estimate_s(scenario) == 1.0, "one session: the same ranks go on"
    assert costs.estimate_s(scenario.with_axes(axes)) == 2.0
    assert costs.estimate_s(scenario) == 1.0


def test_only_ranks_of_a_later_session_load() -> None:
    ops = expand(ROUNDED)
    assert len(sessions(ops)) == 2, "on the same mesh, and yet other ranks"
    assert {str(scenario_during(ROUNDED, op).dtype) for op in ops if not op.session} == {"fp32"}
    assert {str(scenario_during(ROUNDED, op).dtype) for op in ops if op.session} == {"bf16"}


def test_a_rule_that_notes_what_it_reads_reads_the_axes_of_the_load() -> None:
    read: list[str] = []

    def ask(axis: str) -> Any:
        read.append(axis)
        return getattr(ROUNDED, axis)

    loaded = as_loaded(Noting(ask))
    assert str(loaded.dtype) == "bf16"
    assert loaded.fact("dtype", lambda dtype: dtype.storage) == "bf16"
    assert loaded.version == ""
    assert set(read) == {"load_dtype", "version", "load_version"}


OTHER = {
    "load_dtype": "bf16", "load_model": "dense+one", "load_optimizer": "adam", "load_options": "overlap",
    "load_version": "0.16.1",
}  # fmt: skip
"""Each axis of the ranks that load, with a value that is another one than the default scenario's."""


def test_every_axis_of_the_ranks_that_load_is_known_to_the_program() -> None:
    assert {axis for axis in AXES if axis.startswith("load_")} == set(LOAD_AXES) == set(OTHER)


@pytest.mark.parametrize("axis", OTHER)
def test_every_axis_of_the_ranks_that_load_is_seen_by_them_and_by_rules_that_note_what_they_read(axis: str) -> None:
    scenario, seen = Scenario.from_axes({axis: OTHER[axis]}), axis.removeprefix("load_")
    loaded, noting = as_loaded(scenario), as_loaded(Noting(scenario.__getattribute__))
    assert getattr(loaded, seen) != getattr(scenario, seen)
    assert getattr(noting, seen) == getattr(loaded, seen)
    assert noting.fact(seen, lambda value: value) == getattr(loaded, seen)


@pytest.mark.parametrize(
    ("axes", "reason"),
    [
        ({"dtype": "bf16", "load_dtype": "bf16"}, "load-dtype-unused"),
        ({"program": "rollback", "load_dtype": "bf16"}, "load-dtype-unused"),
        ({"system": "deepspeed", "load_version": "newest", "sharding": "zero1"}, "load-version-unused"),
        ({"program": "restart", "options": "overlap", "load_options": "overlap"}, "load-options-unused"),
        ({"program": "rollback", "load_options": "overlap"}, "load-options-unused"),
        ({"load_dtype": "bf16", "optimizer": "adamw", "load": "grow", "mesh": "1x2x1"}, ""),
        ({"dtype": "bf16", "load_dtype": "bf16/master=fp32", "sharding": "zero1"}, "load-masters"),
        ({"load_dtype": "fp16", "optimizer": "adamw"}, "fp16-eps-load"),
    ],
)
def test_what_ranks_that_load_must_not_be(axes: dict[str, str], reason: str) -> None:
    scenario = Scenario.from_axes(axes)
    assert next((c.id for c in constraints_on(scenario) if c.excludes(scenario)), "") == reason


def test_a_limit_holds_for_the_ranks_that_load_too() -> None:
    asked = Scenario.from_axes({"system": "torch-fsdp2", "load_dtype": "fp32/master=bf16"})
    refused = system_named("torch-fsdp2").refusal(asked)
    assert refused is not None
    assert refused.startswith("after the load: torch-fsdp2 has these values of dtype master: unset")


@pytest.mark.parametrize("text", ["path:.", "git:main", "", "../x", "1 2"])
def test_a_release_that_loads_is_a_release(text: str) -> None:
    with pytest.raises(UsageError, match="load_version"):
        Scenario.from_axes({"load_version": text})


@pytest.mark.parametrize("form", ["sharded", "gathered", "model_space"])
@pytest.mark.parametrize(("saved", "loaded"), [("fp32", "bf16"), ("bf16", "fp32"), ("mixed", "bf16/reduce=fp32")])
def test_both_oracles_round_what_is_loaded_to_the_nearest(form: str, saved: str, loaded: str) -> None:
    scenario = ROUNDED.with_axes({"dtype": saved, "load_dtype": loaded, "checkpoint": form, "load": "grow"})
    assert impossible(scenario) is None
    found, _, _ = run_reference(ResolvedScenario.from_scenario(scenario))
    assert (found.differences, found.distrust) == ((), "")


def test_a_load_that_cuts_off_what_it_cannot_store_is_noticed() -> None:
    def cut(ranks: Ranks) -> None:
        whole = ranks.loader._over_catalogue

        def towards_zero(shards: Any, tensors: dict[str, Any], dtype: Any) -> Any:
            def less(values: Any) -> Any:
                return (values.view(np.uint32) & 0xFFFF0000).view(np.float32)

            narrow = dtype.itemsize == 2
            return whole(shards, {name: less(v) if narrow else v for name, v in tensors.items()}, dtype)

        ranks.loader._over_catalogue = towards_zero  # type: ignore[method-assign]

    case = ResolvedScenario.from_scenario(ROUNDED)
    found = judge(case, reference.run(case.inputs, case.placement, install=cut))
    first = found.differences[0]
    assert (case.ops[first.key.op].kind, first.kind) == ("load", "bits")
    assert first.expected_first != first.observed_first


@pytest.mark.parametrize(
    ("ask", "other", "wanted"),
    [
        ("adamw/impl=fused", "adam", "adam/impl=fused"),
        ("adam/impl=fused", "tensor_lr=true", "adam/impl=fused/tensor_lr=true"),
        ("adam/impl=fused/tensor_lr=true", "tensor_lr=false", "adam/impl=fused"),
    ],
)
def test_the_ranks_that_load_have_another_optimizer(ask: str, other: str, wanted: str) -> None:
    scenario = Scenario.from_axes({"optimizer": ask, "load_optimizer": other, "program": "restart"})
    assert str(with_other(scenario.optimizer, other)) == str(as_loaded(scenario).optimizer) == wanted
