"""Megatron-Core's checkpoint folders, for `shardproof diff`.

There are three kinds. `iter_0000100/` of `dist_checkpointing` (`torch_dist`, also `fsdp_dtensor`) is torch's
distributed checkpoint with `common.pt` beside it, whose values get the name `common` in front. The older form has a
folder `mp_rank_TP_PP` for every model-parallel rank, with files of torch.save. The folder above them all says in
`latest_checkpointed_iteration.txt` which one is the latest; that one is taken.

*Verifies*: what `shardproof.compare` does with the files. *Does not verify*: that ranks of the older form fit together.
No file says how a parameter was cut there, so each rank's tensors are compared with those of the same rank. Nor what
the flat buckets of `dp_reshardable` hold between parameters: that is memory which nobody wrote, and it differs.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

from shardproof.compare.archives import add_archive
from shardproof.compare.contents import Contents
from shardproof.compare.distributed import add_distributed
from shardproof.readers.errors import bad

LATEST, COMMON, FACTS = "latest_checkpointed_iteration.txt", "common.pt", "metadata.json"
FORM = "torch_dist, which Megatron-LM writes with --ckpt-format torch_dist"

_RANK = re.compile(r"mp_rank_\d{2}(?:_\d{3}){0,2}")
_FILE = re.compile(r"[\w.-]+\.pt")
_SMALL = 1 << 16


class MegatronFolder:
    """Any of the three kinds."""

    def recognises(self, folder: Path) -> bool:
        """Whether the file names in a folder are those of a Megatron checkpoint, such as
        `latest_checkpointed_iteration.txt` or `common.pt`."""
        if any(os.path.lexists(folder / name) for name in (LATEST, COMMON)) or "sharded_backend" in _facts(folder):
            return True
        return any(_RANK.fullmatch(name) for name in os.listdir(folder))

    def add(self, contents: Contents, folder: Path) -> str:
        """Take everything in it up.

        Raises:
            CheckpointError: it is damaged, or of the form `zarr`.
        """
        if os.path.lexists(folder / LATEST):
            folder = self.latest(contents, folder)
        if _facts(folder).get("sharded_backend") == "zarr":
            raise bad(f"{folder}: format", "zarr", "torch_dist, fsdp_dtensor or mp_rank_* folders", FORM)
        ranks = sorted(name for name in os.listdir(folder) if _RANK.fullmatch(name))
        if ranks:
            for rank in ranks:
                self.add_rank(contents, folder / rank)
            return f"files of Megatron's {len(ranks)} model-parallel rank{'s' * (len(ranks) > 1)}"
        add_distributed(contents, folder)
        if os.path.lexists(folder / COMMON):
            add_archive(contents, folder / COMMON, ("common",))
        return "Megatron's distributed checkpoint"

    def latest(self, contents: Contents, folder: Path) -> Path:
        """The folder that a folder of checkpoints names as its latest.

        Raises:
            CheckpointError: it names none of its own.
        """
        file = folder / LATEST
        text = contents.files.read(file, 0, min(_SMALL, contents.files.size(file))).decode(errors="replace").strip()
        name = "release" if text == "release" else f"iter_{int(text):07d}" if re.fullmatch(r"\d{1,9}", text) else ""
        if not name or (folder / name).is_symlink() or not (folder / name).is_dir():
            raise bad(f"{file}: iteration", text[:40], "a number with a folder iter_*, or release", FORM)
        return folder / name

    def add_rank(self, contents: Contents, folder: Path) -> None:
        """Take up the files of one model-parallel rank.

        Raises:
            CheckpointError: it has none, or one is damaged.
        """
        names = sorted(name for name in os.listdir(folder) if _FILE.fullmatch(name))
        if folder.is_symlink() or not names:
            raise bad(f"{folder}: files", "none", "model_optim_rng.pt", FORM)
        for name in names:
            add_archive(contents, folder / name, (folder.name, name.removesuffix(".pt")))


def _facts(folder: Path) -> dict[str, object]:
    """The content of `metadata.json`, which names the sharded backend. Without the file, zarr arrays in the folder name
    the backend. Empty if neither is readable."""
    file = folder / FACTS
    try:
        if file.is_symlink() or not file.is_file() or file.stat().st_size > _SMALL:
            return {"sharded_backend": "zarr"} if _has_zarr(folder) else {}
        found = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _has_zarr(folder: Path) -> bool:
    """Whether a folder has an array of zarr in it."""
    return any(os.path.lexists(folder / name / ".zarray") for name in os.listdir(folder))
