"""The models that Bridge trains for real, through Megatron-Core: `harness.mechanisms.megatron.zoo`."""

from __future__ import annotations

from harness.mechanisms.megatron.zoo import MODELS

__all__ = ["MODELS"]
