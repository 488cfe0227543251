"""Which of TransformerEngine's layers lies where in each model of `models`, and how it is constructed. Values only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Layer:
    """kind: class name in `transformer_engine.pytorch`. sizes: its positional arguments. parallel: how it is sharded
    over tensor-parallel ranks, as its constructor is told; empty where it is not told. options: further arguments."""

    kind: str
    sizes: tuple[int, ...]
    parallel: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)


NO_BIAS = {"bias": False}
COLUMN, ROW, BOTH = {"parallel_mode": "column"}, {"parallel_mode": "row"}, {"set_parallel_mode": True}
NORMS = ("LayerNorm", "RMSNorm")
ATTENTION = "DotProductAttention"

LAYERS: Mapping[str, Mapping[str, Layer]] = {
    "te_layers": {
        "norm": Layer("LayerNorm", (6,)),
        "qkv": Layer("LayerNormLinear", (6, 12), COLUMN),
        "proj": Layer("Linear", (4, 6), ROW),
        "rms": Layer("RMSNorm", (6,)),
        "mlp": Layer("LayerNormMLP", (6, 10), BOTH),
    },
    "te_no_bias": {
        "qkv": Layer("LayerNormLinear", (6, 12), COLUMN, NO_BIAS),
        "proj": Layer("Linear", (4, 6), ROW, NO_BIAS),
        "mlp": Layer("LayerNormMLP", (6, 10), BOTH, NO_BIAS),
    },
    "te_attention": {
        "qkv": Layer("LayerNormLinear", (4, 12), COLUMN),
        "attention": Layer(ATTENTION, (2, 2), {}, {"softmax_type": "learnable"}),
        "proj": Layer("Linear", (4, 4), ROW),
    },
    "te_grouped": {
        "router": Layer("Linear", (5, 3), {}, NO_BIAS),
        "experts": Layer("GroupedLinear", (3, 5, 8), COLUMN, NO_BIAS),
    },
    "te_transformer": {"layers.0": Layer("TransformerLayer", (8, 16, 2), BOTH)},
}
"""Model → module path → the layer that is there."""
