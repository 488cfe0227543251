"""How a failure of FSDP2 becomes a script: `shardproof.mechanisms.fsdp2.export`."""

from __future__ import annotations

from shardproof.mechanisms.fsdp2.export import draft_script

__all__ = ["draft_script"]
