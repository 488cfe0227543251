"""Which emulated symbols the code of a rank used: what a result shows beside its verdict."""

from __future__ import annotations

_counts: dict[str, int] = {}


def touch(symbol: str) -> None:
    """Count one use of an emulated symbol."""
    _counts[symbol] = _counts.get(symbol, 0) + 1


def used_symbols() -> tuple[str, ...]:
    """The emulated symbols used in this process since the last reset, sorted."""
    return tuple(sorted(_counts))


def forget_used_symbols() -> None:
    """Begin to count anew."""
    _counts.clear()
