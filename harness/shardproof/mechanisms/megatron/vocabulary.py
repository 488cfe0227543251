"""Names that only the pickles of Megatron-Core's checkpoints have, for `shardproof.readers.vocabulary`."""

from __future__ import annotations

from shardproof.readers.symbolic import Name
from shardproof.readers.vocabulary import Vocabulary

VOCABULARY = Vocabulary(
    # The hybrid optimizer of CPU offload stores the classes of its parts in its param groups.
    words=frozenset(
        {
            Name("torch.optim.adamw", "AdamW"),
            Name("torch.optim.adam", "Adam"),
            Name("apex.optimizers.fused_adam", "FusedAdam"),
            Name("transformer_engine.pytorch.optimizers.fused_adam", "FusedAdam"),
            Name("shardproof.emulation.fused", "FusedAdam"),
        }
    ),
    # Release 0.15 writes a class of its own in place of DCP's, which has one field more.
    metadata=frozenset({Name("megatron.core.dist_checkpointing.strategies.torch", "MCoreMetadata")}),
)
