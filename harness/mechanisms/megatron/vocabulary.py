"""Names in the pickles of Megatron-Core's checkpoints."""

from __future__ import annotations

from harness.readers.symbolic import Name
from harness.readers.vocabulary import Vocabulary

VOCABULARY = Vocabulary(
    # The hybrid optimizer of CPU offload stores the classes of its parts in its param groups.
    words=frozenset(
        {
            Name("torch.optim.adamw", "AdamW"),
            Name("torch.optim.adam", "Adam"),
            Name("apex.optimizers.fused_adam", "FusedAdam"),
            Name("transformer_engine.pytorch.optimizers.fused_adam", "FusedAdam"),
            Name("harness.emulation.fused", "FusedAdam"),
        }
    ),
    # Release 0.15 writes its own class in the place of DCP's, with a field more.
    metadata=frozenset({Name("megatron.core.dist_checkpointing.strategies.torch", "MCoreMetadata")}),
)
