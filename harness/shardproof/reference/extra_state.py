"""Bytes that modules keep beside their tensors, as TransformerEngine's fp8 layers return from `get_extra_state`.

They model a history of greatest values: four bytes in a fresh module, more after every step until it is full. So what a
checkpoint holds is longer than what a fresh module has, which a loader must be ready for. A module without state has no
bytes at all (stateless recipes). Nobody predicts them: that a save writes and a load restores them is checked by
`shardproof.oracle.extra_state` from what was observed. Every rank has the same.
"""

from __future__ import annotations

from shardproof.models import ModelSpec

Opaque = dict[str, bytes]
"""Name of a module's extra state → its bytes."""

HEADER = b"amax"
LONGEST = 3
"""Steps after which a history is full: each later one takes the place of the oldest."""


def fresh(model: ModelSpec) -> Opaque:
    """The bytes of newly made modules."""
    return {f"{m.path}._extra_state": HEADER if m.opaque == "history" else b"" for m in model.modules if m.opaque}


def after_a_step(opaque: Opaque, iteration: int) -> Opaque:
    """The bytes of `get_extra_state` after one more optimizer step: the step of `iteration` is appended to the
    history."""
    own = bytes([iteration % 251, 1, 2, 3])
    return {name: held and HEADER + (held[len(HEADER) :] + own)[-LONGEST * len(own) :] for name, held in opaque.items()}
