"""The reader of Megatron-Core's checkpoints on files laid out by hand, against the twin."""

from __future__ import annotations

import pickle
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import checkpoint_samples as samples
import numpy as np
import pytest
import torch
from shardproof.diff import diff
from shardproof.mechanisms.megatron.flat_buffers import Owner, buffers, local_box
from shardproof.mechanisms.megatron.ignored import IGNORED
from shardproof.mechanisms.megatron.reader import COMMON_OBJECT
from shardproof.models import ParamSpec, model_spec
from shardproof.observe.assemble import assemble
from shardproof.observe.logical import Key, Logical, Problem, Value
from shardproof.observe.record import LIVE, WRITTEN
from shardproof.observe.settings import SETTING, settings_of
from shardproof.program import Op, expand
from shardproof.readers.description import describe
from shardproof.readers.errors import CheckpointError, UnfamiliarError
from shardproof.scenario import Mesh, Scenario
from shardproof.systems.megatron_core import SYSTEM
from torch.distributed.checkpoint.metadata import Metadata

from tests.oracles import by_twin

DENSE = Owner(0, 0, experts=False)
BASE = Scenario(system="megatron-core", sharding="zero1", checkpoint="dp_zero", mesh=Mesh(1, 2, 1)).with_axes(
    {"optimizer": "adamw/impl=multi_tensor", "program": "build step step save", "dtype": "bf16/master=fp32"}
)
TWINS = BASE.with_axes({"model": "twins", "dtype": "mixed/master=fp32"})
PLACES = {"b.weight": 0, "a.weight": 64}  # of the bf16 buffer of 80 elements, last parameter first
ISLANDS = {"scale.weight": 0, "router.weight": 64}
NUMEL = 80
GROUP = {"wd_mult": 1.0, "lr_mult": 1.0, "max_lr": 0.03125, "min_lr": 0.0, "is_expert_parallel": False, "step": 2,
         "lr": 0.03125, "weight_decay": 0.125, "betas": (0.9, 0.95), "eps": 1e-8, "is_decoupled_lr": False}  # fmt: skip
SCHEDULE = {"max_lr": 0.03125, "num_steps": 2}


@cache
def live(scenario: Scenario) -> Logical:
    return {key: value for key, value in by_twin(scenario).items() if key.op == 3}


def save_op(scenario: Scenario) -> Op:
    return expand(scenario)[3]


def tensor(scenario: Scenario, role: str, fqn: str) -> torch.Tensor:
    value = live(scenario)[Key(3, "live", role, fqn)]
    kind = {"fp32": torch.float32, "bf16": torch.bfloat16}[value.dtype]
    return torch.frombuffer(bytearray(value.data), dtype=kind).reshape(value.shape)


def stepped(scenario: Scenario, fqn: str, state: str) -> torch.Tensor:
    """What the optimizer has of a parameter: its master or itself, or a moment."""
    if state != "param":
        return tensor(scenario, state, fqn)
    own = model_spec(scenario.model).param(fqn).spec.island
    return tensor(scenario, "param" if own else "master", fqn)


Box = tuple[tuple[int, ...], tuple[int, ...]]


def write_chunks(path: Path, key: str, whole: torch.Tensor, boxes: list[Box]) -> Path:
    """A distributed checkpoint of one tensor under a key that is no path, as Megatron-Core's planner writes it."""

    def edit(metadata: Metadata) -> None:
        metadata.planner_data = {key: (key,)}

    return samples.edit_metadata(samples.write_chunks(path, key, whole, boxes), edit)


def flat(scenario: Scenario, places: dict[str, int], holds: dict[str, str], state: str) -> torch.Tensor:
    """A buffer whose parameters hold what belongs to `holds` of them."""
    world = torch.full((NUMEL,), 7.0)
    for fqn, at in places.items():
        world[at : at + 16] = stepped(scenario, holds.get(fqn, fqn), state).reshape(-1)
    return world


