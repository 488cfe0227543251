"""The rules of Megatron-Core: contracts, which elements are stepped where, the loss scale, and what the judge makes of
records that only owners write."""

from __future__ import annotations

import os

os.environ["ATEN_CPU_CAPABILITY"] = "default"  # read by torch when its first kernel runs

import json
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from harness import judge as court
from harness.faults.logical import demote
from harness.judge import judge, twin_axes
from harness.models import ZOO, ParamSpec
from harness.observe.assemble import assemble
from harness.observe.logical import Key, Logical
from harness.observe.record import LIVE, Record, pack, whole
from harness.oracle import twin
from harness.oracle.contracts import (
    Stages,
    buffer_dtype,
    gradient_grid,
    has_scaler,
    kernels,
    rounds_half_away,
    rules,
    stages,
)
from harness.oracle.host_elements import host_elements, knows_host
from harness.oracle.partition import BUCKET_ELEMENTS
from harness.oracle.scaler import MegatronScaler
from harness.program import expand
from harness.reference import info
from harness.reference import system as reference
from harness.reference.trainer import STAGES
from harness.scenario import Mesh, Scenario
from harness.systems import megatron_core
from harness.systems.megatron_core_formats import LIMITS
from harness.world.rank import LENGTH

BULK, ISLAND = ParamSpec("w", (4,)), ParamSpec("w", (4,), island=True)
ZERO1 = Scenario(system="megatron-core", sharding="zero1", checkpoint="sharded", mesh=Mesh(1, 2, 1))
FUSED = ZERO1.with_axes({"optimizer": "adamw/impl=multi_tensor", "dtype": "bf16/reduce=fp32/master=fp32"})
HYPERPARAMETERS = ("lr", "weight_decay", "beta1", "beta2", "eps")
AWARE = FUSED.with_axes({"options": "precision_aware"})


def scenario(base: Scenario = ZERO1, **axes: str) -> Scenario:
    return base.with_axes(axes)


def observed(asked: Scenario) -> Logical:
    logical, problems = assemble(r for r in reference.run(asked) if r.where == LIVE)
    assert problems == []
    return logical


# --- contracts -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("axes", "spec", "expected"),
    [
        ({"dtype": "fp32"}, BULK, Stages("fp32", "fp32", "fp32", "fp32", "fp32", None, "fp32", "fp32")),
        ({"dtype": "bf16/master=fp32"}, BULK, Stages("bf16", "bf16", "bf16", "bf16", "fp32", "fp32", "fp32", "fp32")),
        (
            {"dtype": "mixed_fp16/master=fp32"},
            BULK,
            Stages("fp16", "fp16", "fp16", "fp16", "fp32", "fp32", "fp32", "fp32"),
        ),
        (
            {"dtype": "mixed_fp16/master=fp32"},
            ISLAND,
            Stages("fp32", "fp32", "fp32", "fp32", "fp32", None, "fp32", "fp32"),
        ),
        (
            {"dtype": "bf16/master=fp32/exp_avg=bf16", "options": "precision_aware"},
            BULK,
            Stages("bf16", "bf16", "bf16", "bf16", "bf16", "fp32", "bf16", "fp32"),
        ),
        (
            {"dtype": "mixed/reduce=fp32/master=fp32/exp_avg_sq=bf16", "options": "precision_aware"},
            ISLAND,
            Stages("fp32", "fp32", "fp32", "fp32", "fp32", None, "fp32", "bf16"),
        ),
        (
            {"dtype": "bf16/reduce=fp32/master=fp32", "sharding": "replicate"},
            BULK,
            Stages("bf16", "bf16", "fp32", "fp32", "fp32", "fp32", "fp32", "fp32"),
        ),
    ],
)
def test_stages(axes: dict[str, str], spec: ParamSpec, expected: Stages) -> None:
    assert stages(scenario(ZERO1, **axes), spec) == expected


def test_rules_of_torch_are_everybody_elses() -> None:
    assert rules("reference") == rules("torch-fsdp2") == rules("a-plugin's")
    assert rules("megatron-core") != rules("reference")
    assert rules("megatron-core").owner_groups == megatron_core.INFO.owner_groups


