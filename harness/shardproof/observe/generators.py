"""The state of a random generator as a record: sixteen bytes of a digest, since a state of torch's has 5,056.

Of torch's own generators a trainer records the seed and the place in the stream too, which tell what happened to it.
"""

from __future__ import annotations

import hashlib
import pickle
import struct

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


MERSENNE_BYTES, PHILOX_BYTES = 5056, 16
"""Sizes of a state of torch's generator on the CPU, and on a GPU."""

BLOCK = 624
"""Numbers of 32 bits that the Mersenne Twister makes at a time."""

_KEYS = struct.Struct(f"<{BLOCK}Q")


def torch_value(state: bytes) -> Value:
    """A state of torch's generator, int64, (4,): its seed, its place, and digests of its block of numbers and of all.

    Args:
        state: as `torch.Generator.get_state` gives it. One of another size gives what `state_value` gives.

    On the CPU (`CPUGeneratorImplStateLegacy` in `aten/src/ATen/CPUGeneratorImpl.cpp`) the place is how many numbers of
    the block are used up: all of them before the first one is made. On a GPU it is Philox's offset, without a block.
    """
    whole = _short(state)
    if len(state) == MERSENNE_BYTES:
        seed, left, _, _ = struct.unpack_from("<QiiQ", state)
        keys = _KEYS.unpack_from(state, 24)
        parts = (_signed(seed), BLOCK + 1 - left, block_digest(struct.pack(f"<{BLOCK}I", *keys)), whole)
    elif len(state) == PHILOX_BYTES:
        seed, offset = struct.unpack("<QQ", state)
        parts = (_signed(seed), _signed(offset), 0, whole)
    else:
        return state_value(state)
    return Value("int64", (len(parts),), struct.pack("<4q", *parts))


def block_digest(keys: bytes) -> int:
    """What a block of the Mersenne Twister is recognised by. keys: its numbers as little-endian uint32."""
    return _short(keys)


def _short(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little", signed=True)


def _signed(number: int) -> int:
    return number - (1 << 64) if number >= 1 << 63 else number
