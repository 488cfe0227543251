"""What a checkpoint of Megatron-Core holds of random generators, as records.

`rng_state` is there once for each model-parallel rank: a list of one dict, of Python's, numpy's and torch's generator,
of the device's default one and of the tracker's streams (`shardproof.mechanisms.megatron.generators`). The streams are
called after their coordinates: `tensor.1` is that of tensor-parallel rank 1, `expert.1` that of the second rank that
shares experts out. What is written several times, as the device's default generator is by every tensor-parallel rank,
must be the same each time.

*Verifies*: nothing unknown lies there. *Does not verify*: that all is there; what is missing is so when compared.
"""

from __future__ import annotations

from collections.abc import Iterator

from shardproof.mechanisms.megatron.generators import HOST, TRACKED
from shardproof.mechanisms.megatron.ignored import unknown_records
from shardproof.observe.logical import Value
from shardproof.observe.record import WRITTEN, Record, whole
from shardproof.program import Op
from shardproof.readers.generators import numpy_state, python_state, tensor_state
from shardproof.readers.pieces import KeyPath, Piece

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
    host = (
        python_state(held, ("random_rng_state",)),
        numpy_state(held, ("np_rng_state",)),
        tensor_state(held, ("torch_rng_state",)),
    )
    for name, value in zip(HOST, host, strict=True):
        if value is not None:
            yield f"{name}.0", value
    device: dict[KeyPath, str] = {("cuda_rng_state",): "replicated"}
    device |= {("rng_tracker_states", name): stream for name, stream in TRACKED.items()}
    for path, stream in device.items():
        state = tensor_state(held, path)
        if state is not None:
            yield f"{stream}.{places.get(stream, 0)}", state