def test_the_loss_scale_is_dynamic_in_fp16_only() -> None:
    scaled = scenario(optimizer="adamw/loss_scale=8.0")
    assert not has_scaler(scaled)
    assert not has_scaler(scenario(scaled, dtype="mixed/master=fp32"))
    assert has_scaler(scenario(scaled, dtype="mixed_fp16/master=fp32"))
    assert has_scaler(replace(scaled, system="reference"))
    assert not has_scaler(scenario(dtype="fp16/master=fp32"))


def test_floating_buffers_are_cast_with_the_model() -> None:
    half = scenario(dtype="mixed/master=fp32", model="frozen_tower")
    assert [buffer_dtype(half, dtype) for dtype in ("fp32", "int64", "bool")] == ["bf16", "int64", "bool"]
    assert buffer_dtype(replace(half, system="reference"), "fp32") == "fp32"
    assert buffer_dtype(scenario(dtype="fp32"), "fp32") == "fp32"


@pytest.mark.parametrize(
    ("axes", "expected"),
    [
        ({"optimizer": "adamw/impl=multi_tensor"}, ("multi_tensor", "multi_tensor")),
        ({"optimizer": "adamw/impl=multi_tensor", "offload": "cpu=0.5"}, ("multi_tensor", "fused")),
        ({"optimizer": "adamw/impl=multi_tensor", "offload": "cpu"}, ("fused", "fused")),
        (
            {"optimizer": "adamw/impl=multi_tensor", "offload": "cpu=0.5", "options": "torch_offload"},
            ("fused", "fused"),
        ),
        ({"optimizer": "adamw/impl=forloop", "offload": "cpu=0.5"}, ("fused", "fused")),
        ({"optimizer": "adamw/impl=forloop"}, ("forloop", "forloop")),
    ],
)
def test_which_kernel_steps_what(axes: dict[str, str], expected: tuple[str, str]) -> None:
    assert kernels(scenario(ZERO1, **axes)) == expected
    own = axes["optimizer"].partition("impl=")[2]
    assert kernels(scenario(replace(ZERO1, system="reference"), **axes)) == (own, own)


def test_experts_that_are_shared_out_draw_from_the_grid_of_fewer_ranks() -> None:
    shared = scenario(FUSED, model="moe", expert_parallel="2")
    params = {p.fqn: p.spec for p in ZOO["moe"].params}
    assert gradient_grid(shared, params["dense.weight"], 2).kind == "wide"
    assert gradient_grid(shared, params["experts.fc1"], 2).kind == "narrow"
    assert gradient_grid(shared, params["experts.fc1"], 4).kind == "wide"


def test_remainders_round_half_away_from_zero() -> None:
    stage = stages(AWARE, BULK)
    assert rounds_half_away(AWARE, stage)
    assert not rounds_half_away(scenario(AWARE, offload="cpu"), stage)
    assert not rounds_half_away(FUSED, stage)
    assert not rounds_half_away(scenario(AWARE, dtype="fp16/master=fp32"), stages(scenario(AWARE, dtype="fp16"), BULK))


def test_a_tie_is_rounded_away_from_zero_by_both_oracles(monkeypatch: pytest.MonkeyPatch) -> None:
    """1 + 2^-8 lies between two bf16 values; the nearest even one is 1."""
    import torch

    model = twin._Model(scenario(AWARE, model="short"), ZOO["short"], expand(AWARE)[0])
    for value in model.stepped.values():
        value.fill_(1 + 2.0**-8)
    model.publish()
    assert {p.item() for param in model.params.values() for p in param.reshape(-1)} == {1 + 2.0**-7}
    for value in model.stepped.values():
        value.fill_(-1 - 2.0**-8)
    model.publish()
    assert torch.equal(model.params["three.weight"].float(), torch.full((3,), -1 - 2.0**-7))


# --- the loss scale ------------------------------------------------------------------------------------------


