"""The models that only systems over Megatron-Core build for real."""

from __future__ import annotations

from harness.mechanisms.megatron.zoo import MODELS

__all__ = ["MODELS"]
