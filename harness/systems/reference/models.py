"""The models that only the reference has."""

from __future__ import annotations

from harness.models import ModelSpec, ModuleSpec, ParamSpec

MODELS = (
    ModelSpec(
        "opaque",
        "Modules with bytes of their own in checkpoints: one's grow with the first step, another's are empty.",
        (
            ModuleSpec("scaled", (ParamSpec("weight", (6, 3), tp_dim=0),), opaque="history"),
            ModuleSpec("stateless", (ParamSpec("weight", (5, 2)),), opaque="empty"),
            ModuleSpec("plain", (ParamSpec("weight", (4, 3)),)),
        ),
        bugs=("TE-2713d", "TE-1860", "MLM-6509"),
    ),
)
