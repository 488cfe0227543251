"""The record of emulated symbols that code used: what a result shows beside its verdict."""

from __future__ import annotations

symbols: dict[str, int] = {}


def touch(symbol: str) -> None:
    """Count one use of an emulated symbol."""
    symbols[symbol] = symbols.get(symbol, 0) + 1
