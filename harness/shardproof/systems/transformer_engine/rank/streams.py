"""The random generators of a training script over TransformerEngine: the device's default one, and the streams of the
library's `CudaRNGStatesTracker`, seeded, forked, saved and restored by the script through `add`, `fork`, `get_states`
and `set_states`, as the library has no checkpoints of its own. Rank side.

Dropout of modules that all ranks compute alike draws from the default generator, that of others inside `fork` of their
stream, as the library's own dropout does. The device and its generator are emulated.

*Verifies* nothing by itself. *Does not exercise* graph-safe states, which are there on a build of torch for CUDA only:
on this one the tracker keeps tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from shardproof.observe.generators import KEEP
from shardproof.observe.record import Record
from shardproof.program import Op
from shardproof.protocol.system import RankContext
from shardproof.systems.transformer_engine.rank import model as layers
from shardproof.torch_loop.streams import Streams


class _Default:
    """The device's default generator."""

    def manual_seed(self, seed: int) -> None:
        torch.cuda.manual_seed(seed)

    def get_state(self) -> torch.Tensor:
        return torch.cuda.get_rng_state()

    def set_state(self, state: torch.Tensor) -> None:
        torch.cuda.set_rng_state(state)


@dataclass(frozen=True)
class _Tracked:
    """A stream of the library's tracker, with what a generator has."""

    tracker: Any
    name: str

    def manual_seed(self, seed: int) -> None:
        self.tracker.add(self.name, seed)

    def get_state(self) -> torch.Tensor:
        state: torch.Tensor = self.tracker.get_states()[self.name]
        return state.clone()  # what a load writes into must not be the live state

    def set_state(self, state: torch.Tensor) -> None:
        self.tracker.set_states({**self.tracker.get_states(), self.name: state})


class TrackedStreams(Streams):
    """The generators of one rank, by stream; none where no module of the model draws."""

    def __init__(self, context: RankContext) -> None:
        from transformer_engine.pytorch.distributed import (  # type: ignore[import-not-found]
            CudaRNGStatesTracker,
        )

        super().__init__(context)
        self.tracker = CudaRNGStatesTracker()
        self.generators = {s: _Default() if s == "replicated" else _Tracked(self.tracker, s) for s in self.generators}

    def seed(self, init_seed: int) -> None:
        with self._device():
            super().seed(init_seed)

    def draw(self, stream: str, numel: int) -> None:
        with self._device(), nullcontext() if stream == "replicated" else self.tracker.fork(stream):
            torch.nn.functional.dropout(torch.ones(numel, device="cuda"), 1 - KEEP)

    def state(self) -> dict[str, torch.Tensor]:
        with self._device():
            return super().state()

    def restore(self, states: Mapping[str, Any]) -> None:
        with self._device():
            super().restore(states)

    def records(self, op: Op) -> Iterator[Record]:
        with self._device():
            found = list(super().records(op))
        yield from found

    def _device(self) -> AbstractContextManager[None]:
        return layers.device(self.context.scenario)
