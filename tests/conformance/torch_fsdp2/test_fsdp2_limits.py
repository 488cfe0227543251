"""What FSDP2 refuses, as the parent decides it: no torch is imported here."""

from __future__ import annotations

import subprocess
import sys

import pytest
from shardproof.errors import UsageError
from shardproof.mechanisms.fsdp2.formats import FORMATS, CheckpointPlan, checkpoint_plan
from shardproof.scenario import Mesh, Scenario
from shardproof.systems.torch_fsdp2 import SYSTEM
from shardproof.systems.torch_fsdp2.accepts import ACCEPTS, strided_unevenly

BASE = Scenario(system="torch-fsdp2")

OUTSIDE = {
    "dtype-master": {"dtype": "bf16/master=fp32"},
    "dtype-grad": {"dtype": "bf16/grad=fp32"},
    "dtype-exp_avg": {"dtype": "bf16/exp_avg=fp32"},
    "dtype-exp_avg_sq": {"dtype": "bf16/exp_avg_sq=fp32"},
    "expert_parallel": {"expert_parallel": "2", "mesh": "1x2x1"},
    "sharding": {"sharding": "zero1"},
    "offload-fraction": {"offload": "cpu=0.5"},
    "optimizer-impl": {"optimizer": "adamw/impl=multi_tensor"},
    "checkpoint": {"checkpoint": "bucket"},
    "options": {"options": "precision_aware"},
    "faults": {"faults": "swapped-states"},
}
"""Axis, or part of one → a scenario whose value of it the allow-list lacks."""

REFUSED = [
    ("mixed-storage-group", {"model": "mixed_unit", "dtype": "mixed"}),
    ("scalar-parameter", {"model": "scalars"}),
    ("reshard-divisor", {"mesh": "1x4x1", "reshard_after_forward": "3"}),
    ("reshard-divisor-tp", {"mesh": "1x4x2", "reshard_after_forward": "2"}),
    ("fused-sgd", {"optimizer": "sgd/impl=fused"}),
    ("scaler-fp16-gradients", {"dtype": "fp16", "optimizer": "adamw/loss_scale=1024.0"}),
    (
        "scaler-bf16-gradients-cuda",
        {"device": "cuda", "dtype": "bf16", "optimizer": "adamw/loss_scale=1024.0"},
    ),
    ("fp16-range", {"dtype": "fp32/param=fp16", "optimizer": "adamw/loss_scale=65536.0"}),
    ("strict-more-broadcast", {"load_model": "dense+one", "checkpoint": "full+broadcast_from_rank0"}),
    ("strict-more", {"load_model": "dense+one", "checkpoint": "full"}),
    ("strict-fewer", {"model": "dense+one", "load_model": "dense", "checkpoint": "full+combined"}),
    ("strict-frozen", {"model": "frozen_tower", "checkpoint": "dcp+ignore_frozen"}),
    (
        "left-out-thawed",
        {
            "model": "later",
            "checkpoint": "dcp+no_strict+ignore_frozen",
            "program": "build save unfreeze step load",
        },
    ),
    ("as-returned-live", {"options": "as_returned", "checkpoint": "dcp", "program": "recall", "mesh": "1x2x1"}),
    ("as-returned-keeps", {"options": "as_returned", "checkpoint": "full", "mesh": "1x2x1"}),
    ("tied-safetensors", {"model": "tied", "checkpoint": "dcp-hf"}),
    ("ignored-none", {"options": "ignored", "model": "many", "optimizer": "adamw/impl=forloop"}),
    ("ignored-policy", {"options": "ignored", "offload": "cpu", "optimizer": "adamw/impl=forloop"}),
    (
        "ignored-sync",
        {"options": "ignored", "grad_sync": "every", "microbatches": "2", "optimizer": "adamw/impl=forloop"},
    ),
    ("ignored-kernels", {"options": "ignored", "optimizer": "adamw/impl=fused", "mesh": "1x2x1"}),
    ("ignored-scaler", {"options": "ignored", "optimizer": "adamw/impl=forloop/loss_scale=1024.0", "mesh": "1x2x1"}),
    ("ignored-clip", {"options": "ignored", "optimizer": "adamw/impl=forloop/clip=1.0", "mesh": "1x2x1"}),
]


@pytest.mark.parametrize(
    ("limit", "axes"), [*OUTSIDE.items(), *REFUSED], ids=[*OUTSIDE, *(name for name, _ in REFUSED)]
)
def test_each_limit_refuses_its_scenario_with_its_reason(limit: str, axes: dict[str, str]) -> None:
    (entry,) = (entry for entry in ACCEPTS.limits if entry.id == limit)
    assert entry.refuses(BASE.with_axes(axes))
    assert SYSTEM.refusal(BASE.with_axes(axes)) == entry.reason


