"""A comparison as JSON types."""

from __future__ import annotations

from typing import Any

from shardproof.codec import to_plain
from shardproof.compare.differences import Comparison


def document_of(comparison: Comparison) -> dict[str, Any]:
    """All of it, every difference too."""
    return {
        "equal": comparison.equal,
        "a": to_plain(comparison.a),
        "b": to_plain(comparison.b),
        "elements": comparison.elements,
        "read_bytes": comparison.read_bytes,
        "checksums": comparison.checksums,
        "left_out": comparison.left_out,
        "hint": comparison.hint,
        "counts": comparison.counts(),
        "differences": [to_plain(one) for one in comparison.found],
    }
