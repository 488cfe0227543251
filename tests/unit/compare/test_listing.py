"""`shardproof inspect` of what the judge's reader does not know: the table of what `diff` reads, nothing executed."""

from __future__ import annotations

import argparse
from pathlib import Path

import checkpoint_samples as samples
import pytest
import torch
from hostile_checkpoints import foreign_files
from shardproof.cli.main import entry
from shardproof.compare.listing import listed
from shardproof.readers.description import check_complete, describe
from shardproof.readers.errors import CheckpointError, UnfamiliarError
from test_compare import write_safetensors


def test_what_both_readers_read_gives_the_same_rows(tmp_path: Path) -> None:
    saved = samples.save_full({"model": {"w": torch.arange(6.0).view(2, 3)}, "epoch": 3}, tmp_path / "c.pt")
    assert listed(saved, []) == (describe(saved), (), ())


def test_the_arguments_of_a_training_script_are_text(tmp_path: Path) -> None:
    torch.save({"args": argparse.Namespace(lr=0.5), "w": torch.ones(3)}, tmp_path / "c.pt")
    with pytest.raises(UnfamiliarError):
        describe(tmp_path / "c.pt")
    rows, foreign, _ = listed(tmp_path / "c.pt", [])
    assert foreign == ("argparse.Namespace",)
    assert {row.key: row.value or row.dtype for row in rows}["args.state.lr"] == "0.5"
    check_complete(tmp_path / "c.pt", rows)


def test_safetensors(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "m.safetensors", {"w": torch.ones(2, 2)})
    ((row,), foreign, _) = listed(tmp_path / "m.safetensors", [])
    assert (row.key, row.dtype, row.shape, row.coverage, foreign) == ("w", "fp32", (2, 2), "ok", ())


def test_files_that_no_format_takes_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"module": {"w": torch.ones(3)}, "optimizer": None}, tmp_path / "mp_rank_00_model_states.pt")
    torch.save({"optimizer": {"lr": 0.5}}, tmp_path / "zero_rank_0_optim_states.pt")
    assert entry(["inspect", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "not read: zero_rank_0_optim_states.pt"
    (tmp_path / "zero_rank_0_optim_states.pt").unlink()
    assert entry(["inspect", str(tmp_path)]) == 0
    assert "not read" not in capsys.readouterr().out


def test_what_lies_beside_a_distributed_checkpoint_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    samples.save_dcp({"w": torch.ones(3)}, tmp_path / "c")
    assert entry(["inspect", str(tmp_path / "c")]) == 0
    assert "not read" not in capsys.readouterr().out
    torch.save({"lr": 0.5}, tmp_path / "c/schedule.pt")
    assert entry(["inspect", str(tmp_path / "c")]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "not read: schedule.pt"


@pytest.mark.parametrize("kind", sorted(foreign_files().keys() - {"safetensors"}))
def test_what_diff_does_not_read_is_refused(tmp_path: Path, kind: str) -> None:
    (tmp_path / "c").write_bytes(foreign_files()[kind])
    with pytest.raises(CheckpointError):
        listed(tmp_path / "c", [])


def test_dtypes_that_no_scenario_writes_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    odd = {"int8": torch.int8, "fp8e4m3": torch.float8_e4m3fn, "complex64": torch.complex64, "uint16": torch.uint16}
    torch.save({name: torch.zeros(2).to(dtype) for name, dtype in odd.items()}, tmp_path / "odd.pt")
    assert entry(["inspect", str(tmp_path / "odd.pt")]) == 0
    assert {line.split()[0]: line.split()[1] for line in capsys.readouterr().out.splitlines()[1:]} == {
        n: n for n in odd
    }


def test_a_tensor_with_a_bit_that_changes_its_values_is_listed(tmp_path: Path) -> None:
    conjugate = torch.tensor([1j, 2j]).conj()
    files = [samples.save_full({"w": tensor}, tmp_path / name) for name, tensor in
             (("lazy", conjugate), ("shown", conjugate.resolve_conj()))]  # fmt: skip
    with pytest.raises(UnfamiliarError, match="conj"):
        describe(files[0])
    assert listed(files[0], []) == listed(files[1], [])


def test_an_empty_file_is_called_empty_by_an_error_of_inspect(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.pt").touch()
    assert entry(["inspect", str(tmp_path / "a.pt")]) == 2
    said = capsys.readouterr().err
    assert "given 'an empty file'" in said
    assert said.endswith("for example: shardproof inspect checkpoints/step-100\n")
