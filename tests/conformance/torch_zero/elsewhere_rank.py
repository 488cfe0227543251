"""Ranks whose checkpoint is one file of torch.save, under another name or with another key."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from shardproof.program import Op
from shardproof.readers.pieces import FULL_FILE

from tests.conformance.torch_zero.rank import Rank


class Renaming(Rank):
    """file: the checkpoint's name in its folder. key: of the section of the model."""

    file, key = FULL_FILE, "model"

    def save(self, op: Op) -> None:
        super().save(op)
        if self.context.rank == 0:
            content = super()._read(op)
            content[self.key] = content.pop("model")
            (path := self.context.checkpoint_path(op) / FULL_FILE).unlink()
            torch.save(content, path.with_name(self.file))
        dist.barrier()

    def _read(self, op: Op) -> dict[str, Any]:
        content: dict[str, Any] = torch.load(self.context.checkpoint_path(op) / self.file, weights_only=True)
        content["model"] = content.pop(self.key)
        return content


class OtherFile(Renaming):
    file = "last.pt"


class OtherKey(Renaming):
    key = "state_dict"
