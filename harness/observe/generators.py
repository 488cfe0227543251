"""The state of a random generator as a record: sixteen bytes of a digest, since a state of torch's has 5,056."""

from __future__ import annotations

import hashlib

from harness.observe.logical import Value

KEEP = 0.5
"""The share of elements that dropout keeps."""


def state_value(state: bytes) -> Value:
    """A generator's state, uint8, (16,)."""
    digest = hashlib.blake2b(state, digest_size=16).digest()
    return Value("uint8", (len(digest),), digest)
