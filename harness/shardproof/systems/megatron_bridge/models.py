"""The models of Megatron-Core that Megatron-Bridge's system builds: all but those with stacked weights."""

from __future__ import annotations

from shardproof.mechanisms.megatron import zoo

MODELS = tuple(model for model in zoo.MODELS if not any(named.spec.stacked for named in model.params))
