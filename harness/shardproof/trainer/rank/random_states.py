"""The states of random generators: those that hang on a trainer, and those that every process has."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from shardproof.observe.generators import numpy_value, python_value, state_value, torch_value
from shardproof.observe.logical import Value
from shardproof.trainer.rank.leaves import leaves


def of(generator: Any) -> Value:
    """The state of a generator of torch, Python or numpy."""
    match generator:
        case torch.Generator():
            return torch_value(generator.get_state().numpy().tobytes())
        case random.Random():
            return python_value(generator.getstate())
        case np.random.RandomState():
            return _numpy(generator.get_state())
        case _:
            return state_value(_packed(generator.bit_generator.state))


def of_process(*, cuda: bool) -> Iterator[tuple[str, Value]]:
    """Name and state of the generators of Python, numpy and torch that this process has; cuda: of its GPU too."""
    yield "python", python_value(random.getstate())
    yield "numpy", _numpy(np.random.get_state())
    yield "torch", torch_value(torch.get_rng_state().numpy().tobytes())
    if cuda:
        yield "cuda", torch_value(torch.cuda.get_rng_state().numpy().tobytes())


def _numpy(state: Any) -> Value:
    name, keys, *rest = state
    return numpy_value(name, keys.tobytes(), *rest)


def _packed(state: object) -> bytes:
    """A nested state of one of numpy's bit generators as bytes, its arrays among them."""
    parts = ((name, leaf.tobytes() if isinstance(leaf, np.ndarray) else leaf) for name, leaf in leaves(state, ""))
    return repr(list(parts)).encode()
