"""What a `load_state_dict` with `strict=False` lacks and does not take, as it is kept while a trainer loads."""

from __future__ import annotations

import pytest
from shardproof.trainer.rank.loaded_keys import LoadedKeys
from torch import nn


def test_keys_that_a_load_lacks_and_does_not_take() -> None:
    model, keys = nn.Linear(2, 2), LoadedKeys()
    plain, kept = nn.Module.load_state_dict, {f"module.{name}": value for name, value in model.state_dict().items()}
    with keys.watched():
        for _ in range(2):
            model.load_state_dict(kept, strict=False)
        nn.Linear(2, 2).load_state_dict(model.state_dict())
        with pytest.raises(RuntimeError, match="Missing key"):
            model.load_state_dict(kept)
    assert nn.Module.load_state_dict is plain
    assert keys.taken() == [
        "`load_state_dict` of Linear with `strict=False` is not given 2 keys, such as weight and does not take 2 keys, "
        "such as module.weight"
    ]
    assert keys.taken() == []


def test_keys_that_one_of_several_calls_gives_are_not_lacking() -> None:
    model, keys = nn.Linear(2, 2), LoadedKeys()
    with keys.watched():
        for name, value in model.state_dict().items():
            model.load_state_dict({name: value}, strict=False)
    assert keys.taken() == []
    with keys.watched():
        model.load_state_dict({"bias": model.bias, "other": model.bias}, strict=False)
        model.load_state_dict({}, strict=False)
    assert keys.taken() == [
        "`load_state_dict` of Linear with `strict=False` is not given 1 key, such as weight and does not take 1 key, "
        "such as other"
    ]