@dataclass(frozen=True)
class Files:
    """A dp_zero checkpoint of the twins. holds: parameter → whose state lies in its place."""

    holds: tuple[tuple[str, str], ...] = ()

    def buffers(self) -> dict[Any, Any]:
        content: dict[Any, Any] = {"buckets_coalesced": True}
        kinds = ((torch.bfloat16, PLACES), (torch.float32, ISLANDS))
        for index, (kind, places) in enumerate(kinds):
            states = {s: flat(TWINS, places, dict(self.holds), s) for s in ("param", "exp_avg", "exp_avg_sq")}
            content[index] = {(kind, kind): {**states, "numel_unpadded": NUMEL}}
        return content

    def model(self) -> dict[str, Any]:
        names = [p.fqn for p in model_spec("twins").params]
        return {
            "checkpoint_version": 3.0,
            "iteration": 2,
            "model": {name: tensor(TWINS, "param", name) for name in names},
            "optimizer": {"optimizer": {"param_groups": [dict(GROUP)]}},
            "opt_param_scheduler": SCHEDULE,
        }

    def write(self, path: Path) -> Path:
        folder = path / "mp_rank_00"
        folder.mkdir(parents=True)
        torch.save(self.model(), folder / "model_optim_rng.pt")
        torch.save(self.buffers(), folder / "distrib_optim.pt")
        return path


def read(path: Path, scenario: Scenario) -> tuple[Logical, list[Problem]]:
    return assemble(SYSTEM.stored.read(path, save_op(scenario), scenario))


def differences(path: Path, scenario: Scenario, groups: Mapping[str, Any] | None = None) -> list[tuple[str, str, str]]:
    """How what was read differs. groups: parameter → the live group it is in, where these are several."""
    observed, problems = read(path, scenario)
    held = groups or {p.fqn: GROUP for p in model_spec(scenario.model).unique_params if p.spec.trainable == "yes"}
    expected = SYSTEM.stored.must_hold(live(scenario) | settings(held), save_op(scenario), scenario)
    return sorted((d.key.role, d.key.fqn, d.kind) for d in diff(expected, observed, problems) if d.fails)


def settings(groups: Mapping[str, Any]) -> Logical:
    """What a rank records of the keys of its groups."""
    return {
        Key(3, LIVE, SETTING, f"{fqn}.{name}"): Value("utf8", (len(line),), line.encode())
        for fqn, group in groups.items()
        for name, line in settings_of(group)
    }


def test_gathered_buffers_are_what_the_twin_expects(tmp_path: Path) -> None:
    assert differences(Files().write(tmp_path / "c"), TWINS) == []
    observed, _ = read(tmp_path / "c", TWINS)
    assert {key.role for key in observed} == {
        "param", "master", "exp_avg", "exp_avg_sq", "step", "hyperparameter", "setting", "iteration"
    }  # fmt: skip


def test_a_symmetric_wrong_map_shows_the_values_of_the_other_parameter(tmp_path: Path) -> None:
    """NVIDIA/Megatron-LM issue 2777: equal shapes make it silent, and its own load undoes it."""
    swap = (("a.weight", "router.weight"), ("router.weight", "a.weight"))
    path = Files(swap).write(tmp_path / "c")
    found = differences(path, TWINS)
    assert ("exp_avg", "a.weight", "bits") in found
    assert ("exp_avg", "router.weight", "bits") in found
    assert ("master", "a.weight", "bits") in found
    assert ("param", "router.weight", "replica_conflict") in found
    assert not any(fqn in ("b.weight", "scale.weight") for _, fqn, _ in found)
    observed, _ = read(path, TWINS)
    other = live(TWINS)[Key(3, "live", "exp_avg", "router.weight")]
    assert observed[Key(3, WRITTEN, "exp_avg", "a.weight")] == other