def test_the_loss_scale_bears_one_overflow() -> None:
    scaler = MegatronScaler(8.0)
    history = []
    for overflow in (False, True, True, True, False, False, True, True):
        scaler.update(overflow=overflow)
        history.append((scaler.scale, scaler.growth, scaler.hysteresis))
    assert history == [
        (8.0, 1, 2),
        (8.0, 0, 1),
        (4.0, 0, 0),
        (2.0, 0, -1),
        (2.0, 1, -1),
        (4.0, 0, 2),
        (4.0, 0, 1),
        (2.0, 0, 0),
    ]


def test_the_loss_scale_is_never_below_1() -> None:
    scaler = MegatronScaler(1.0)
    for _ in range(5):
        scaler.update(overflow=True)
    assert scaler.scale == 1.0


@pytest.mark.parametrize("program", ["overflow", "build overflow overflow step step step", "build step step step step"])
def test_the_oracles_count_the_loss_scale_alike(program: str) -> None:
    asked = scenario(FUSED, dtype="fp16/master=fp32", optimizer="adamw/impl=multi_tensor/loss_scale=1024.0")
    asked = scenario(asked, program=program)
    logical, expected = observed(asked), twin.run(asked)
    keys = [key for key in expected if key.role == "scaler"]
    assert {key.fqn for key in keys} == {"scale", "growth_tracker", "hysteresis_tracker"}
    assert all(logical[key] == expected[key] for key in keys)


# --- what is stepped on the host -----------------------------------------------------------------------------


def test_our_bucket_size_is_the_systems() -> None:
    assert BUCKET_ELEMENTS == megatron_core.BUCKET_SIZE


def test_what_is_on_the_host_is_told_whether_or_not_it_has_a_kernel_of_its_own() -> None:
    everything = host_elements(scenario(FUSED, offload="cpu"), Mesh(1, 2, 1))
    assert everything
    assert all(mask.all() for mask in everything.values())
    mixed = scenario(FUSED, offload="cpu=0.5")
    same = scenario(mixed, options="torch_offload")
    assert {k: m.tolist() for k, m in host_elements(mixed, mixed.mesh).items()} == {
        k: m.tolist() for k, m in host_elements(same, same.mesh).items()
    }
    assert host_elements(FUSED, Mesh(1, 2, 1)) == {}


@pytest.mark.parametrize(
    ("axes", "known"),
    [
        ({}, True),
        ({"offload": "cpu"}, True),
        ({"offload": "none"}, False),
        ({"system": "torch-fsdp2"}, False),
        ({"model": "groups", "options": "torch_offload"}, False),
        ({"model": "groups", "offload": "cpu"}, True),
        ({"model": "moe", "expert_parallel": "2", "options": "torch_offload"}, False),
        ({"sharding": "replicate", "dtype": "fp32"}, True),
        ({"sharding": "replicate", "dtype": "bf16/master=fp32"}, False),
    ],
    ids=str,
)
def test_what_is_on_the_host_is_observed_where_it_is_known(axes: dict[str, str], known: bool) -> None:
    asked = scenario(FUSED, offload="cpu=0.5").with_axes({"optimizer": "adamw/impl=multi_tensor", **axes})
    assert knows_host(asked) is known
    assert knows_host(twin_axes(asked)) is known
    recorded = {key.role for key in twin.run(twin_axes(asked))}
    assert ("host" in recorded) is known
    assert twin.run(twin_axes(asked)) == twin.run(asked)


def test_fp32_parameters_go_first_and_the_last_parameter_before_the_first() -> None:
    """One rank, 64 elements: half of them, from the end of the fp32 buffer on."""
    masks = host_elements(scenario(FUSED, model="twins", dtype="mixed/master=fp32", offload="cpu=0.5"), Mesh(1, 1, 1))
    assert {name for name, mask in masks.items() if mask.all()} == {"scale.weight", "router.weight"}
    assert not masks["a.weight"].any()
    assert not masks["b.weight"].any()


def test_whole_shards_are_taken_until_the_threshold_is_reached() -> None:
    """sandwich, one buffer: c (14) from 0, b (10) from 64, a (12) from 128, padded to 256: rank 0 owns c and b, rank 1
    owns a. Of rank 0's 24 elements 12 are asked for: c alone exceeds that. Of rank 1's 12, a is taken whole."""
    masks = host_elements(scenario(FUSED, model="sandwich", offload="cpu=0.5"), Mesh(1, 2, 1))
    assert {name: bool(mask.all()) for name, mask in masks.items()} == {
        "a.weight": True,
        "b.weight": False,
        "c.weight": True,
    }


