"""Twin and reference, which share no arithmetic, agree bit for bit on any scenario that Megatron's contract governs."""

from __future__ import annotations

import os

os.environ["ATEN_CPU_CAPABILITY"] = "default"  # read by torch when its first kernel runs

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from shardproof.diff import LAZY_STATE, as_numbers, diff
from shardproof.laboratory.oracle_agreement import known_to_both
from shardproof.models import zoo
from shardproof.observe.assemble import assemble
from shardproof.observe.logical import Logical
from shardproof.observe.record import LIVE
from shardproof.oracle import twin
from shardproof.oracle.inputs import Inputs, Placement
from shardproof.oracle.reported import Reported
from shardproof.program import PROGRAMS, load_mesh, operations
from shardproof.protocol.registry import contract_of
from shardproof.reference import system as reference
from shardproof.scenario import Scenario
from shardproof.space.constraints import impossible

from tests.effort import examples

ZOO = zoo()
MESHES = ("1x1x1", "1x2x1", "1x3x1", "1x4x1", "2x2x1", "1x2x2", "2x1x1", "1x1x2", "1x8x1", "2x2x2")
STORED = ("fp32", "bf16", "fp16", "mixed", "mixed_fp16")

ANOTHER_LOOP = {
    "unfreeze", "add_group", "optimizer_only", "pending", "pending_first", "accumulation", "recall", "schedule_only",
    "replace", "save_kept", "async_steps",
}  # fmt: skip
MEGATRONS = [name for name in PROGRAMS if name not in ANOTHER_LOOP]
"""The programs that a system of Megatron's contract runs. The others need a training loop of one's own."""


@st.composite
def optimizers(draw: st.DrawFn, *, aware: bool, fp16: bool) -> str:
    kind = draw(st.sampled_from(("adamw", "adam") if aware else ("adamw", "adamw", "adam", "sgd", "sgd/momentum=0.0")))
    parts = [kind, f"impl={'multi_tensor' if aware else draw(st.sampled_from(('multi_tensor', 'forloop')))}"]
    parts += [f"loss_scale={scale}" for scale in draw(st.lists(st.sampled_from((8.0, 1024.0)), max_size=1)) if fp16]
    for part in ("groups=one", "clip=0.5", "schedule=linear", "weight_decay=0.0", "eps=0.001"):
        if draw(st.integers(0, 3)) == 0:
            parts.append(part)
    return "/".join(parts)


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    """A scenario of Megatron-Core, whatever its releases can run."""
    storage = draw(st.sampled_from(STORED))
    half = storage != "fp32"
    aware = half and draw(st.booleans())
    moments = [f"/{stage}=bf16" for stage in ("exp_avg", "exp_avg_sq") if aware and draw(st.booleans())]
    dtype = storage + ("/reduce=fp32" if half and draw(st.booleans()) else "") + ("/master=fp32" if half else "")
    optimizer = draw(optimizers(aware=aware, fp16="fp16" in storage))
    axes = {
        "system": "megatron-core",
        "model": draw(st.sampled_from([name for name, spec in ZOO.items() if not spec.has_later])),
        "dtype": dtype + "".join(moments),
        "mesh": draw(st.sampled_from(MESHES)),
        "load": draw(st.sampled_from(("same", "same", "grow", "shrink", "indivisible"))),
        "sharding": "zero1" if aware else draw(st.sampled_from(("zero1", "zero1", "replicate"))),
        "offload": draw(st.sampled_from(("none", "none", "cpu", "cpu=0.5"))),
        "options": "precision_aware" if aware else draw(st.sampled_from(("", "torch_offload", "one_bucket"))),
        "optimizer": optimizer,
        "microbatches": draw(st.sampled_from("123")),
        "checkpoint": draw(st.sampled_from(("sharded", "gathered", "model_space"))),
        "program": draw(st.sampled_from(MEGATRONS)),
        "seed": str(draw(st.integers(0, 9))),
    }
    mesh = Scenario().with_axes({"mesh": axes["mesh"]}).mesh
    if axes["model"] == "moe" and axes["load"] == "same" and mesh.tp == 1:
        axes["expert_parallel"] = str(draw(st.sampled_from([n for n in (1, 2, 4) if mesh.dp % n == 0])))
    scenario = Scenario().with_axes(axes)
    assume(load_mesh(scenario) is not None)
    shapes = [p.spec for p in ZOO[scenario.model].params if p.spec.tp_dim is not None]
    assume(not any(spec.shape[spec.tp_dim or 0] % mesh.tp for spec in shapes))
    assume("overflow" not in operations(scenario.program) or scenario.optimizer.loss_scale)
    return scenario


def observed(inputs: Inputs, placement: Placement) -> Logical:
    logical, problems = assemble(r for r in reference.run(inputs, placement) if r.where == LIVE)
    assert problems == []
    short, _ = reference.look(inputs, placement)
    assert short == logical, "as whole values and by way of the records"
    return logical


@settings(max_examples=examples(80), deadline=None)
@given(scenarios())
def test_twin_and_reference_agree_under_megatrons_contract(scenario: Scenario) -> None:
    assume(impossible(scenario) is None)
    inputs, placement = contract_of(scenario).resolve(scenario)
    logical = observed(inputs, placement)
    norms = {key.op: float(as_numbers(value)[0]) for key, value in logical.items() if key.role == "norm"}
    expected = known_to_both(twin.run(inputs, Reported(tuple(norms.items()))), scenario.model)
    logical = known_to_both(logical, scenario.model)
    assert [d for d in diff(expected, logical, (), (LAZY_STATE,)) if d.fails] == []
    assert {key.role for key in expected} == {key.role for key in logical}
    params = np.concatenate([as_numbers(v).astype(np.float64).ravel() for k, v in logical.items() if k.role == "param"])
    assert scenario.model == "rare" or not np.isnan(params).any()  # which has an infinity: a decay of 0 makes it NaN
    assert ZOO[scenario.model].has_rare or np.isfinite(params).all()  # an initial value of `rare` is infinite for good
