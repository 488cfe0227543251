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
import numpy.typing as npt
import pytest
from shardproof.faults.logical import demote
from shardproof.laboratory import judge as court
from shardproof.laboratory.judge import ResolvedScenario
from shardproof.mechanisms.megatron.contract import MegatronContract
from shardproof.mechanisms.megatron.partition import BUCKET_ELEMENTS
from shardproof.mechanisms.megatron.switches import BUCKET_SIZE
from shardproof.models import ModuleSpec, ParamSpec, model_spec
from shardproof.observe.assemble import assemble
from shardproof.observe.logical import Key
from shardproof.observe.record import LIVE, Record, pack, whole
from shardproof.oracle import twin
from shardproof.oracle.contract import Contract
from shardproof.oracle.inputs import LossScale, Stages
from shardproof.oracle.scaler import CountedScaler
from shardproof.program import expand
from shardproof.protocol.registry import contract_of
from shardproof.reference.placement import Catalogue
from shardproof.reference.system import Ranks as ReferenceRanks
from shardproof.reference.trainer import STAGES
from shardproof.scenario import Mesh, Scenario
from shardproof.systems import megatron_bridge, reference, torch_fsdp2
from shardproof.systems.megatron_core import SYSTEM
from shardproof.world.rank import LENGTH

from tests.oracles import by_reference, by_twin, inputs_of, records_of

CONTRACT = SYSTEM.contract
BULK, ISLAND = ParamSpec("w", (4,)), ParamSpec("w", (4,), island=True)
ZERO1 = Scenario(system="megatron-core", sharding="zero1", checkpoint="sharded", mesh=Mesh(1, 2, 1))
FUSED = ZERO1.with_axes({"optimizer": "adamw/impl=multi_tensor", "dtype": "bf16/reduce=fp32/master=fp32"})
HYPERPARAMETERS = ("lr", "weight_decay", "beta1", "beta2", "eps")
AWARE = FUSED.with_axes({"options": "precision_aware"})


def scenario(base: Scenario = ZERO1, **axes: str) -> Scenario:
    return base.with_axes(axes)


def on_host(asked: Scenario, mesh: Mesh) -> dict[str, npt.NDArray[np.bool_]]:
    """Name → which elements are stepped on the host, in the parameter's shape."""
    shapes = {p.fqn: p.spec.shape for p in model_spec(asked.model).unique_params}
    found = contract_of(asked).host_elements(asked, mesh)
    return {fqn: np.frombuffer(mask, np.bool_).reshape(shapes[fqn]) for fqn, mask in found.items()}


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
    asked = scenario(ZERO1, **axes)
    assert CONTRACT.stages(asked, spec, asked.mesh) == expected


RULES = ("zero_gradients", "trainable_only", "owner_groups", "load_refreshes", "sharded_masters")


def test_rules_of_torch_are_everybody_elses() -> None:
    for system in (reference.SYSTEM, torch_fsdp2.SYSTEM):
        assert [getattr(system.contract, rule) for rule in RULES] == [getattr(Contract(), rule) for rule in RULES]
    plain = Scenario(mesh=Mesh(1, 2, 1), optimizer=ZERO1.optimizer).with_axes({"optimizer": "adamw/clip=0.5"})
    of_plugin, _ = Contract().resolve(replace(plain, system="a-plugin's"))
    assert of_plugin == inputs_of(plain) == inputs_of(replace(plain, system="torch-fsdp2"))
    assert inputs_of(replace(plain, system="megatron-core")) != of_plugin


def test_rules_of_megatron_are_those_of_every_system_over_it() -> None:
    own = {"zero_gradients": True, "trainable_only": True, "owner_groups": True}
    for system, refreshes in ((SYSTEM, False), (megatron_bridge.SYSTEM, True)):
        assert isinstance(system.contract, MegatronContract)
        assert {rule: getattr(system.contract, rule) for rule in own} == own
        assert system.contract.load_refreshes is refreshes


def test_the_loss_scale_is_dynamic_in_fp16_only() -> None:
    scaled = scenario(optimizer="adamw/loss_scale=8.0")
    assert CONTRACT.loss_scale(scaled) is None
    assert CONTRACT.loss_scale(scenario(scaled, dtype="mixed/master=fp32")) is None
    own = CONTRACT.loss_scale(scenario(scaled, dtype="mixed_fp16/master=fp32"))
    assert own == LossScale(torch=False, window=2, hysteresis=2, minimum=1.0)
    assert contract_of(replace(scaled, system="reference")).loss_scale(scaled) == LossScale(torch=True)
    assert CONTRACT.loss_scale(scenario(dtype="fp16/master=fp32")) is None