def test_every_limit_within_the_allow_list_is_covered_here() -> None:
    assert [limit for limit, _ in REFUSED] == [entry.id for entry in ACCEPTS.own_limits]


@pytest.mark.parametrize(
    ("axes", "because"),
    [
        ({"sharding": "zero1"}, "FSDP2 shards per parameter"),
        ({"dtype": "bf16/master=fp32"}, "FSDP2 keeps no separate masters: the storage dtype is the master"),
        ({"offload": "cpu=0.5"}, "CPUOffloadPolicy offloads everything or nothing"),
        ({"optimizer": "adamw/impl=multi_tensor"}, "the optimizer is torch.optim's"),
        ({"checkpoint": "bucket"}, "full[+cpu_offload][+no_strict][+flatten][+broadcast_from_rank0]"),
        ({"faults": "swapped-states"}, "logical faults mutate the reference, and this system runs unmodified"),
    ],
    ids=str,
)
def test_what_the_allow_list_lacks_is_refused_with_what_it_has_and_why(axes: dict[str, str], because: str) -> None:
    assert because in str(SYSTEM.refusal(BASE.with_axes(axes)))


@pytest.mark.parametrize(
    "axes",
    [
        {},
        {"model": "twins", "dtype": "mixed"},
        {"model": "mixed_unit", "dtype": "bf16"},
        {"model": "mixed_unit", "dtype": "mixed", "program": "build save reshard build load"},
        {"mesh": "1x4x1", "reshard_after_forward": "2"},
        {"dtype": "fp32/param=fp16", "optimizer": "adamw/loss_scale=2048.0"},
        {"dtype": "fp32/param=bf16", "optimizer": "adamw/loss_scale=65536.0"},
        {"offload": "cpu", "checkpoint": "full+cpu_offload+broadcast_from_rank0"},
    ],
    ids=str,
)
def test_neighbours_of_the_limits_are_supported(axes: dict[str, str]) -> None:
    assert SYSTEM.refusal(BASE.with_axes(axes)) is None


def test_the_mesh_after_a_reshard_counts_for_the_divisor() -> None:
    shrinking = {"mesh": "1x4x1", "load": "shrink", "reshard_after_forward": "4"}
    assert SYSTEM.refusal(BASE.with_axes(shrinking)) is not None
    assert SYSTEM.refusal(BASE.with_axes({**shrinking, "program": "train"})) is None


def test_checkpoint_texts() -> None:
    assert checkpoint_plan("full+no_strict+cpu_offload") == CheckpointPlan("full", cpu_offload=True, strict=False)
    for text in ("dcp+broadcast_from_rank0", "full+", "full+flatten+flatten", "Full", ""):
        assert ACCEPTS.refusal(BASE.with_axes({"checkpoint": text})), text
    for text in ("dcp+broadcast_from_rank0", "full+", "Full"):
        with pytest.raises(UsageError, match="checkpoint: given"):
            checkpoint_plan(text)
    for form, options in FORMATS.items():
        assert checkpoint_plan("+".join([form, *options])).form == form


def test_an_error_of_the_library_has_a_source() -> None:
    for entry in ACCEPTS.own_limits:
        assert (entry.error is None) == (entry.source == ""), entry.id


def test_what_the_parent_asks_of_the_system_imports_no_torch() -> None:
    code = (
        "import sys; from shardproof.systems.torch_fsdp2 import SYSTEM as s; s.accepts, s.contract, s.stored;"
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert SYSTEM.world == "fork"


@pytest.mark.parametrize(
    ("model", "mesh", "load", "uneven"),
    [
        ("dense", Mesh(1, 2, 2), "same", False),  # 16 and 12 rows over 2 x 2
        ("frozen_tower", Mesh(1, 3, 2), "same", True),  # 7 rows: 4 and 3, over 3 ranks
        ("frozen_tower", Mesh(1, 3, 1), "same", False),  # no tensor parallelism
        ("frozen_tower", Mesh(1, 3, 1), "1x3x2", True),  # but after the reshard
        ("experts", Mesh(1, 3, 2), "same", False),  # cut along another dim than the rows
    ],
)
def test_where_a_strided_shard_is_uneven(model: str, mesh: Mesh, load: str, uneven: bool) -> None:
    program = "build step save reshard build load" if load != "same" else "build step"
    scenario = Scenario("torch-fsdp2", model=model, mesh=mesh, load=load, program=program)
    assert strided_unevenly(scenario) is uneven
