"""The entries of a Megatron-Core checkpoint that are deliberately not compared, each with the reason.

Whatever else the reader does not know becomes a record of the role `unknown` (`shardproof.readers.unknown`), until
somebody has looked at it and put it here or into the reader.

*Verifies*: that a checkpoint holds nothing unknown. *Does not verify*: the values of what is listed here.
"""

from __future__ import annotations

import re

from shardproof.observe.record import Record
from shardproof.readers.pieces import KeyPath, Piece, key_of
from shardproof.readers.unknown import unknown_record

IGNORED: tuple[tuple[str, str], ...] = (
    (r"checkpoint_version", "the number of the training script's format"),
    (r"content_metadata\..*", "how the library wrote it, for its own load"),
    (r"opt_param_scheduler\.(max_lr|min_lr|lr_(warmup|decay)_steps|lr_decay_style|(start|end)_wd|wd_incr_\w+)",
     "arguments of the run; what they make of a step is in the groups"),
    (r"opt_param_scheduler\.num_steps", "compared where there is a schedule; without one nothing depends on it"),
    (r"grad_scaler\.(scale|growth_tracker|hysteresis_tracker)", "compared where there is a dynamic loss scale"),
    (r"param_state\.\d+\.step", "torch's counts of what rank 0 owns, by number: those of its groups are compared"),
    (r"param_state_sharding_type", "the name of the format"),
    (r"(.*\.)?(buckets_coalesced|numel_unpadded)|per_bucket_numel(_unpadded)?(\..*)?", "sizes, which the buffers show"),
)  # fmt: skip
"""Pattern of a path, below the optimizer without the numbers of optimizers and buffers → why it is not compared."""

_PATTERN = re.compile("|".join(f"(?:{pattern})" for pattern, _ in IGNORED))


def unknown_records(op: int, piece: Piece, path: KeyPath) -> list[Record]:
    """The record of a piece that the reader has no place for; none if it is one of those that are ignored.

    Args:
        op: index of the save. path: the piece's, from where the reader is.
    """
    return [] if _PATTERN.fullmatch(key_of(path)) else [unknown_record(op, piece, path)]