def test_a_cut_parameter_and_its_replicas_over_tensor_parallel_ranks(tmp_path: Path) -> None:
    scenario = BASE.with_axes({"model": "twins", "mesh": "1x1x2", "checkpoint": "dp_zero"})
    for tp in (0, 1):
        owner = Owner(tp, 0, experts=False)
        (buffer,) = buffers(scenario, scenario.mesh, owner)
        states: dict[str, Any] = {}
        for state in ("param", "exp_avg", "exp_avg_sq"):
            world = torch.zeros(buffer.numel)
            for slot in buffer.slots:
                box = tuple(slice(s, s + n) for s, n in zip(*slot.box, strict=True))
                role = "master" if state == "param" else state
                at = buffer.unpadded_start(slot)
                world[at : at + slot.box.volume] = tensor(scenario, role, slot.param.fqn)[box].reshape(-1)
            states[state] = world
        folder = tmp_path / f"mp_rank_{tp:02d}"
        folder.mkdir()
        torch.save({0: {(torch.bfloat16, torch.bfloat16): states}}, folder / "distrib_optim.pt")
        model = {}
        for named in model_spec("twins").params:
            box = tuple(slice(s, s + n) for s, n in zip(*local_box(named.spec, scenario.mesh, owner, 1), strict=True))
            model[named.fqn] = tensor(scenario, "param", named.fqn)[box].clone()
        content = {"model": model, "optimizer": {"optimizer": {"param_groups": [dict(GROUP)]}}, "iteration": 2}
        torch.save(content, folder / "model_optim_rng.pt")
    assert differences(tmp_path, scenario) == []


def test_tensors_by_name_and_the_common_file(tmp_path: Path) -> None:
    scenario = BASE.with_axes({"model": "twins", "dtype": "mixed/master=fp32", "checkpoint": "fully_reshardable"})
    path = named_checkpoint(tmp_path / "c", scenario)
    assert differences(path, scenario) == []


def test_the_common_state_inside_the_checkpoint(tmp_path: Path) -> None:
    """As since Megatron-LM's pull request 5160, which writes no `common.pt` any more."""
    scenario = BASE.with_axes({"model": "twins", "dtype": "mixed/master=fp32", "checkpoint": "fully_reshardable"})
    path = named_checkpoint(tmp_path / "c", scenario, inside=True)
    assert not (path / "common.pt").exists()
    assert differences(path, scenario) == []


def named_checkpoint(path: Path, scenario: Scenario, *, inside: bool = False) -> Path:
    """A distributed checkpoint. inside: what is common to all ranks is an object of it, not a file beside it."""
    content: dict[str, Any] = {COMMON_OBJECT: "replaced below"} if inside else {}
    for named in model_spec(scenario.model).params:
        content[named.fqn] = tensor(scenario, "param", named.fqn)
        for state in ("param", "exp_avg", "exp_avg_sq"):
            content[f"optimizer.state.{state}.{named.fqn}"] = stepped(scenario, named.fqn, state)
    samples.save_dcp(content, path)
    optimizer = {"optimizer": {"param_groups": [dict(GROUP)]}}
    common = {"optimizer": optimizer, "opt_param_scheduler": SCHEDULE, "iteration": 2}
    if inside:
        samples.replace_item(path, COMMON_OBJECT, samples.saved([common]))
    else:
        torch.save(common, path / "common.pt")
    return path


