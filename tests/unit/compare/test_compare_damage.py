"""Whatever happens to the bytes of a checkpoint, `shardproof diff` says bad input or gives a comparison."""

from __future__ import annotations

import contextlib
from pathlib import Path

import checkpoint_samples as samples
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from shardproof.errors import UsageError
from test_compare import write_safetensors
from test_compare_folders import compared, write_zero1, write_zero3

from tests.effort import examples

Damage = st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), min_size=1, max_size=4)

KINDS = {
    ".metadata": "dcp/.metadata", "distcp": "dcp/__0_0.distcp", "zip": "f.pt", "legacy": "old.pt",
    "safetensors": "m.safetensors", "zero1": "z1/zero_pp_rank_0_mp_rank_00_optim_states.pt",
    "zero3": "z3/zero_pp_rank_0_mp_rank_00_model_states.pt",
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_damage_is_bad_input_or_a_comparison(tmp_path: Path, kind: str) -> None:
    samples.save_dcp(samples.STATE, tmp_path / "dcp")
    samples.save_full(samples.STATE, tmp_path / "f.pt")
    torch.save(samples.STATE, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    write_safetensors(tmp_path / "m.safetensors", {"w": torch.ones(4), "v": torch.ones(2, 2)}, {"v": [0, 0]})
    write_zero1(tmp_path / "z1", 2)
    write_zero3(tmp_path / "z3", 2)
    target = tmp_path / KINDS[kind]
    named = target.parent if target.parent != tmp_path else target
    sound = tmp_path / "f.pt" if kind != "zip" else tmp_path / "dcp"
    intact = target.read_bytes()

    @settings(max_examples=examples(50), deadline=None)
    @given(Damage, st.booleans())
    def check(damage: list[tuple[float, int]], cut: bool) -> None:
        data = bytearray(intact)
        for where, value in damage:
            data[int(where * len(data))] = value
        target.write_bytes(data[: int(damage[0][0] * len(data))] if cut else data)
        for a, b in ((named, named), (named, sound)):
            with contextlib.suppress(UsageError):
                compared(a, b)

    check()
