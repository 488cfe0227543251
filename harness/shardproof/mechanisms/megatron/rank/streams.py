"""The random generators of one Megatron-Core rank: seeded by the library, drawn from through its tracker, saved and
restored as the training script does. Rank side.

Dropout of modules that all ranks compute alike draws from the device's default generator, that of others inside
`get_cuda_rng_tracker().fork(...)` of their stream, as the library's layers do. The masks are drawn and not applied:
what a wrong generator does is seen in its state, and gradients stay on the exact grid.

The steps are those of megatron/training/initialize.py, `_set_random_seed`, and of megatron/training/checkpointing.py,
`get_rng_state` and `load_checkpoint`, which are in no wheel; the tracker is the library's own. The device's generator
is emulated.

*Verifies* nothing by itself. *Does not exercise* graph-safe trackers, TransformerEngine's, nor a GPU's generators.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch

from shardproof.mechanisms.megatron.generators import TRACKED
from shardproof.observe.generators import KEEP, SEED_OF_A_BUILD, state_value
from shardproof.observe.record import Record, whole
from shardproof.program import Op
from shardproof.protocol.system import RankContext


class Streams:
    """The generators of one rank."""

    def __init__(self, context: RankContext) -> None:
        self.context = context
        self.names = {stream: name for name, stream in TRACKED.items()}

    def seed(self, init_seed: int) -> None:
        """Seed Python, numpy, torch and Megatron's tensor-parallel generators, as the training script does before it
        builds the model."""
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

        seed = self.context.scenario.seed % 2**31 + SEED_OF_A_BUILD * init_seed
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        model_parallel_cuda_manual_seed(seed)

    def draw(self, stream: str, numel: int) -> None:
        """One dropout of so many elements."""
        with self._drawing_from(stream):
            torch.nn.functional.dropout(torch.ones(numel, device="cuda"), 1 - KEEP)

    def state(self) -> list[dict[str, Any]]:
        """What a checkpoint keeps of this rank's: a list of one, since data-parallel ranks have the same."""
        own = {
            "random_rng_state": random.getstate(),
            "np_rng_state": np.random.get_state(),
            "torch_rng_state": torch.get_rng_state(),
            "cuda_rng_state": torch.cuda.get_rng_state(),
            "rng_tracker_states": _tracker().get_states(),
        }
        return [own]

    def restore(self, saved: list[Mapping[str, Any]]) -> None:
        """Take what `state` gave.

        Raises:
            KeyError: it is incomplete, or has no stream of the tracker.
        """
        own = saved[0]
        random.setstate(own["random_rng_state"])
        np.random.set_state(own["np_rng_state"])
        torch.set_rng_state(own["torch_rng_state"])
        torch.cuda.set_rng_state(own["cuda_rng_state"])
        if not own["rng_tracker_states"]:
            raise KeyError("rng_tracker_states")
        _tracker().set_states(dict(own["rng_tracker_states"]))

    def records(self, op: Op) -> Iterator[Record]:
        """`rng`: the state of each of the device's. Those of the host are recorded on every system."""
        states = {"replicated": torch.cuda.get_rng_state()}
        states |= {TRACKED.get(name, name): state for name, state in _tracker().get_states().items()}
        for stream, state in states.items():
            value = state_value(state.numpy().tobytes())
            yield whole(op.index, self.context.rank, "rng", stream, value.dtype, value.shape, value.data)

    def _drawing_from(self, stream: str) -> AbstractContextManager[None]:
        if stream == "replicated":
            return nullcontext()
        forked: AbstractContextManager[None] = _tracker().fork(self.names[stream])
        return forked


def _tracker() -> Any:
    """The library's CudaRNGStatesTracker of this process."""
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    return get_cuda_rng_tracker()
