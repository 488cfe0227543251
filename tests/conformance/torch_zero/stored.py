"""Its checkpoints: one file of torch.save with `model`, `optim` and `extra`, which the harness reads for everybody."""

from __future__ import annotations

from harness.readers.stored import TorchStored

STORED = TorchStored()