def test_flat_ranges_of_shards_become_boxes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before 0.16 a tensor (4, 4) in 2 shards is stored as (2, 1, 8), and only extra metadata says so."""
    whole = torch.arange(16.0).reshape(2, 1, 8)
    boxes = [((0, 0, 0), (1, 1, 5)), ((0, 0, 5), (1, 1, 3)), ((1, 0, 0), (1, 1, 8))]
    path = write_chunks(tmp_path / "c", "optimizer.state.exp_avg.a.weight", whole, boxes)
    told = {"optimizer.state.exp_avg.a.weight": {"nd_reformulated_orig_global_shape": (4, 4)}}
    as_megatron(path, told, monkeypatch)
    (row,) = describe(path)
    assert (row.shape, row.coverage) == ((4, 4), "ok")
    torch.save({}, path / "common.pt")
    observed, problems = read(path, TWINS)
    assert problems == []
    value = observed[Key(3, WRITTEN, "exp_avg", "a.weight")]
    assert np.array_equal(np.frombuffer(value.data, np.float32), np.arange(16.0))


def as_megatron(path: Path, told: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Rewrite `.metadata` with the class that Megatron-Core 0.15 pickles."""
    name = "megatron.core.dist_checkpointing.strategies.torch"
    parts = name.split(".")
    for depth in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:depth]), ModuleType(".".join(parts[:depth])))
    kind = type("MCoreMetadata", (Metadata,), {"__module__": name})
    monkeypatch.setattr(sys.modules[name], "MCoreMetadata", kind, raising=False)
    own = pickle.loads((path / ".metadata").read_bytes())
    wrapped = kind(own.state_dict_metadata, own.planner_data, own.storage_data)
    wrapped.mcore_data = told
    (path / ".metadata").write_bytes(pickle.dumps(wrapped, protocol=4))


def test_shards_that_do_not_divide_their_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = torch.arange(16.0).reshape(2, 1, 8)
    path = write_chunks(tmp_path / "c", "x", whole, [((0, 0, 0), (2, 1, 8))])
    as_megatron(path, {"x": {"nd_reformulated_orig_global_shape": (3, 4)}}, monkeypatch)
    with pytest.raises(CheckpointError, match=r"equal shards of \(3, 4\)"):
        describe(path)


def test_buckets_are_read_in_pieces_of_ranks(tmp_path: Path) -> None:
    """dp_reshardable: what nobody wrote is a gap of the parameter it lies in, padding of none."""
    scenario = BASE.with_axes({"model": "twins", "checkpoint": "dp_reshardable"})
    (buffer,) = buffers(scenario, scenario.mesh, DENSE)
    world = torch.full((buffer.numel,), 7.0)
    for slot in buffer.slots:
        world[slot.start : slot.stop] = tensor(scenario, "exp_avg", slot.param.fqn).reshape(-1)
    key = "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.bfloat16, torch.bfloat16).bucket_idx_0.exp_avg"
    boxes = [((0,), (72,)), ((72,), (40,)), ((120,), (buffer.numel - 120,))]  # 112 to 120 is padding
    write_chunks(tmp_path / "c", key, world, boxes)
    torch.save({}, tmp_path / "c" / "common.pt")
    observed, problems = read(tmp_path / "c", scenario)
    assert problems == []
    for slot in buffer.slots:
        value = observed[Key(3, WRITTEN, "exp_avg", slot.param.fqn)]
        assert value == live(scenario)[Key(3, "live", "exp_avg", slot.param.fqn)]


def test_state_by_number_follows_the_groups(tmp_path: Path) -> None:
    scenario = BASE.with_axes({"model": "groups", "sharding": "replicate", "checkpoint": "plain", "dtype": "fp32"})
    order = [["a.weight", "c.weight"], ["a.bias", "b.bias"], ["b.weight"]]
    multipliers = [(1.0, 1.0), (0.0, 1.0), (4.0, 0.25)]
    state: dict[int, Any] = {}
    groups = []
    for names, (wd_mult, scale) in zip(order, multipliers, strict=True):
        numbers = list(range(len(state), len(state) + len(names)))
        for number, name in zip(numbers, names, strict=True):
            state[number] = {s: tensor(scenario, s, name) for s in ("exp_avg", "exp_avg_sq")}
        lr, decay = 0.03125 * scale, 0.125 * wd_mult
        groups.append({**GROUP, "wd_mult": wd_mult, "max_lr": lr, "lr": lr, "weight_decay": decay, "params": numbers})
    model = {p.fqn: tensor(scenario, "param", p.fqn) for p in model_spec("groups").params}
    folder = tmp_path / "mp_rank_00"
    folder.mkdir()
    content = {"model": model, "optimizer": {"state": state, "param_groups": groups}, "iteration": 2}
    torch.save(content, folder / "model_optim_rng.pt")
    held = {name: group for names, group in zip(order, groups, strict=True) for name in names}
    assert differences(tmp_path, scenario, held) == []