def test_a_shard_is_a_part_of_a_parameter_where_a_rank_boundary_cuts_it() -> None:
    """dense, last to first: norm 13 at 0, down.bias 7 at 64, down.weight 112 at 128, up.bias 16 at 256, up.weight 112
    at 320, embed.bias 12 at 448, embed.weight 60 at 512, to 640: ranks of 160 cut down.weight after 32."""
    asked = scenario(FUSED, offload="cpu=0.3")
    masks = host_elements(asked, Mesh(1, 4, 1))
    assert masks["norm.weight"].all()  # rank 0 holds 13 + 7 + 32 elements and offloads 15.6 or more
    assert masks["down.bias"].all()
    assert [int(mask) for mask in masks["down.weight"].reshape(-1)] == [0] * 32 + [1] * 80
    assert masks["up.weight"].reshape(-1).sum() == 112


def test_buckets_are_closed_only_where_reduction_overlaps() -> None:
    plain = scenario(FUSED, offload="cpu=0.3", model="many")
    split = scenario(plain, options="overlap_grad_reduce")
    whole_buffer = scenario(plain, options="one_bucket+overlap_grad_reduce")
    mesh = Mesh(1, 2, 1)
    as_list = [{k: m.tolist() for k, m in host_elements(s, mesh).items()} for s in (plain, split, whole_buffer)]
    assert as_list[0] == as_list[2] != as_list[1]


def test_tensor_parallel_shards_are_cut_alike() -> None:
    masks = host_elements(scenario(FUSED, offload="cpu=0.5", model="swiglu"), Mesh(1, 2, 2))
    halves = np.split(masks["fc1.weight"], 2, axis=0)
    assert (halves[0] == halves[1]).all()
    with pytest.raises(ValueError, match="ranks do not divide dim 0 of embed"):
        host_elements(scenario(FUSED, offload="cpu=0.5"), Mesh(1, 1, 5))


def test_both_kernels_show_in_the_values() -> None:
    mixed = scenario(FUSED, offload="cpu=0.5", program="train")
    logical = {fraction: observed(scenario(mixed, offload=fraction)) for fraction in ("none", "cpu=0.5", "cpu")}
    last = len(expand(mixed)) - 1
    for name, mask in host_elements(mixed, mixed.mesh).items():
        device, both, host = (
            np.frombuffer(logical[f][Key(last, LIVE, "exp_avg", name)].data, np.uint32)
            for f in ("none", "cpu=0.5", "cpu")
        )
        assert (both == np.where(mask.reshape(-1), host, device)).all()
    assert logical["none"] != logical["cpu"]


# --- demotions -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    "axes",
    [
        {"sharding": "replicate", "dtype": "fp32", "options": ""},
        {"sharding": "zero1", "dtype": "fp32", "options": ""},
        {
            "dtype": "mixed/reduce=fp32/master=fp32",
            "model": "mixed_unit",
            "optimizer": "adamw/impl=forloop",
            "options": "",
        },
        {"dtype": "bf16/reduce=fp32/master=fp32/exp_avg=bf16", "options": "precision_aware"},
        {"dtype": "bf16/reduce=fp32/master=fp32/exp_avg_sq=bf16", "options": "precision_aware"},
    ],
    ids=["replicate", "zero1", "mixed", "exp_avg", "exp_avg_sq"],
)
def test_a_demotion_of_any_fp32_stage_is_noticed(axes: dict[str, str], stage: str) -> None:
    asked = scenario(FUSED, microbatches="2", program="train", **axes)
    if stage == "compute" and "bf16" in asked.dtype.storage:
        return  # computes in bf16 anyway
    records = reference.run(asked, install=demote(stage))
    logical, _ = assemble(r for r in records if r.where == LIVE)
    assert logical != twin.run(twin_axes(asked))


