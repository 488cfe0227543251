"""Calls of foreign code, such as `state_dict`, that must leave everything as it was.

Some objects change when they are asked for their state: a data loader may begin an epoch so as to have a position to
tell, and draws a seed for it. So what a call may change is noted before and put back after it: the random states of
Python, numpy and torch, and the object's own attributes. That it had to be put back is told, since what else such a
call changes is not known.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from shardproof.trainer.rank.pieces import Unreadable


def asked(target: object, call: Callable[[], Any]) -> tuple[Any, str]:
    """What a call returns, and what it changed and was put back, in words; empty if nothing.

    Raises:
        Unreadable: it raised.
    """
    before, attributes = _generators(), dict(getattr(target, "__dict__", {}))
    try:
        value = call()
    except Exception as error:
        _restored(target, before, attributes)
        first = (str(error).splitlines() or [""])[0]
        raise Unreadable(f"it raises {type(error).__name__}: {first}") from error
    return value, _restored(target, before, attributes)


def _restored(target: object, before: tuple[Any, Any, torch.Tensor], attributes: dict[str, Any]) -> str:
    changed = []
    python, numpy, own = _generators()
    if python != before[0] or not _equal(numpy, before[1]) or not torch.equal(own, before[2]):
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])
        changed.append("draws random numbers")
    now = getattr(target, "__dict__", {})
    names = [name for name in {*now, *attributes} if now.get(name, now) is not attributes.get(name, now)]
    if names:
        for name in names:
            if name in attributes:
                now[name] = attributes[name]
            else:
                del now[name]
        changed.append(f"sets {', '.join(sorted(names))}")
    return " and ".join(changed)


def _generators() -> tuple[Any, Any, torch.Tensor]:
    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def _equal(one: Any, other: Any) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))
