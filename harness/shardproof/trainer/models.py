"""Further models of `Trainer.probe`, for optimizers of any class. A few of their tensors are as large as what some
optimizers ask for before they do what they are there for: those that keep their state in 8 bits do so from 4096
elements on."""

from __future__ import annotations

from shardproof.models import ModelSpec, ModuleSpec, ParamSpec

LAYERS, MATRICES, FEW_ROWS = "optimizer_layers", "optimizer_matrices", "optimizer_few_rows"

_LARGE = ModuleSpec("large", (ParamSpec("weight", (128, 64)),))
_UP = ModuleSpec("up", (ParamSpec("weight", (16, 7)),))

MODELS = (
    ModelSpec(
        LAYERS,
        "Matrices and vectors, of which one matrix has 4096 elements on each of two ranks, and rows that divide evenly "
        "and unevenly.",
        (
            _LARGE,
            _UP,
            ModuleSpec("down", (ParamSpec("weight", (7, 16)), ParamSpec("bias", (7,)))),
            ModuleSpec("norm", (ParamSpec("weight", (13,)),)),
        ),
        listed=False,
    ),
    ModelSpec(
        MATRICES,
        "Matrices alone, for optimizers that take no vectors.",
        (
            _LARGE,
            _UP,
            ModuleSpec("down", (ParamSpec("weight", (7, 16)),)),
            ModuleSpec("flat", (ParamSpec("weight", (13, 13)),)),
        ),
        listed=False,
    ),
    ModelSpec(
        FEW_ROWS,
        "A matrix of one row, of which all ranks but the first hold nothing, in a unit of its own.",
        (_UP, ModuleSpec("one", (ParamSpec("weight", (1, 6)),))),
        listed=False,
    ),
)
