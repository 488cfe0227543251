"""`shardproof inspect` of what the judge's reader does not know: the table of what `diff` reads, nothing executed."""

from __future__ import annotations

import argparse
from pathlib import Path

import checkpoint_samples as samples
import pytest
import torch
from hostile_checkpoints import foreign_files
from shardproof.compare.listing import listed
from shardproof.readers.description import check_complete, describe
from shardproof.readers.errors import CheckpointError, UnfamiliarError
from test_compare import write_safetensors


def test_what_both_readers_read_gives_the_same_rows(tmp_path: Path) -> None:
    saved = samples.save_full({"model": {"w": torch.arange(6.0).view(2, 3)}, "epoch": 3}, tmp_path / "c.pt")
    assert listed(saved, []) == (describe(saved), ())


def test_the_arguments_of_a_training_script_are_text(tmp_path: Path) -> None:
    torch.save({"args": argparse.Namespace(lr=0.5), "w": torch.ones(3)}, tmp_path / "c.pt")
    with pytest.raises(UnfamiliarError):
        describe(tmp_path / "c.pt")
    rows, foreign = listed(tmp_path / "c.pt", [])
    assert foreign == ("argparse.Namespace",)
    assert {row.key: row.value or row.dtype for row in rows}["args.state.lr"] == "0.5"
    check_complete(tmp_path / "c.pt", rows)


def test_safetensors(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "m.safetensors", {"w": torch.ones(2, 2)})
    ((row,), foreign) = listed(tmp_path / "m.safetensors", [])
    assert (row.key, row.dtype, row.shape, row.coverage, foreign) == ("w", "fp32", (2, 2), "ok", ())


@pytest.mark.parametrize("kind", sorted(foreign_files().keys() - {"safetensors"}))
def test_what_diff_does_not_read_is_refused(tmp_path: Path, kind: str) -> None:
    (tmp_path / "c").write_bytes(foreign_files()[kind])
    with pytest.raises(CheckpointError):
        listed(tmp_path / "c", [])
