"""Extracts the states of random generators from the pieces of a checkpoint.

What libraries save of Python's, numpy's and torch's generator is what these give: `random.getstate()`, a version, 625
numbers and a float or None; `numpy.random.get_state()`, a name, 624 uint32, a position and two more; a tensor of bytes.
Each function takes the pieces of one state out of `held`, where they are such a state, and gives it as a record has it;
otherwise it leaves them there and gives None. Nothing is called: numpy's array is read as data.

*Verifies*: the form. *Does not verify*: that numbers are those of a generator.
"""

from __future__ import annotations

from shardproof.observe.generators import numpy_value, python_value, state_value
from shardproof.observe.logical import Value
from shardproof.readers.pieces import KeyPath, ObjectPiece, Piece, TensorPiece

Held = dict[KeyPath, Piece]
"""Pieces by their path."""


def python_state(held: Held, at: KeyPath) -> Value | None:
    """Python's, at the path `at`."""
    paths = [(*at, index) for index in range(3)]
    match [plain(held, path) for path in paths]:
        case [int(version), list(numbers), None | float() as following]:
            _remove(held, paths)
            return python_value((version, tuple(numbers), following))
    return None


def numpy_state(held: Held, at: KeyPath) -> Value | None:
    """numpy's, as one tuple at the path `at`."""
    paths: list[KeyPath] = [(*at, 1, part) for part in ("dtype", "shape", "data")]
    paths += [(*at, index) for index in (0, 2, 3, 4)]
    match [plain(held, path) for path in paths]:
        case ["uint32", [_], bytes(keys), str(name), int() as position, int() as has_gauss, float() as gauss]:
            _remove(held, paths)
            return numpy_value(name, keys, position, has_gauss, gauss)
    return None


def numpy_state_in_parts(held: Held, paths: tuple[KeyPath, KeyPath, KeyPath, KeyPath, KeyPath]) -> Value | None:
    """numpy's, whose five parts lie at five paths, its numbers as a tensor."""
    keys = held.get(paths[1])
    match [plain(held, path) for path in (paths[0], *paths[2:])]:
        case [str(name), int() as position, int() as has_gauss, float() as gauss] if (
            isinstance(keys, TensorPiece) and keys.dtype == "uint32"
        ):
            _remove(held, list(paths))
            return numpy_value(name, keys.data, position, has_gauss, gauss)
    return None


def tensor_state(held: Held, at: KeyPath) -> Value | None:
    """torch's, or a device's, at the path `at`."""
    match held.get(at):
        case TensorPiece(dtype="uint8", data=data):
            del held[at]
            return state_value(data)
    return None


def plain(held: Held, at: KeyPath) -> object:
    """A plain object's value; what is no such thing is of no form that is taken."""
    piece = held.get(at)
    return piece.value if isinstance(piece, ObjectPiece) else piece


def _remove(held: Held, paths: list[KeyPath]) -> None:
    for path in paths:
        del held[path]