@pytest.mark.parametrize("stage", ["exp_avg", "exp_avg_sq"])
def test_a_moment_in_bf16_changes_later_updates(stage: str) -> None:
    """A system that stores a moment in another dtype than it says, and widens it for us to see, is noticed."""
    narrow = scenario(AWARE, dtype=f"bf16/reduce=fp32/master=fp32/{stage}=bf16", program="train")
    masters = [
        {key: value for key, value in twin.run(s).items() if key.role == "master" and key.op == 3}
        for s in (narrow, scenario(AWARE, program="train"))
    ]
    assert masters[0] != masters[1]


# --- the judge -----------------------------------------------------------------------------------------------


def test_twins_are_shared_as_far_as_the_rules_allow() -> None:
    assert twin_axes(scenario(FUSED, sharding="replicate")) == twin_axes(FUSED)
    assert twin_axes(scenario(FUSED, options="overlap_grad_reduce")) == twin_axes(FUSED)
    assert twin_axes(scenario(FUSED, version="0.16.1")) == twin_axes(FUSED)
    assert twin_axes(scenario(FUSED, offload="cpu", options="overlap_offload")) == twin_axes(
        scenario(FUSED, offload="cpu", mesh="2x2x1")
    )
    assert twin_axes(scenario(FUSED, expert_parallel="2")) == twin_axes(FUSED)
    assert twin_axes(replace(FUSED, system="torch-fsdp2")) == twin_axes(replace(FUSED, system="reference"))


@pytest.mark.parametrize(
    "axes",
    [
        {"options": "precision_aware"},
        {"offload": "cpu"},
        {"offload": "cpu=0.5"},
        {"model": "moe", "expert_parallel": "2"},
        {"options": "new_decay"},
    ],
    ids=str,
)
def test_twins_differ_where_the_rules_do(axes: dict[str, str]) -> None:
    assert twin_axes(scenario(FUSED, **axes)) != twin_axes(FUSED)
    assert twin.run(twin_axes(scenario(FUSED, **axes))) == twin.run(scenario(FUSED, **axes))


def test_the_twin_of_mixed_kernels_keeps_its_mesh() -> None:
    asked = scenario(FUSED, offload="cpu=0.5", mesh="1x4x1")
    assert twin_axes(asked).mesh == asked.mesh
    assert twin_axes(scenario(asked, mesh="1x2x1")) != twin_axes(asked)


class Ranks:
    """Observation files as ranks of a system with owner groups write them, made of the reference's records."""

    def __init__(self, folder: Path, spoil: str = "", lost: Collection[tuple[int, str, str]] = (), **axes: str) -> None:
        self.asked = scenario(FUSED, program="train", model="many", **axes)
        self.paths = [folder / f"rank{rank}.obs" for rank in range(2)]
        records = [r for r in reference.run(self.asked) if r.where == LIVE]
        if spoil:
            records = [r for r in records if (r.role, r.fqn) != ("hyperparameter", spoil)]
        owned = {(r.rank, r.fqn) for r in records if r.role == "master" and r.data}
        owned |= {(rank, f"{fqn}.{name}") for rank, fqn in owned for name in HYPERPARAMETERS}
        records = [r for r in records if r.role not in ("hyperparameter", "step") or (r.rank, r.fqn) in owned]
        records = [r for r in records if (r.rank, r.role, r.fqn) not in lost]
        for rank, path in enumerate(self.paths):
            blobs = [pack(self._of(records, rank, op.index)) for op in expand(self.asked)]
            path.write_bytes(b"".join(LENGTH.pack(len(blob)) + blob for blob in blobs))

    def _of(self, records: list[Record], rank: int, op: int) -> list[Record]:
        text = f"Tensor.is_cuda\nrank{rank}".encode()
        touched = whole(op, rank, "emulated", "symbols", "utf8", (len(text),), text)
        return [*(r for r in records if (r.op, r.rank) == (op, rank)), touched]

    def judged(self) -> dict[str, object]:
        request = {
            "scenario": self.asked.axis_values(only_changed=True), "observations": [str(p) for p in self.paths],
            "checkpoints": {}, "complete": True,
        }  # fmt: skip
        reply: dict[str, object] = json.loads(court.serve(json.dumps(request).encode()))
        return reply


