"""Marks of tensors, which change whenever a tensor does, and for which torch is asked nothing."""

from __future__ import annotations

import zlib

import torch
from torch.distributed.tensor import DTensor

from shardproof.trainer.rank.looked_up import bytes_of


def of_gradient(value: torch.Tensor | None) -> object:
    """What changes when a gradient does, of which none and one of zeros are the same."""
    mark = None if value is None else mark_of(value)
    return None if mark == ZEROS else mark


ZEROS = "zeros"


def known(mark: object) -> object:
    """What a mark says of the values alone: nothing, where they cannot be read."""
    return None if isinstance(mark, tuple) else mark


def mark_of(value: torch.Tensor) -> object:
    """What changes when a tensor does: its bytes, as a checksum; where nobody can read them, how often torch has
    written it."""
    local = value._local_tensor if isinstance(value, DTensor) else value
    data = bytes_of(local)
    if not data:
        return ("version", local._version)
    return zlib.crc32(data) if data.strip(b"\0") else ZEROS