def test_a_group_that_the_model_lacks_is_named_by_its_number(tmp_path: Path) -> None:
    path = Files().write(tmp_path / "c")
    content = Files().model()
    content["optimizer"]["optimizer"]["param_groups"][0]["wd_mult"] = 3.0
    torch.save(content, path / "mp_rank_00" / "model_optim_rng.pt")
    found = differences(path, TWINS)
    assert ("hyperparameter", "group0.lr", "extra") in found
    assert ("step", "a.weight", "missing") in found


@pytest.mark.parametrize(
    ("key", "value", "kind"),
    [
        ("lr", torch.tensor(0.03125), "bits"),
        ("min_lr", 0, "bits"),
        ("min_lr", 0.5, "bits"),
        ("is_decoupled_lr", None, "bits"),
        ("betas", [0.9, 0.95], None),
        ("warmth", 1.5, "extra"),
        ("eps", ..., "missing"),
    ],
    ids=str,
)
def test_every_key_of_a_group_is_compared_with_its_type(tmp_path: Path, key: str, value: Any, kind: str | None) -> None:
    path = Files().write(tmp_path / "c")
    content = Files().model()
    (group,) = content["optimizer"]["optimizer"]["param_groups"]
    group[key] = value
    if value is ...:
        del group[key]
    torch.save(content, path / "mp_rank_00" / "model_optim_rng.pt")
    found = [(name, how) for role, name, how in differences(path, TWINS) if role == "setting"]
    names = sorted(p.fqn for p in model_spec("twins").params)
    kinds = {how.replace("shape", "bits") for _, how in found}
    assert ([name for name, _ in found], kinds) == (([f"{n}.{key}" for n in names], {kind}) if kind else ([], set()))


@pytest.mark.parametrize(
    ("keys", "value", "found"),
    [
        (["rerun_state"], 1, ("unknown", "rerun_state", "extra")),
        (["iteration"], 7, ("iteration", "iteration", "bits")),
        (["opt_param_scheduler", "lr_power"], 2.0, ("unknown", "opt_param_scheduler.lr_power", "extra")),
        (["optimizer", "optimizer", "ema"], torch.ones(2), ("unknown", "ema", "extra")),
        (["optimizer", "second"], "x", ("unknown", "second", "extra")),
        (["model", "fc._extra_state"], torch.ones(3), ("unknown", "fc._extra_state", "extra")),
        (["model", "fc._extra_state"], None, None),
        (["checkpoint_version"], 4.0, None),
        (["opt_param_scheduler", "lr_decay_style"], "linear", None),
    ],
    ids=str,
)
def test_what_nobody_expects_is_a_difference(
    tmp_path: Path, keys: list[Any], value: Any, found: tuple[str, str, str] | None
) -> None:
    path = Files().write(tmp_path / "c")
    content = place = Files().model()
    content["opt_param_scheduler"] = dict(SCHEDULE)
    for key in keys[:-1]:
        place = place[key]
    place[keys[-1]] = value
    torch.save(content, path / "mp_rank_00" / "model_optim_rng.pt")
    assert differences(path, TWINS) == ([found] if found else [])


def test_what_nobody_expects_in_a_buffers_file_is_a_difference(tmp_path: Path) -> None:
    path = Files().write(tmp_path / "c")
    content = {**Files().buffers(), "third": torch.zeros(2), 5: None}
    torch.save(content, path / "mp_rank_00" / "distrib_optim.pt")
    assert differences(path, TWINS) == [("unknown", "third", "extra")]