def test_floating_buffers_are_cast_with_the_model() -> None:
    half, module = scenario(dtype="mixed/master=fp32", model="frozen_tower"), ModuleSpec("tower")
    cast = [CONTRACT.buffer_dtype(half, dtype, module, half.mesh) for dtype in ("fp32", "int64", "bool")]
    assert cast == ["bf16", "int64", "bool"]
    assert reference.SYSTEM.contract.buffer_dtype(half, "fp32", module, half.mesh) == "fp32"
    assert CONTRACT.buffer_dtype(scenario(dtype="fp32"), "fp32", module, half.mesh) == "fp32"


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
    assert CONTRACT.kernels(scenario(ZERO1, **axes)) == expected
    own = axes["optimizer"].partition("impl=")[2]
    assert reference.SYSTEM.contract.kernels(scenario(ZERO1, **axes)) == (own, own)


def test_experts_that_are_shared_out_draw_from_the_grid_of_fewer_ranks() -> None:
    shared = scenario(FUSED, model="moe", expert_parallel="2")
    params = {p.fqn: p.spec for p in model_spec("moe").params}
    two, four = Mesh(1, 2, 1), Mesh(1, 4, 1)
    assert CONTRACT.gradient_grid(shared, params["dense.weight"], two).kind == "wide"
    assert CONTRACT.gradient_grid(shared, params["experts.fc1"], two).kind == "narrow"
    assert CONTRACT.gradient_grid(shared, params["experts.fc1"], four).kind == "wide"


def test_remainders_round_half_away_from_zero() -> None:
    stage = CONTRACT.stages(AWARE, BULK, AWARE.mesh)
    assert CONTRACT.rounds_half_away(AWARE, stage)
    assert not CONTRACT.rounds_half_away(scenario(AWARE, offload="cpu"), stage)
    assert not CONTRACT.rounds_half_away(FUSED, stage)
    half = scenario(AWARE, dtype="fp16")
    assert not CONTRACT.rounds_half_away(
        scenario(half, dtype="fp16/master=fp32"), CONTRACT.stages(half, BULK, half.mesh)
    )


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_tie_is_rounded_away_from_zero_by_both_oracles(sign: float) -> None:
    """1 + 2^-8 lies between two bf16 values; the nearest even one is 1."""
    asked = scenario(AWARE, model="short")
    inputs, placement = CONTRACT.resolve(asked)
    tie, away = sign * (1 + 2.0**-8), sign * (1 + 2.0**-7)
    model = twin._Model(inputs, inputs.builds[0])
    for value in model.stepped.values():
        value.fill_(tie)
    model.publish()
    assert {p.item() for param in model.params.values() for p in param.reshape(-1)} == {away}
    build = inputs.operations[0]
    ranks = ReferenceRanks(inputs, placement, Catalogue(model_spec("short"), inputs.seed), build)
    ranks.perform(build, {})
    for shards in ranks.session.shards:
        shards.stepped[...] = tie
        assert set(ranks.trainer.rounded_to_storage(shards).astype(np.float32).ravel().tolist()) == {away}


# --- the loss scale ------------------------------------------------------------------------------------------


RULE = LossScale(torch=False, window=2, hysteresis=2, minimum=1.0)


def test_the_loss_scale_bears_one_overflow() -> None:
    scaler = CountedScaler(RULE, 8.0)
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
    scaler = CountedScaler(RULE, 1.0)
    for _ in range(5):
        scaler.update(overflow=True)
    assert scaler.scale == 1.0


@pytest.mark.parametrize("program", ["overflow", "build overflow overflow step step step", "build step step step step"])
def test_the_oracles_count_the_loss_scale_alike(program: str) -> None:
    asked = scenario(FUSED, dtype="fp16/master=fp32", optimizer="adamw/impl=multi_tensor/loss_scale=1024.0")
    asked = scenario(asked, program=program)
    logical, expected = by_reference(asked), by_twin(asked)
    keys = [key for key in expected if key.role == "scaler"]
    assert {key.fqn for key in keys} == {"scale", "growth_tracker", "hysteresis_tracker"}
    assert all(logical[key] == expected[key] for key in keys)


# --- what is stepped on the host -----------------------------------------------------------------------------


def test_our_bucket_size_is_the_systems() -> None:
    assert BUCKET_ELEMENTS == BUCKET_SIZE


