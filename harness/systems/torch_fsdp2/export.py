"""How a failure of FSDP2 becomes a script: `harness.mechanisms.fsdp2.export`."""

from __future__ import annotations

from harness.mechanisms.fsdp2.export import draft

__all__ = ["draft"]