NAMES_IGNORED = (
    "checkpoint_version", "content_metadata.singleton_local_shards", "opt_param_scheduler.max_lr",
    "opt_param_scheduler.num_steps", "grad_scaler.scale", "param_state.3.step", "param_state_sharding_type",
    "torch.float32.buckets_coalesced",
)  # fmt: skip
"""A name of each pattern of `IGNORED`, in that order."""


def test_every_pattern_of_what_is_ignored_has_a_reason_and_ignores_no_name_that_ends_like_its_own() -> None:
    for (pattern, reason), name in zip(IGNORED, NAMES_IGNORED, strict=True):
        assert reason
        assert [each for each, _ in IGNORED if re.fullmatch(each, name)] == [pattern]
        last = name.rpartition(".")[2]
        assert not any(re.fullmatch(each, f"exp_avg_{last}") for each, _ in IGNORED), pattern


def test_layout_of_one_bucket_by_hand() -> None:
    (buffer,) = buffers(BASE.with_axes({"model": "dense"}), Mesh(1, 2, 1), DENSE)
    assert buffer.dtypes == "(torch.bfloat16, torch.bfloat16)"
    assert {slot.param.fqn: slot.start for slot in buffer.slots} == {
        "norm.weight": 0, "down.bias": 64, "down.weight": 128, "up.bias": 256, "up.weight": 320,
        "embed.bias": 448, "embed.weight": 512,
    }  # fmt: skip
    assert buffer.sizes == (572,)


def test_layout_of_several_buckets_by_hand() -> None:
    scenario = BASE.with_axes(
        {"model": "dense", "options": "overlap_grad_reduce", "dtype": "bf16/reduce=fp32/master=fp32"}
    )
    (buffer,) = buffers(scenario, Mesh(1, 2, 1), DENSE)
    assert buffer.dtypes == "(torch.bfloat16, torch.float32)"
    assert buffer.sizes == (71, 112, 176, 124)
    assert [(slot.param.fqn, slot.bucket, slot.start, buffer.unpadded_start(slot)) for slot in buffer.slots[2:5]] == [
        ("down.weight", 1, 0, 71),
        ("up.bias", 2, 0, 183),
        ("up.weight", 2, 64, 247),
    ]
    assert buffers(scenario.with_axes({"options": "one_bucket+overlap_grad_reduce"}), Mesh(1, 2, 1), DENSE)[
        0
    ].sizes == (572,)


def test_experts_have_buffers_of_their_own() -> None:
    scenario = BASE.with_axes({"model": "moe", "dtype": "mixed/master=fp32", "expert_parallel": "2"})
    dense = buffers(scenario, Mesh(1, 2, 1), DENSE)
    assert [[slot.param.fqn for slot in buffer.slots] for buffer in dense] == [["router.weight"], ["dense.weight"]]
    (experts,) = buffers(scenario, Mesh(1, 2, 1), Owner(0, 1, experts=True))
    assert [slot.box.start for slot in experts.slots] == [(2, 0, 0), (2, 0, 0)]
    spec = ParamSpec("w", (4, 6), ep_dim=0)
    assert local_box(spec, Mesh(1, 2, 1), Owner(0, 1, experts=True), 2).size == (2, 6)


def test_masters_kept_as_remainders() -> None:
    scenario = BASE.with_axes({"options": "precision_aware", "checkpoint": "dp_reshardable"})
    key, stored = Key(3, "live", "master", "norm.weight"), Key(3, WRITTEN, "master", "norm.weight")
    value = SYSTEM.stored.must_hold({key: Value("fp32", (13,), live(scenario)[key].data)}, save_op(scenario), scenario)[
        stored
    ]
    low = np.frombuffer(live(scenario)[key].data, np.uint32) & 0xFFFF
    assert value.dtype == "int16"
    assert np.array_equal(np.frombuffer(value.data, np.uint16), low)
    gathered = scenario.with_axes({"checkpoint": "dp_zero"})
    value = SYSTEM.stored.must_hold({key: live(scenario)[key]}, save_op(gathered), gathered)[stored]
    assert np.array_equal(np.frombuffer(value.data, np.float32), low.astype(np.uint16).view(np.int16))