def test_what_is_on_the_host_is_told_whether_or_not_it_has_a_kernel_of_its_own() -> None:
    everything = on_host(scenario(FUSED, offload="cpu"), Mesh(1, 2, 1))
    assert everything
    assert all(mask.all() for mask in everything.values())
    mixed = scenario(FUSED, offload="cpu=0.5")
    same = scenario(mixed, options="torch_offload")
    assert {k: m.tolist() for k, m in on_host(mixed, mixed.mesh).items()} == {
        k: m.tolist() for k, m in on_host(same, same.mesh).items()
    }
    assert on_host(FUSED, Mesh(1, 2, 1)) == {}


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
    assert contract_of(asked).knows_host(asked) is known
    assert inputs_of(asked).records_host is known
    recorded = {key.role for key in by_twin(asked)}
    assert ("host" in recorded) is known


def test_fp32_parameters_go_first_and_the_last_parameter_before_the_first() -> None:
    """One rank, 64 elements: half of them, from the end of the fp32 buffer on."""
    masks = on_host(scenario(FUSED, model="twins", dtype="mixed/master=fp32", offload="cpu=0.5"), Mesh(1, 1, 1))
    assert {name for name, mask in masks.items() if mask.all()} == {"scale.weight", "router.weight"}
    assert not masks["a.weight"].any()
    assert not masks["b.weight"].any()


def test_whole_shards_are_taken_until_the_threshold_is_reached() -> None:
    """sandwich, one buffer: c (14) from 0, b (10) from 64, a (12) from 128, padded to 256: rank 0 owns c and b, rank 1
    owns a. Of rank 0's 24 elements 12 are asked for: c alone exceeds that. Of rank 1's 12, a is taken whole."""
    masks = on_host(scenario(FUSED, model="sandwich", offload="cpu=0.5"), Mesh(1, 2, 1))
    assert {name: bool(mask.all()) for name, mask in masks.items()} == {
        "a.weight": True,
        "b.weight": False,
        "c.weight": True,
    }


def test_a_shard_is_a_part_of_a_parameter_where_a_rank_boundary_cuts_it() -> None:
    """dense, last to first: norm 13 at 0, down.bias 7 at 64, down.weight 112 at 128, up.bias 16 at 256, up.weight 112
    at 320, embed.bias 12 at 448, embed.weight 60 at 512, to 640: ranks of 160 cut down.weight after 32."""
    asked = scenario(FUSED, offload="cpu=0.3")
    masks = on_host(asked, Mesh(1, 4, 1))
    assert masks["norm.weight"].all()  # rank 0 holds 13 + 7 + 32 elements and offloads 15.6 or more
    assert masks["down.bias"].all()
    assert [int(mask) for mask in masks["down.weight"].reshape(-1)] == [0] * 32 + [1] * 80
    assert masks["up.weight"].reshape(-1).sum() == 112


def test_buckets_are_closed_only_where_reduction_overlaps() -> None:
    plain = scenario(FUSED, offload="cpu=0.3", model="many")
    split = scenario(plain, options="overlap_grad_reduce")
    whole_buffer = scenario(plain, options="one_bucket+overlap_grad_reduce")
    mesh = Mesh(1, 2, 1)
    as_list = [{k: m.tolist() for k, m in on_host(s, mesh).items()} for s in (plain, split, whole_buffer)]
    assert as_list[0] == as_list[2] != as_list[1]


def test_tensor_parallel_shards_are_cut_alike() -> None:
    masks = on_host(scenario(FUSED, offload="cpu=0.5", model="swiglu"), Mesh(1, 2, 2))
    halves = np.split(masks["fc1.weight"], 2, axis=0)
    assert (halves[0] == halves[1]).all()
    with pytest.raises(ValueError, match="ranks do not divide dim 0 of embed"):
        on_host(scenario(FUSED, offload="cpu=0.5"), Mesh(1, 1, 5))


def test_both_kernels_show_in_the_values() -> None:
    mixed = scenario(FUSED, offload="cpu=0.5", program="train")
    logical = {fraction: by_reference(scenario(mixed, offload=fraction)) for fraction in ("none", "cpu=0.5", "cpu")}
    last = len(expand(mixed)) - 1
    for name, mask in on_host(mixed, mixed.mesh).items():
        device, both, host = (
            np.frombuffer(logical[f][Key(last, LIVE, "exp_avg", name)].data, np.uint32)
            for f in ("none", "cpu=0.5", "cpu")
        )
        assert (both == np.where(mask.reshape(-1), host, device)).all()
    assert logical["none"] != logical["cpu"]


# --- demotions -----------------------------------------------------------------------------------------------


