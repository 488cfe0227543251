"""Models of the zoo that only the DeepSpeed system runs, such as a model whose forward leaves parameters out, as an
expert router does."""

from __future__ import annotations

from shardproof.models import ModelSpec, ModuleSpec, ParamSpec

MODELS = (
    ModelSpec(
        "resting",
        "Parameters that some forwards leave out, as a router leaves out experts: one in every other iteration, one in "
        "each iteration's first microbatch.",
        (
            ModuleSpec("first", (ParamSpec("weight", (5, 3)),)),
            ModuleSpec("odd", (ParamSpec("weight", (4, 3), idle="odd"),)),
            ModuleSpec("late", (ParamSpec("weight", (3, 3), idle="first"),)),
            ModuleSpec("last", (ParamSpec("weight", (7, 2)),)),
        ),
    ),
)