# Damaged, foreign and hostile files


def refusal(path: Path, scenario: Scenario = TWINS) -> str:
    with pytest.raises(CheckpointError) as error:
        SYSTEM.stored.read(path, save_op(scenario), scenario)
    return str(error.value)


def test_a_missing_checkpoint(tmp_path: Path) -> None:
    assert "existing directory" in refusal(tmp_path / "none")


@pytest.mark.parametrize("name", ["model_optim_rng.pt", "distrib_optim.pt"])
def test_a_truncated_or_missing_file(tmp_path: Path, name: str) -> None:
    file = Files().write(tmp_path / "c") / "mp_rank_00" / name
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])
    assert "cut off" in refusal(tmp_path / "c")
    file.unlink()
    assert "existing" in refusal(tmp_path / "c")


def test_a_distributed_checkpoint_without_its_common_file(tmp_path: Path) -> None:
    path = named_checkpoint(tmp_path / "c", BASE.with_axes({"model": "twins", "dtype": "mixed/master=fp32"}))
    (path / "common.pt").unlink()
    with pytest.raises(UnfamiliarError, match=r"`common.pt`.* nor the object common_state/shard_0_1"):
        SYSTEM.stored.read(path, save_op(TWINS), TWINS)


def test_a_folder_with_another_name(tmp_path: Path) -> None:
    Files().write(tmp_path / "c").joinpath("mp_rank_00").rename(tmp_path / "c" / "mp_rank_first")
    assert "mp_rank_TP" in refusal(tmp_path / "c")


def test_a_buffer_of_another_size(tmp_path: Path) -> None:
    path = Files().write(tmp_path / "c")
    content = Files().buffers()
    content[0][torch.bfloat16, torch.bfloat16]["exp_avg"] = torch.zeros(NUMEL + 1)
    torch.save(content, path / "mp_rank_00" / "distrib_optim.pt")
    assert f"({NUMEL},), as the model's parameters make it" in refusal(path)


def test_a_buffer_of_another_dtype(tmp_path: Path) -> None:
    path = Files().write(tmp_path / "c")
    content = Files().buffers()
    content[0] = {(torch.float16, torch.float16): content[0][torch.bfloat16, torch.bfloat16]}
    torch.save(content, path / "mp_rank_00" / "distrib_optim.pt")
    assert "0 of (torch.bfloat16, torch.bfloat16), 1 of (torch.float32, torch.float32)" in refusal(path)


def test_code_in_a_file_is_refused_and_not_run(tmp_path: Path) -> None:
    path = Files().write(tmp_path / "c")
    marker = tmp_path / "ran"
    torch.save({0: samples.Touch(marker)}, path / "mp_rank_00" / "distrib_optim.pt")
    assert "nothing was executed" in refusal(path)
    assert not marker.exists()


def test_a_key_of_other_things_than_dtypes(tmp_path: Path) -> None:
    path = Files().write(tmp_path / "c")
    torch.save({0: {(1, 2): torch.zeros(1)}}, path / "mp_rank_00" / "distrib_optim.pt")
    assert "type of a key" in refusal(path)


def test_attributes_of_a_tensor_are_not_looked_at(tmp_path: Path) -> None:
    master = torch.arange(3.0)
    master.tensor_model_parallel = True  # type: ignore[attr-defined]  # as the library marks its masters
    path = samples.save_full({"m": master}, tmp_path / "c")
    (row,) = describe(path)
    assert (row.dtype, row.shape) == ("fp32", (3,))


def test_classes_of_optimizers_are_text_and_others_refused(tmp_path: Path) -> None:
    path = samples.save_full({"cls": torch.optim.AdamW}, tmp_path / "c")
    assert describe(path)[0].value == "'torch.optim.adamw.AdamW'"
    samples.save_full({"cls": torch.optim.LBFGS}, path)
    with pytest.raises(CheckpointError, match="nothing was executed"):
        describe(path)
