"""The model that only this system has."""

from __future__ import annotations

from shardproof.models import GroupSpec, ModelSpec, ModuleSpec, ParamSpec

_SIZES = ((2, 1), (9, 5), (3, 2), (7, 7), (1, 1), (5, 3))

MODELS = (
    ModelSpec(
        "ladder",
        "Parameters of very different size in two groups: owners are chosen by size, so that no rank owns neighbours.",
        tuple(
            ModuleSpec(f"rung{index}", (ParamSpec("weight", shape, group=index % 2),))
            for index, shape in enumerate(_SIZES)
        ),
        groups=(GroupSpec(), GroupSpec(lr_scale=0.5, weight_decay=0.0)),
    ),
)
