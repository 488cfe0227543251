"""Bridge's checkpoint of the weights, as a stack: saves go to one folder, and a finetuning run starts from it.

Every save writes a folder `iter_NNNNNNN` and then Bridge's own trackers, which say which is the newest; a load reads
what they name. Of what a rank holds such a checkpoint brings back the model: masters are made anew of it.

*Verifies* nothing by itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from shardproof.program import Op
from shardproof.protocol.system import RankContext, RankSystem
from shardproof.resilience.rank.systems import OfSystem


class _OneFolder(RankContext):
    """All checkpoints are saved to the folder itself."""

    def checkpoint_path(self, op: Op) -> Path:
        return self.directory


class Weights(OfSystem):
    """Saves and loads by the rank of `megatron-bridge`. Arguments: those of `OfSystem`."""

    def save(self, folder: Path, state: Any, generation: int, run: int) -> None:
        state.context = _in(folder, state.context)
        state.save(self._op("save", generation))

    def load(self, folder: Path) -> Any:
        rank = self._rank(1)
        rank.build(replace(self._op("build"), init_seed=9))
        rank.context = _in(folder, rank.context)
        rank.load_model_only(self._op("load"))
        return rank

    def digests(self, state: RankSystem) -> Mapping[str, str]:
        of_model = ("param ", "buffer ")
        return {name: digest for name, digest in super().digests(state).items() if name.startswith(of_model)}


def _in(folder: Path, context: RankContext) -> RankContext:
    own = {field.name: getattr(context, field.name) for field in fields(context)}
    return _OneFolder(**own | {"directory": folder})
