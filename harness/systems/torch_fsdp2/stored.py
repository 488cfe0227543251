"""FSDP2's checkpoints: those of torch, as the harness reads them for everybody."""

from __future__ import annotations

from harness.readers.stored import TorchStored

STORED = TorchStored()
