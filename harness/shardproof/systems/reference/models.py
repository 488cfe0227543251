"""The models that only the reference has."""

from __future__ import annotations

from shardproof.models import ModelSpec, ModuleSpec, ParamSpec

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
    ModelSpec(
        "dropout",
        "Dropout that draws from a stream of all ranks, of each tensor-parallel rank, each expert, each replica.",
        (
            ModuleSpec("embed", (ParamSpec("weight", (6, 4)),), draws="replicated"),
            ModuleSpec("attention", (ParamSpec("weight", (4, 3), tp_dim=0),), draws="tensor"),
            ModuleSpec("experts", (ParamSpec("fc1", (4, 3, 2), ep_dim=0),), draws="expert"),
            ModuleSpec("loader", (ParamSpec("weight", (5,)),), draws="data"),
        ),
        bugs=("MLM-6858", "MBR-4893", "HF-23045"),
    ),
    ModelSpec(
        "quantised",
        "Matrices that are kept in fp8 beside their masters, by current and by delayed scaling.",
        (
            ModuleSpec("up", (ParamSpec("weight", (6, 4), tp_dim=0),), quantised="current"),
            ModuleSpec("down", (ParamSpec("weight", (4, 6), tp_dim=1), ParamSpec("bias", (4,))), quantised="delayed"),
            ModuleSpec("norm", (ParamSpec("weight", (5,)),)),
        ),
        bugs=("MLM-6666", "TE-2713g", "TE-2974", "MLM-3845"),
    ),
)
