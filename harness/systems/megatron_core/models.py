"""The models that Megatron-Core builds for real, with its layers' names: `harness.mechanisms.megatron.zoo`."""

from __future__ import annotations

from harness.mechanisms.megatron.zoo import MODELS

__all__ = ["MODELS"]
