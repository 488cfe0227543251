"""Scaled states: over what a scale is taken, that both oracles take it so, and that other ways are noticed."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
from shardproof.models import ParamSpec, model_spec
from shardproof.observe.logical import Key
from shardproof.observe.record import LIVE, WRITTEN
from shardproof.oracle import twin
from shardproof.oracle.inputs import Inputs
from shardproof.program import expand
from shardproof.scenario import Scenario
from shardproof.systems.megatron_core import SYSTEM

from tests.oracles import by_reference, by_twin, inputs_of

CONTRACT = SYSTEM.contract
Domains = npt.NDArray[np.int64]
BULK, ISLAND = ParamSpec("w", (4,)), ParamSpec("w", (4,), island=True)
BASE = Scenario(system="megatron-core").with_axes(
    {"sharding": "zero1", "checkpoint": "sharded", "mesh": "1x2x1", "optimizer": "adamw/impl=multi_tensor",
     "options": "precision_aware", "dtype": "bf16/reduce=fp32/master=fp16/exp_avg=fp16/exp_avg_sq=fp8e4m3"}
)  # fmt: skip


def scenario(**axes: str) -> Scenario:
    return BASE.with_axes(axes)


def domains_of(asked: Scenario) -> dict[str, Domains]:
    """Name → the number of each element's domain, in the parameter's shape."""
    shapes = {p.fqn: p.spec.shape for p in model_spec(asked.model).unique_params}
    found = CONTRACT.scale_domains(asked, asked.mesh)
    return {fqn: np.array(numbers).reshape(shapes[fqn]) for fqn, numbers in found.items()}


@pytest.mark.parametrize(
    ("dtype", "spec", "master", "roles"),
    [
        ("bf16/reduce=fp32/master=fp16", BULK, "fp16", ("master",)),
        ("fp16/reduce=fp32/master=fp16", BULK, "fp16", ("master",)),
        ("mixed/master=fp16/exp_avg=fp16", BULK, "fp16", ("master", "exp_avg")),
        ("mixed/master=fp16/exp_avg=fp16", ISLAND, None, ("exp_avg",)),
        ("bf16/master=fp32/exp_avg=bf16/exp_avg_sq=fp8e4m3", BULK, "fp32", ("exp_avg_sq",)),
        ("fp16/master=fp32", BULK, "fp32", ()),
    ],
)
def test_what_is_scaled(dtype: str, spec: ParamSpec, master: str | None, roles: tuple[str, ...]) -> None:
    asked = scenario(dtype=dtype)
    stage = CONTRACT.stages(asked, spec, asked.mesh)
    assert stage.master == master
    assert CONTRACT.scaled_roles(asked, stage) == roles
    assert {stage.exp_avg, stage.exp_avg_sq} <= {"fp32", "bf16", "fp16", "fp8e4m3"}
    assert CONTRACT.has_scales(asked) is bool(roles)


def test_nothing_is_scaled_without_masters_in_the_optimizer() -> None:
    assert not CONTRACT.has_scales(scenario(options="", dtype="bf16/reduce=fp32/master=fp32"))
    assert CONTRACT.scale_domains(scenario(dtype="fp16/master=fp32"), BASE.mesh) == {}


def test_a_domain_is_what_one_rank_owns() -> None:
    """A buffer of 640 elements, last parameter first, each from a multiple of 64 on: four ranks own 160 each, and the
    first boundary cuts down.weight, which lies at 128."""
    asked = scenario(mesh="1x4x1")
    found = domains_of(asked)
    spec = model_spec(asked.model)
    assert found.keys() == {p.fqn for p in spec.unique_params}
    numbers = [set(domains.ravel().tolist()) for domains in found.values()]
    assert not any(a & b for i, a in enumerate(numbers) for b in numbers[:i])
    counts = {fqn: np.unique(domains.ravel(), return_counts=True)[1].tolist() for fqn, domains in found.items()}
    assert counts == {p.fqn: [32, 80] if p.fqn == "down.weight" else [p.spec.numel] for p in spec.unique_params}
    assert len(set(found["down.weight"].ravel()[:32].tolist())) == 1


def test_tensor_parallel_shards_and_shared_out_experts_are_domains_of_their_own() -> None:
    split = domains_of(scenario(model="twins", mesh="1x1x2"))
    params = {p.fqn: p.spec for p in model_spec("twins").unique_params}
    for fqn, domains in split.items():
        assert len(np.unique(domains)) == (1 if params[fqn].tp_dim is None else 2)
    experts = domains_of(scenario(model="moe", mesh="1x2x1", expert_parallel="2"))["experts.fc1"]
    assert [len(np.unique(half)) for half in np.split(experts, 2)] == [1, 1]
    assert experts[0, 0, 0] != experts[-1, 0, 0]


CELLS = [
    {},
    {"mesh": "1x4x1", "model": "many", "options": "precision_aware+overlap_grad_reduce", "load": "shrink"},
    {"mesh": "2x2x1", "model": "sandwich", "program": "model_only_late", "optimizer": "adam/impl=multi_tensor"},
    {"mesh": "1x2x2", "model": "groups", "dtype": "fp16/reduce=fp32/master=fp32/exp_avg=fp8e4m3/exp_avg_sq=fp16"},
    {"model": "unused", "dtype": "mixed/master=fp16/exp_avg=fp8e4m3", "program": "rollback"},
    {"mesh": "1x4x1", "model": "moe", "expert_parallel": "2", "dtype": "fp32/exp_avg=fp16"},
]


@pytest.mark.parametrize("axes", CELLS, ids=str)
def test_the_oracles_agree(axes: dict[str, str]) -> None:
    asked = scenario(**axes)
    logical, wanted = by_reference(asked), by_twin(asked)
    assert {key.role for key in wanted} >= {"quant_scale"}
    assert {k: v for k, v in logical.items() if k.role != "norm"} == {
        k: v for k, v in wanted.items() if k.role != "norm"
    }


def test_a_scale_over_the_whole_tensor_is_noticed() -> None:
    """The canary of the contract: with one domain a parameter, bits of the moments and of the weights differ."""
    asked = scenario(mesh="1x4x1", program="train")
    wanted = by_reference(asked)
    other = twin.run(with_one_domain_a_parameter(inputs_of(asked)))
    differing = {key.role for key in wanted if key in other and wanted[key] != other[key]}
    assert differing >= {"quant_scale", "exp_avg", "exp_avg_sq", "master", "param"}


def with_one_domain_a_parameter(inputs: Inputs) -> Inputs:
    builds = tuple(
        replace(
            build,
            parameters=tuple(
                replace(p, domains=(number,) * math.prod(p.shape)) for number, p in enumerate(build.parameters)
            ),
        )
        for build in inputs.builds
    )
    return replace(inputs, builds=builds)


def test_inputs_tell_partitions_apart_where_something_is_scaled_and_only_there() -> None:
    assert inputs_of(scenario(mesh="1x4x1")) != inputs_of(scenario(mesh="1x2x1"))
    plain = {"dtype": "fp16/master=fp32"}
    assert inputs_of(scenario(**plain, mesh="1x4x1")) == inputs_of(scenario(**plain, mesh="1x2x1"))


def test_a_checkpoint_holds_the_products() -> None:
    asked = scenario(program="build step save", checkpoint="dp_zero")
    live = by_twin(asked)
    save = expand(asked)[-1]
    written = SYSTEM.stored.must_hold({k: v for k, v in live.items() if k.op == save.index}, save, asked)
    fqn = model_spec(asked.model).unique_params[0].fqn
    for role in ("master", "exp_avg"):
        stored = np.frombuffer(live[Key(save.index, LIVE, role, fqn)].data, np.float16).astype(np.float32)
        scale = np.frombuffer(live[Key(save.index, LIVE, "quant_scale", f"{fqn}.{role}")].data, np.float32)
        assert written[Key(save.index, WRITTEN, role, fqn)].data == (stored * scale).tobytes()
    assert not any(key.role == "quant_scale" for key in written)