def test_what_only_owners_record_is_no_gap(tmp_path: Path) -> None:
    reply = Ranks(tmp_path).judged()
    assert (reply["differences"], reply["distrust"]) == ([], "")


@pytest.mark.parametrize(
    ("role", "fqn"),
    [("step", "layers.1.weight"), ("hyperparameter", "layers.1.weight.lr"), ("exp_avg", "layers.1.weight")],
)
def test_what_one_of_several_owners_lost_is_a_gap(tmp_path: Path, role: str, fqn: str) -> None:
    """Also of what the others have all of: every rank is a whole copy here."""
    kept = Ranks(tmp_path, sharding="replicate").judged()
    assert (kept["differences"], kept["distrust"]) == ([], "")
    differences = Ranks(tmp_path, sharding="replicate", lost=((1, role, fqn),)).judged()["differences"]
    assert isinstance(differences, list)
    assert {(d["kind"], d["role"], d["name"], tuple(d["ranks"])) for d in differences} == {("gap", role, fqn, (1,))}


def test_what_nobody_owns_is_missing(tmp_path: Path) -> None:
    differences = Ranks(tmp_path, spoil="layers.2.weight.lr").judged()["differences"]
    assert isinstance(differences, list)
    assert {(d["kind"], d["role"], d["name"]) for d in differences} == {
        ("missing", "hyperparameter", "layers.2.weight.lr")
    }


@pytest.mark.parametrize(
    ("checkpoint", "program", "refused"),
    [
        ("dp_zero", "resume", True),
        ("dp_zero", "model_only", True),
        ("dp_zero_gather_scatter", "resume", True),
        ("dp_zero_gather_scatter", "model_only", False),
        ("dp_reshardable+fully_parallel", "model_only", False),
        ("dp_reshardable", "twice", True),
        ("fully_reshardable", "resume", False),
    ],
)
def test_another_tensor_parallel_size_is_refused_where_the_format_stores_by_rank(
    checkpoint: str, program: str, refused: bool
) -> None:
    asked = scenario(FUSED, mesh="1x2x2", load="1x4x1", checkpoint=checkpoint, program=program)
    assert any(limit.id == "checkpoint-tp-legacy" for limit in LIMITS if limit.refuses(asked)) is refused


def test_the_emulated_symbols_of_all_ranks_are_handed_on(tmp_path: Path) -> None:
    assert Ranks(tmp_path).judged()["emulated"] == ["Tensor.is_cuda", "rank0", "rank1"]


def test_a_norm_in_double_precision_is_compared_and_taken_over() -> None:
    asked = scenario(FUSED, optimizer="adamw/impl=multi_tensor/clip=0.5", program="build step")
    records = reference.run(asked)
    norm = next(r for r in records if r.role == "norm")
    assert norm.dtype == "fp64"
    value = np.frombuffer(norm.data, np.float64)
    for factor, fails in ((1 + 2.0**-22, False), (1 + 2.0**-12, True)):
        spoilt = [r._replace(data=(value * factor).tobytes()) if r.role == "norm" else r for r in records]
        found = judge(asked, spoilt).differences
        assert any(d.kind == "norm" for d in found) is fails


@pytest.mark.parametrize("axes", [{"options": "one_bucket"}, {"optimizer": "adamw/impl=multi_tensor"}])
def test_the_reference_as_a_system_leaves_megatrons_axes_to_it(axes: dict[str, str]) -> None:
    assert info.unsupported(scenario(Scenario(checkpoint="sharded"), **axes))


def test_the_reference_runs_replicated_and_linearly_scheduled_scenarios() -> None:
    asked = Scenario(checkpoint="gathered", sharding="replicate", mesh=Mesh(1, 3, 2)).with_axes(
        {"optimizer": "adamw/schedule=linear", "dtype": "bf16/reduce=fp32/master=fp32"}
    )
    assert info.unsupported(asked) is None
    found = judge(asked, reference.run(asked))
    assert (found.differences, found.distrust) == ((), "")
