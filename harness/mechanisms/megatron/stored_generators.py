"""What a checkpoint of Megatron-Core holds of random generators, as records.

`rng_state` is there once for each model-parallel rank: a list of one dict, of Python's, numpy's and torch's generator,
of the device's default one and of the tracker's streams (`harness.mechanisms.megatron.generators`). The streams are
called after their coordinates: `tensor.1` is that of tensor-parallel rank 1, `expert.1` that of the second rank that
shares experts out. What is written several times, as the device's default generator is by every tensor-parallel rank,
must be the same each time.

*Verifies*: nothing unknown lies there. *Does not verify*: that all is there; what is missing is so when compared.
"""

from __future__ import annotations

from collections.abc import Iterator

from harness.mechanisms.megatron.generators import HOST, TRACKED
from harness.mechanisms.megatron.ignored import unknown_records
from harness.observe.generators import numpy_value, python_value, state_value
from harness.observe.logical import Value
from harness.observe.record import WRITTEN, Record, whole
from harness.program import Op
from harness.readers.pieces import KeyPath, ObjectPiece, Piece, TensorPiece

Coordinate = tuple[int, int]
"""Tensor-parallel rank, rank among those that share experts out."""


class StoredGenerators:
    """Collects the pieces of all `rng_state` of one checkpoint."""

    def __init__(self, op: Op) -> None:
        self.op = op
        self.pieces: dict[tuple[Coordinate, int], dict[KeyPath, Piece]] = {}

    def take(self, coordinate: Coordinate, copy: int, path: KeyPath, piece: Piece) -> None:
        """A piece below the one dict of a rank's list. copy: which of several with the same coordinate."""
        self.pieces.setdefault((coordinate, copy), {})[path] = piece

    def records(self) -> Iterator[Record]:
        """Of every generator its state; and whatever else lies there."""
        replicas: dict[str, int] = {}
        for (coordinate, _), held in self.pieces.items():
            for name, value in _values(coordinate, self.op.mesh.tp, held):
                number = replicas[name] = replicas.get(name, -1) + 1
                record = whole(self.op.index, 0, "rng", name, value.dtype, value.shape, value.data, WRITTEN)
                yield record._replace(replica=number)
            for path, piece in held.items():
                yield from unknown_records(self.op.index, piece, ("rng_state", *path))


def _values(coordinate: Coordinate, tp: int, held: dict[KeyPath, Piece]) -> Iterator[tuple[str, Value]]:
    """The generators of one rank, each taken out of `held`."""
    places = {"tensor": coordinate[0], "expert": coordinate[1] * tp + coordinate[0]}
    for name, value in zip(HOST, (_python(held), _numpy(held), _tensor(held, ("torch_rng_state",))), strict=True):
        if value is not None:
            yield f"{name}.0", value
    device: dict[KeyPath, str] = {("cuda_rng_state",): "replicated"}
    device |= {("rng_tracker_states", name): stream for name, stream in TRACKED.items()}
    for path, stream in device.items():
        state = _tensor(held, path)
        if state is not None:
            yield f"{stream}.{places.get(stream, 0)}", state


def _python(held: dict[KeyPath, Piece]) -> Value | None:
    match [_object(held, ("random_rng_state", index)) for index in range(3)]:
        case [int(version), list(numbers), None | float() as following]:
            for index in range(3):
                del held["random_rng_state", index]
            return python_value((version, tuple(numbers), following))
    return None


def _numpy(held: dict[KeyPath, Piece]) -> Value | None:
    array: list[KeyPath] = [("np_rng_state", 1, part) for part in ("dtype", "shape", "data")]
    rest: list[KeyPath] = [("np_rng_state", index) for index in (0, 2, 3, 4)]
    match [_object(held, path) for path in (*array, *rest)]:
        case ["uint32", [_], bytes(keys), str(name), int() as position, int() as has_gauss, float() as gauss]:
            for path in (*array, *rest):
                del held[path]
            return numpy_value(name, keys, position, has_gauss, gauss)
    return None


def _tensor(held: dict[KeyPath, Piece], path: KeyPath) -> Value | None:
    match held.get(path):
        case TensorPiece(dtype="uint8", data=data):
            del held[path]
            return state_value(data)
    return None


def _object(held: dict[KeyPath, Piece], path: KeyPath) -> object:
    """A plain object's value; what is no such thing is of no form that is taken."""
    piece = held.get(path)
    return piece.value if isinstance(piece, ObjectPiece) else piece
