"""NeMo Megatron-Bridge on one rank: Megatron-Core's training, with Bridge's own checkpoint of the weights around it.

Building, stepping and observing are those of `MegatronLoop`. Bridge is imported once, by `warm_up` in the server: its
package imports every model that it can convert, and these need the names of TransformerEngine's layers.

*Verifies* nothing by itself. *Does not exercise* Bridge's model providers, its training loop, nor a resumed run.
"""

from __future__ import annotations

import importlib
from functools import cache

from shardproof.emulation import cuda, te_names
from shardproof.emulation.used_symbols import touch
from shardproof.mechanisms.megatron.rank import loop
from shardproof.mechanisms.megatron.rank.loop import MegatronLoop, emulated
from shardproof.mechanisms.megatron.rank.streams import Streams
from shardproof.models import draws
from shardproof.program import Op
from shardproof.protocol.system import RankContext

CORE_ASKS_FOR_TE = (
    "megatron.core.dist_checkpointing",
    "megatron.core.extensions.transformer_engine",
    "megatron.core.models.gpt",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.models.gpt.gpt_model",
    "megatron.core.optimizer",
    "megatron.core.transformer.attention",
)
"""Modules of Megatron-Core that Bridge imports and that look for TransformerEngine: imported before there are names."""


@cache
def library() -> None:
    """Import Bridge, once a process; Megatron-Core comes first, with what the variant wants it to find beside it."""
    loop.library()
    with cuda.emulated():
        for name in CORE_ASKS_FOR_TE:
            importlib.import_module(name)
        with te_names.importable(loop.TE_VERSION):
            from shardproof.systems.megatron_bridge.rank import checkpoint  # noqa: F401


class Rank(MegatronLoop):
    """The `RankSystem` of `megatron-bridge`."""

    def __init__(self, context: RankContext) -> None:
        library()
        super().__init__(context)
        touch(te_names.SYMBOL)

    def streams(self) -> Streams | None:
        return Streams(self.context) if draws(self.scenario.model) else None

    @emulated
    def save(self, op: Op) -> None:
        from shardproof.systems.megatron_bridge.rank import checkpoint

        with self.gathered():
            checkpoint.save(self.state, self.context.checkpoint_path(op))

    @emulated
    def load_model_only(self, op: Op) -> None:
        from shardproof.systems.megatron_bridge.rank import checkpoint

        with self.gathered():
            checkpoint.load_pretrained(self.state, self.context.checkpoint_path(op))

    def load(self, op: Op) -> None:
        raise NotImplementedError("a limit: resuming is megatron-core's")

    def reload_params(self, op: Op) -> None:
        """Do nothing: Bridge's load has refreshed the masters itself."""


def warm_up() -> None:
    """Import Bridge and run small scenarios of Megatron-Core in this process, for the ranks forked from it."""
    library()
    loop.warm_up("megatron-bridge", Rank)
