"""What happened to a generator of torch whose state is not what it should be: another seed, or numbers drawn too often.

A generator that a load leaves as a new process has it has another seed or place than the one that was saved. One that
is restored and then drawn from, such as by a warm-up between the load and the first step, has the right seed, and is
further on in its stream.

*Verifies*: that the place lies on the stream of the seed, in its first LOOKED_AT blocks. *Does not verify*: which call
drew the numbers.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from functools import cache

import numpy as np

from shardproof.diff import Difference
from shardproof.observe.generators import BLOCK, block_digest
from shardproof.observe.logical import Value
from shardproof.trainer.values.every_mesh import OF_A_RANK, Name, without_rank

LOOKED_AT = 400
"""Blocks of a stream that are made to find a place in it: a quarter of a million numbers."""


def of_streams(
    found: Sequence[Difference], expected: Mapping[Name, Value], observed: Mapping[Name, Value], begun: int = -1
) -> str:
    """A sentence about the first of torch's generators among the differences; empty where nothing is recognised.

    Args:
        begun: the seed that the observed session was begun with, as its `cell.seed`.
    """
    names = [(one.key.role, one.key.fqn) for one in found if one.key.role in OF_A_RANK]
    both = (name for name in names if name in expected and name in observed)
    told = (
        (name, _of_another(name, expected, observed) or _of(expected[name], observed[name], begun)) for name in both
    )
    return next((f"The generator {name[1]} {what}" for name, what in told if what), "")


def _of_another(name: Name, expected: Mapping[Name, Value], observed: Mapping[Name, Value]) -> str:
    """That a rank's generator has the state that another rank's should have; empty where it has not."""
    others = (other for other in expected if other != name and without_rank(other[1]) == without_rank(name[1]))
    other = next((other for other in others if expected[other] == observed[name] != expected[name]), None)
    return (
        f"has the state that {other[1]} should have: the checkpoint has one rank's alone, or each rank is given that "
        "one; look at where it is saved and handed back for each rank."
        if other
        else ""
    )


def _of(expected: Value, observed: Value, begun: int) -> str:
    if {(one.dtype, one.shape) for one in (expected, observed)} != {("int64", (4,))}:
        return ""
    (seed, wanted), (other_seed, got) = _place(expected), _place(observed)
    if seed != other_seed == begun:
        return (
            f"goes on from the seed {begun} that this run was begun with, and should from {seed}, that of the run that "
            "saved: its state is not restored here."
        )
    if seed != other_seed:
        return f"was seeded with {other_seed}, and should have been with {seed}: look at what seeds it, or restores it."
    if wanted is None or got is None or wanted == got:
        return ""
    more, moved = ("more", "draws from it") if got > wanted else ("fewer", "takes it back, or should draw from it")
    return (
        f"has the right seed, and {abs(got - wanted)} {more} numbers were drawn from it than should have been "
        f"({got}, and not {wanted}): look at what {moved} before this place."
    )


def _place(value: Value) -> tuple[int, int | None]:
    """A generator's seed, and how many numbers of 32 bits were drawn since it was seeded; None where that is too far to
    look."""
    seed, place, block, _ = struct.unpack("<4q", value.data)
    if not block:
        return seed, place
    number = _blocks(seed).get(block)
    return seed, None if number is None else 0 if number == 0 else (number - 1) * BLOCK + place


@cache
def _blocks(seed: int) -> Mapping[int, int]:
    """Digest of a block → its number in the stream of a seed; that of the seed itself, from which the first one is
    made, is 0. torch seeds with the low 32 bits, as numpy's `RandomState` does."""
    generator, numbers = np.random.RandomState(seed & 0xFFFFFFFF), {}
    for number in range(LOOKED_AT):
        keys = generator.get_state(legacy=False)["state"]["key"]
        numbers[block_digest(keys.astype("<u4").tobytes())] = number
        generator.bytes(4 * BLOCK)
    return numbers