WITH_FP32_STAGES = {
    "replicate": {"sharding": "replicate", "dtype": "fp32", "options": ""},
    "zero1": {"sharding": "zero1", "dtype": "fp32", "options": ""},
    "mixed": {
        "dtype": "mixed/reduce=fp32/master=fp32", "model": "mixed_unit", "optimizer": "adamw/impl=forloop",
        "options": "",
    },
    "exp_avg": {"dtype": "bf16/reduce=fp32/master=fp32/exp_avg=bf16", "options": "precision_aware"},
    "exp_avg_sq": {"dtype": "bf16/reduce=fp32/master=fp32/exp_avg_sq=bf16", "options": "precision_aware"},
}  # fmt: skip
DEMOTIONS = [
    pytest.param(axes, stage, id=f"{name}-{stage}")
    for name, axes in WITH_FP32_STAGES.items()
    for stage in STAGES
    if stage != "tp" and (stage != "compute" or not axes["dtype"].startswith("bf16"))  # which computes in bf16 anyway
]
DEMOTIONS.append(
    pytest.param({**WITH_FP32_STAGES["zero1"], "model": "norms", "mesh": "1x2x2"}, "tp", id="sequence-parallel-tp")
)


@pytest.mark.parametrize(("axes", "stage"), DEMOTIONS)
def test_a_demotion_of_any_fp32_stage_is_noticed(axes: dict[str, str], stage: str) -> None:
    asked = scenario(FUSED, microbatches="2", program="train", **axes)
    records = records_of(asked, install=demote(stage))
    logical, _ = assemble(r for r in records if r.where == LIVE)
    assert logical != by_twin(asked)


@pytest.mark.parametrize("stage", ["exp_avg", "exp_avg_sq"])
def test_a_moment_in_bf16_changes_later_updates(stage: str) -> None:
    """A system that stores a moment in another dtype than it says, and widens it for us to see, is noticed."""
    narrow = scenario(AWARE, dtype=f"bf16/reduce=fp32/master=fp32/{stage}=bf16", program="train")
    masters = [
        {key: value for key, value in by_twin(s).items() if key.role == "master" and key.op == 3}
        for s in (narrow, scenario(AWARE, program="train"))
    ]
    assert masters[0] != masters[1]


# --- the judge -----------------------------------------------------------------------------------------------


def test_twins_are_shared_as_far_as_the_rules_allow() -> None:
    own = inputs_of(FUSED)
    assert inputs_of(scenario(FUSED, sharding="replicate")) == own
    assert inputs_of(scenario(FUSED, options="overlap_grad_reduce")) == own
    assert inputs_of(scenario(FUSED, version="0.16.1")) == own
    assert inputs_of(scenario(FUSED, offload="cpu", options="overlap_offload")) == inputs_of(
        scenario(FUSED, offload="cpu", mesh="2x2x1")
    )
    assert inputs_of(scenario(FUSED, expert_parallel="2")) == own
    assert inputs_of(replace(FUSED, system="torch-fsdp2")) == inputs_of(replace(FUSED, system="reference")) != own


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
    with_model = scenario(FUSED, model=axes.get("model", FUSED.model))
    assert inputs_of(scenario(FUSED, **axes)) != inputs_of(with_model)


def test_the_twin_of_mixed_kernels_keeps_its_mesh() -> None:
    asked = scenario(FUSED, offload="cpu=0.5", mesh="1x4x1")
    assert inputs_of(asked) != inputs_of(scenario(asked, mesh="1x2x1"))


class Ranks:
    """Observation files as ranks of a system with owner groups write them, made of the reference's records."""

    def __init__(self, folder: Path, spoil: str = "", lost: Collection[tuple[int, str, str]] = (), **axes: str) -> None:
        self.asked = scenario(FUSED, program="train", model="many", **axes)
        self.paths = [folder / f"rank{rank}.obs" for rank in range(2)]
        records = [r for r in records_of(self.asked) if r.where == LIVE]
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
    assert any(limit.id == "checkpoint-tp-legacy" for limit in SYSTEM.accepts.limits if limit.refuses(asked)) is refused


def test_the_emulated_symbols_of_all_ranks_are_handed_on(tmp_path: Path) -> None:
    assert Ranks(tmp_path).judged()["emulated"] == ["Tensor.is_cuda", "rank0", "rank1"]


def test_a_norm_in_double_precision_is_compared_and_taken_over() -> None:
    asked = scenario(FUSED, optimizer="adamw/impl=multi_tensor/clip=0.5", program="build step")
    records = records_of(asked)
    norm = next(r for r in records if r.role == "norm")
    assert norm.dtype == "fp64"
    value = np.frombuffer(norm.data, np.float64)
    for factor, fails in ((1 + 2.0**-22, False), (1 + 2.0**-12, True)):
        spoilt = [r._replace(data=(value * factor).tobytes()) if r.role == "norm" else r for r in records]
        found = court.judge(ResolvedScenario.from_scenario(asked), spoilt).differences
        assert any(d.kind == "norm" for d in found) is fails
