"""Observes what a library may disturb in a rank's process outside training state: random generators and warnings. Rank
side.

No operation of a scenario draws random numbers. A library that draws some all the same, for a dummy initialisation,
say, changes what a user's run draws next, and two ranks that drew differently initialise differently. No operation
deserves a warning either: one that shows up in a sound scenario is a false alarm to everybody who reads it. Both are
recorded after every operation, and compared.

*Verifies*, with `expected_generators`: the states of torch's, numpy's and Python's generators are those of the seed
after every operation, and of the GPU's where ranks have one; nothing but deprecations was warned about.
*Does not verify*: generators of other devices, warnings printed by C++ code, and deprecations, which change with the
release.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from shardproof.observe.generators import numpy_value, python_value, state_value
from shardproof.observe.logical import Key, Logical, Value
from shardproof.observe.record import LIVE, Record, whole
from shardproof.program import Op

_QUIET = (DeprecationWarning, PendingDeprecationWarning, FutureWarning)

NUMPY_SEEDS = 2**32
"""How many seeds numpy's generator takes; a scenario's has 64 bits."""


class Ambient:
    """Seeds the process and listens to it. One a rank, created before the system.

    Args:
        device: `cuda` where the rank has a GPU, whose generator is a part of its state. note: where the rank runs, for
            the result; empty on the CPU.
    """

    def __init__(self, seed: int, device: str = "cpu", note: str = "") -> None:
        self._device, self._note = device, note
        self._heard: list[str] = []
        warnings.resetwarnings()
        for category in _QUIET:
            warnings.simplefilter("ignore", category)
        warnings.showwarning = self._hear  # type: ignore[assignment]
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % NUMPY_SEEDS)

    def records(self, op: Op, rank: int) -> Iterator[Record]:
        """The generators now, and the warnings since the last call."""
        states = (torch.get_rng_state(), np.random.get_state(), random.getstate())
        gpu = torch.cuda.get_rng_state() if self._device == "cuda" else None
        for name, value in _values(*states, gpu).items():
            yield whole(op.index, rank, "rng", name, value.dtype, value.shape, value.data)
        if self._note:
            data = self._note.encode()
            yield whole(op.index, rank, "device", "note", "utf8", (len(data),), data)
        for number, text in enumerate(self._heard):
            data = text.encode()
            yield whole(op.index, rank, "warning", str(number), "utf8", (len(data),), data)
        self._heard = []

    def _hear(self, message: Warning | str, category: type[Warning], filename: str, *_: object) -> None:
        self._heard.append(f"{category.__name__}: {message} ({'/'.join(filename.split('/')[-3:])})")


def expected_generators(seed: int, ops: list[Op], device: str = "cpu") -> Logical:
    """What `Ambient` must record after each of `ops`, on every rank of its mesh. Needs a GPU where `device` is cuda."""
    own = (
        torch.Generator().manual_seed(seed).get_state(),
        np.random.RandomState(seed % NUMPY_SEEDS).get_state(),
        random.Random(seed).getstate(),
    )
    gpu = seeded_gpu_state(seed) if device == "cuda" else None
    values = _values(*own, gpu)
    return {
        Key(op.index, LIVE, "rng", f"rank{rank}.{name}"): value
        for op in ops
        for rank in range(op.mesh.world)
        for name, value in values.items()
    }


def seeded_gpu_state(seed: int) -> torch.Tensor:
    """The state of a GPU's generator that was seeded and has drawn nothing."""
    return torch.Generator("cuda").manual_seed(seed).get_state()


def _values(
    torch_state: torch.Tensor, numpy_state: Any, python_state: object, gpu_state: torch.Tensor | None = None
) -> dict[str, Value]:
    """The state of each generator."""
    name, keys, *rest = numpy_state
    return {
        "torch": state_value(torch_state.numpy().tobytes()),
        "numpy": numpy_value(name, keys.tobytes(), *rest),
        "python": python_value(python_state),
        **({} if gpu_state is None else {"cuda": state_value(gpu_state.numpy().tobytes())}),
    }
