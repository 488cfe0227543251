"""The state of a random generator as a record: sixteen bytes of a digest, since a state of torch's has 5,056."""

from __future__ import annotations

import hashlib
import pickle

from shardproof.observe.logical import Value

KEEP = 0.5
"""The share of elements that dropout keeps."""

SEED_OF_A_BUILD = 1000
"""How far the seeds of two builds lie apart, so that a load that restores no generator is seen."""


def state_value(state: bytes) -> Value:
    """A generator's state, uint8, (16,)."""
    digest = hashlib.blake2b(state, digest_size=16).digest()
    return Value("uint8", (len(digest),), digest)


def numpy_value(name: str, keys: bytes, *rest: object) -> Value:
    """The state of numpy's generator, as `numpy.random.get_state` gives it, its array as bytes: pickles of an array
    differ between releases of numpy."""
    return state_value(pickle.dumps((name, keys, *rest)))


def python_value(state: object) -> Value:
    """The state of Python's generator, as `random.getstate` gives it."""
    return state_value(pickle.dumps(state))
