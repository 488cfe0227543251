"""Folders that only one library writes, as `shardproof diff` reads them: what fits together, and what is refused.

*Verifies*: layouts made here by hand, small and exact, and damage to them. *Does not verify*: that the libraries write
such folders (tests/conformance/test_compared_checkpoints.py does).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoint_samples as samples
import pytest
import torch
from shardproof.compare.differences import Comparison
from shardproof.compare.progress import SilentProgress
from shardproof.compare.run import CompareRequest, compare
from shardproof.errors import UsageError
from shardproof.protocol.registry import all_systems

STATE = {"model": {"w": torch.arange(6.0)}}
A, B = torch.arange(10.0).reshape(5, 2), torch.arange(100.0, 107.0)


def compared(a: Path, b: Path) -> Comparison:
    layouts = [layout for system in all_systems() for layout in system.layouts]
    return compare(CompareRequest(a, b, layouts), SilentProgress())


def refusal(path: Path) -> str:
    with pytest.raises(UsageError) as caught:
        compared(path, path)
    message = str(caught.value)
    assert all(part in message for part in ("given ", "; allowed: ", "; for example: "))
    return message


# Megatron's


@pytest.fixture
def megatron(tmp_path: Path) -> Path:
    """A folder of checkpoints whose latest is iteration 20."""
    for number in (10, 20):
        folder = samples.save_dcp(STATE, tmp_path / "m" / f"iter_{number:07d}")
        samples.save_full({"args": {"lr": number}, "iteration": number}, folder / "common.pt")
        (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist"}))
    (tmp_path / "m" / "latest_checkpointed_iteration.txt").write_text("20\n")
    return tmp_path / "m"


def test_the_latest_iteration_is_taken(megatron: Path) -> None:
    assert compared(megatron, megatron / "iter_0000020").equal
    found = compared(megatron, megatron / "iter_0000010").found
    assert [one.name for one in found] == ["common.args.lr", "common.iteration"]


@pytest.mark.parametrize("text", ["", "30", "-1", "../elsewhere", "0x14", "20 20", "x" * 5000, "²"])
def test_a_latest_iteration_that_is_none(megatron: Path, text: str) -> None:
    (megatron / "latest_checkpointed_iteration.txt").write_text(text)
    assert "a number with a folder iter_*" in refusal(megatron)


def test_zarr_is_refused_with_the_way_out(megatron: Path) -> None:
    folder = megatron / "iter_0000020"
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "zarr"}))
    assert "--ckpt-format torch_dist" in refusal(folder)
    (folder / "metadata.json").unlink()
    (folder / ".metadata").unlink()
    (folder / "common.pt").unlink()
    (folder / "weight").mkdir()
    (folder / "weight" / ".zarray").write_text("{}")
    assert "zarr" in refusal(folder)


def test_ranks_of_the_older_form_are_compared_each_with_itself(tmp_path: Path) -> None:
    for name in ("a", "b"):
        for rank in range(2):
            folder = tmp_path / name / f"mp_rank_{rank:02}"
            folder.mkdir(parents=True)
            samples.save_full({"model": {"w": torch.full((3,), float(rank))}}, folder / "model_optim_rng.pt")
    assert compared(tmp_path / "a", tmp_path / "b").equal
    samples.save_full({"model": {"w": torch.ones(3)}}, tmp_path / "b" / "mp_rank_00" / "model_optim_rng.pt")
    assert [one.name for one in compared(tmp_path / "a", tmp_path / "b").found] == [
        "mp_rank_00.model_optim_rng.model.w"
    ]
    (tmp_path / "b" / "mp_rank_01" / "model_optim_rng.pt").unlink()
    assert "model_optim_rng.pt" in refusal(tmp_path / "b")


# DeepSpeed's


def padded(flat: torch.Tensor, size: int) -> torch.Tensor:
    return torch.cat([flat, torch.zeros(size - len(flat))])


def write_zero1(folder: Path, ranks: int, edit: Callable[[int, dict[str, Any]], None] | None = None) -> Path:
    """Stage 1: A and B one after the other in one buffer, of which every rank has an equal part."""
    folder.mkdir(parents=True)
    shapes = [{"a.weight": A.shape, "b": B.shape}]
    model = {"module": {"a.weight": A.bfloat16()}, "param_shapes": shapes, "dp_world_size": 2, "global_steps": 3}
    samples.save_full(model, folder / "mp_rank_00_model_states.pt")
    flat = torch.cat([A.reshape(-1), B])
    share = -(-len(flat) // ranks)
    for rank in range(ranks):
        low, high = share * rank, min(share * (rank + 1), len(flat))
        mapping = {
            name: {"numel": min(high, end) - max(low, begin), "start": max(low, begin) - low}
            for name, begin, end in (("a.weight", 0, 10), ("b", 10, 17))
            if max(low, begin) < min(high, end)
        }
        inner = {
            "state": {0: {"step": 3, "exp_avg": flat[low:high] / 2}},
            "param_groups": [{"lr": 0.1, "params": [0]}],
        }
        state = {
            "single_partition_of_fp32_groups": [flat[low:high].clone()],
            "base_optimizer_state": inner,
            "zero_stage": 1,
            "partition_count": [ranks],
            "param_slice_mappings": [mapping],
        }
        if edit:
            edit(rank, state)
        samples.save_full({"optimizer_state_dict": state}, folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    return folder


def write_zero3(folder: Path, ranks: int) -> Path:
    """Stage 3: every rank has an equal share of each parameter, padded at the end, in two flat tensors."""
    folder.mkdir(parents=True)
    for rank in range(ranks):
        shares = []
        for tensor in (A, B):
            part = -(-tensor.numel() // ranks)
            shares.append(padded(tensor.reshape(-1)[part * rank : part * (rank + 1)], part))
        model = {"module": {"a.weight": torch.zeros(0)}, "param_shapes": [{"a.weight": A.shape, "b": B.shape}]}
        samples.save_full(model, folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
        state = {
            "fp32_flat_groups": shares,
            "optimizer_state_dict": {
                "state": {i: {"step": 3, "exp_avg": share / 2} for i, share in enumerate(shares)},
                "param_groups": [{"lr": 0.1}],
            },
        }
        name = f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        samples.save_full({"optimizer_state_dict": state}, folder / name)
    return folder


def test_flat_parts_of_other_numbers_of_ranks_are_one_state(tmp_path: Path) -> None:
    tags = [write_zero1(tmp_path / f"t{ranks}", ranks) for ranks in (1, 2, 3, 5)]
    for tag in tags[1:]:
        found = compared(tags[0], tag)
        assert found.found == ()
        assert dict(found.compared)["exp_avg"] == dict(found.compared)["master"] == 2


def test_stage_3_has_the_same_names_and_bits(tmp_path: Path) -> None:
    tags = [write_zero3(tmp_path / f"t{ranks}", ranks) for ranks in (1, 2, 3, 11)]
    for tag in tags[1:]:
        assert compared(tags[0], tag).found == ()
    found = compared(write_zero1(tmp_path / "one", 2), tags[1])
    assert {one.name for one in found.found if one.role in ("master", "exp_avg")} == set()


def test_an_element_of_a_flat_part_is_located_in_its_parameter(tmp_path: Path) -> None:
    def edit(rank: int, state: dict[str, Any]) -> None:
        if rank == 1:
            state["single_partition_of_fp32_groups"][0][2] = -1.0

    (found,) = compared(write_zero1(tmp_path / "a", 2), write_zero1(tmp_path / "b", 2, edit)).found
    assert (found.name, found.first_index, found.first_a) == ("optimizer.b.fp32", (1,), "101 (0x42ca0000)")


def test_an_elastic_checkpoint_has_the_same_state_without_groups(tmp_path: Path) -> None:
    def elastic(rank: int, state: dict[str, Any]) -> None:
        state["base_optimizer_state"] = [*state["base_optimizer_state"]["state"].values()]

    found = compared(write_zero1(tmp_path / "a", 2, elastic), write_zero1(tmp_path / "b", 3, elastic))
    assert found.found == ()
    assert dict(found.compared)["exp_avg"] == dict(found.compared)["master"] == 2
    apart = compared(tmp_path / "a", write_zero1(tmp_path / "c", 2))
    assert all(one.name.startswith("optimizer_state_dict.param_groups") for one in apart.found)


def test_the_tag_that_latest_names_is_taken(tmp_path: Path) -> None:
    write_zero1(tmp_path / "run" / "global_step3", 2)
    (tmp_path / "run" / "latest").write_text("global_step3")
    assert compared(tmp_path / "run", tmp_path / "run" / "global_step3").equal


@pytest.mark.parametrize("text", ["", "..", ".", "../run/global_step3", "/etc", "absent", "a\0b"])
def test_a_latest_tag_that_is_none(tmp_path: Path, text: str) -> None:
    write_zero1(tmp_path / "run" / "global_step3", 2)
    (tmp_path / "run" / "latest").write_text(text)
    assert "the name of a folder of this one" in refusal(tmp_path / "run")


def test_a_rank_whose_file_is_not_there(tmp_path: Path) -> None:
    tag = write_zero1(tmp_path / "t", 3)
    (tag / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    assert "ranks with a file" in refusal(tag)


EDITS: dict[str, Callable[[int, dict[str, Any]], None]] = {
    "another parameter": lambda rank, state: state.update(param_slice_mappings=[{"x": {"numel": 1, "start": 0}}]),
    "behind the end": lambda rank, state: state.update(param_slice_mappings=[{"b": {"numel": 7, "start": 9}}]),
    "too many elements": lambda rank, state: state.update(param_slice_mappings=[{"b": {"numel": 9, "start": 0}}]),
    "negative": lambda rank, state: state.update(
        param_slice_mappings=[{"b": {"numel": 0 if rank else 7, "start": -1}}]
    ),
    "no address": lambda rank, state: state.update(param_slice_mappings=[{"b": 3}]),
    "no mapping": lambda rank, state: state.update(param_slice_mappings=3),
    "too few tensors": lambda rank, state: state.update(single_partition_of_fp32_groups=[]),
    "no state": lambda rank, state: state.pop("base_optimizer_state"),
}


@pytest.mark.parametrize("what", EDITS)
def test_files_that_do_not_fit_together(tmp_path: Path, what: str) -> None:
    refusal(write_zero1(tmp_path / "t", 2, EDITS[what]))


def test_a_universal_checkpoint_has_the_names_of_its_tag(tmp_path: Path) -> None:
    tag = write_zero1(tmp_path / "t", 2)
    universal = tmp_path / "u"
    for name, tensor in (("a.weight", A), ("b", B)):
        (universal / "zero" / name).mkdir(parents=True)
        samples.save_full({"param": tensor, "vocab": 1}, universal / "zero" / name / "fp32.pt")
        samples.save_full({"param": tensor / 2}, universal / "zero" / name / "exp_avg.pt")
    (universal / "mp_rank_00_model_states.pt").write_bytes((tag / "mp_rank_00_model_states.pt").read_bytes())
    found = compared(tag, universal)
    assert {one.role for one in found.found} <= {"hyperparameter", "other", "step"}
    assert found.counts()["master"] == {"compared": 2, "equal": 2}
