"""The scripts of `docs/finding-scripts`, which show a finding without shardproof, as `git bisect run` uses them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "docs/finding-scripts"
SKIP = 125
"""The status for which `git bisect run` skips a commit: what happened there is not the question."""

TORCH_ALONE = (
    "ddp_zero-143580", "expert_mesh-divided-twice", "fsdp1-102667", "fsdp1-empty-shard", "fsdp1-hybrid-moments",
    "fsdp1-local-hybrid", "torch-fsdp2-190626", "torch-fsdp2-full-dict-twice", "torch-fsdp2-hub-scalars",
    "torch-fsdp2-tensor-lr",
)  # fmt: skip


@pytest.mark.parametrize("script", sorted(FOLDER.glob("*.py")), ids=lambda script: script.stem)
def test_a_script_whose_library_is_missing_is_no_sign_of_the_bug(script: Path, tmp_path: Path) -> None:
    for name in ("torch", "megatron", "nemo_automodel", "deepspeed", "accelerate", "lightning", "transformers"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('not installed here')\n", "utf-8")
    ran = subprocess.run(
        [sys.executable, str(script), "save", str(tmp_path)], env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert ran.returncode == SKIP, ran.stderr
    assert len(script.read_text("utf-8").splitlines()) <= 80


@pytest.mark.nightly
@pytest.mark.real
@pytest.mark.parametrize("name", TORCH_ALONE)
def test_a_script_of_torch_alone_shows_its_finding_on_the_pinned_release(name: str, tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, str(FOLDER / f"{name}.py")], cwd=tmp_path, env=os.environ | {"PYTHONPATH": ""},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert ran.returncode == 1, ran.stdout + ran.stderr
