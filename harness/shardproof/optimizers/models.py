"""The models that optimizers are tried on: those that a trainer may ask for too."""

from shardproof.trainer.models import FEW_ROWS, LAYERS, MATRICES, MODELS

__all__ = ["FEW_ROWS", "LAYERS", "MATRICES", "MODELS"]
