"""The models that Megatron-Core builds for real, with its layers' names: `shardproof.mechanisms.megatron.zoo`."""

from __future__ import annotations

from shardproof.mechanisms.megatron.zoo import MODELS

__all__ = ["MODELS"]
