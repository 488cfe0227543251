"""The states of random generators, out of the pieces of a file of torch.save."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from shardproof.observe.generators import numpy_value, python_value, state_value
from shardproof.readers import generators
from shardproof.readers.pieces import TensorPiece, pieces

PARTS: Any = (("name",), ("keys",), ("position",), ("has_gauss",), ("gauss",))


@pytest.fixture
def held(tmp_path: Path) -> generators.Held:
    """A file that holds Python's, numpy's in one tuple and in parts, and torch's."""
    name, keys, position, has_gauss, gauss = np.random.get_state()
    saved = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "name": name,
        "keys": torch.from_numpy(np.array(keys)),
        "position": position,
        "has_gauss": has_gauss,
        "gauss": gauss,
    }
    torch.save(saved, tmp_path / "rng.pt")
    return {piece.path: piece for piece in pieces(tmp_path / "rng.pt")}


def numpys() -> Any:
    name, keys, *rest = np.random.get_state()
    return numpy_value(name, keys.tobytes(), *rest)


def test_what_libraries_save_is_what_the_process_has(held: generators.Held) -> None:
    assert generators.python_state(held, ("python",)) == python_value(random.getstate())
    assert generators.numpy_state(held, ("numpy",)) == numpys()
    assert generators.numpy_state_in_parts(held, PARTS) == numpys()
    assert generators.tensor_state(held, ("torch",)) == state_value(torch.get_rng_state().numpy().tobytes())
    assert not held


def test_what_is_no_state_stays(held: generators.Held) -> None:
    keys = held["keys",]
    assert isinstance(keys, TensorPiece)
    held["keys",] = replace(keys, dtype="int32")
    before = dict(held)
    assert generators.numpy_state_in_parts(held, PARTS) is None
    assert generators.python_state(held, ("numpy",)) is None
    assert generators.numpy_state(held, ("python",)) is None
    assert generators.tensor_state(held, ("keys",)) is None
    assert generators.tensor_state(held, ("none",)) is None
    assert held == before
