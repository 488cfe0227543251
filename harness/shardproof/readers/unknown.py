"""Records for checkpoint entries that no reader knows. No oracle expects them, so that they appear as differences.

Something that a new release begins to store fails in this way, until somebody has looked at it and either has it read
or says why it is not compared.

*Verifies* nothing by itself. *Does not verify* what a reader drops before it asks.
"""

from __future__ import annotations

from shardproof.observe.record import WRITTEN, Record, whole
from shardproof.observe.settings import UNKNOWN
from shardproof.readers.pieces import KeyPath, Piece, TensorPiece, key_of

_SHOWN_CHARACTERS = 200


def unknown_record(op: int, piece: Piece, path: KeyPath) -> Record:
    """The record of a piece that has no place: a tensor's with its values, an object's as text.

    Args:
        op: index of the save. path: the piece's, from where the reader is.
    """
    key = key_of(path)
    if isinstance(piece, TensorPiece):
        return Record(
            op, piece.rank, WRITTEN, UNKNOWN, key, piece.dtype, piece.shape, piece.start, piece.size, piece.data
        )
    text = repr(piece.value)[:_SHOWN_CHARACTERS].encode(errors="replace")
    return whole(op, piece.rank, UNKNOWN, key, "utf8", (len(text),), text, WRITTEN)
