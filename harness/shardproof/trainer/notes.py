"""What the arms of a trainer did not compare, each in a sentence of its own: it stands beside a verdict, a pass too."""

from __future__ import annotations

from collections.abc import Iterable


def apart(keys: Iterable[tuple[str, str]]) -> str:
    """State of an optimizer that every rank keeps differently, so that another mesh has nothing to compare with."""
    names = ", ".join(sorted(name for _, name in keys)[:4])
    return f"not compared, since the ranks of one mesh have it differently: {names}"


def idle(keys: Iterable[tuple[str, str]]) -> str:
    """Generators that are not compared."""
    names = ", ".join(sorted(name for _, name in keys)[:4])
    return f"not compared, since nothing is drawn from them after the save: {names}"


def of_one_way(keys: Iterable[tuple[str, str]]) -> str:
    """What only one of two ways has, or has in this shape."""
    return f"not compared, since every rank has its own, or only one of the two ways has it in this shape: {_few(keys)}"


def taken_for_settings(keys: Iterable[tuple[str, str]]) -> str:
    """Numbers and texts in which two ways to compute the same are not alike."""
    return f"not alike, and taken for settings that say which way it is: {_few(keys)}"


def drawn_otherwise(keys: Iterable[tuple[str, str]]) -> str:
    """Random states in which two ways to compute the same are not alike."""
    return f"not alike, and not compared, since one way may draw more numbers than the other: {_few(keys)}"


def of_each_rank(keys: Iterable[tuple[str, str]]) -> str:
    """What another mesh has nothing to compare with, since every rank has it for itself."""
    return f"not compared, since every rank has its own: {_few(keys)}"


def not_loaded(keys: Iterable[tuple[str, str]]) -> str:
    """What is compared after steps, and not right after a load."""
    return f"not compared right after the load, since no checkpoint need hold it: {_few(keys)}"


def _few(keys: Iterable[tuple[str, str]], most: int = 4) -> str:
    """The first names of some values, and how many more there are."""
    names = [" of ".join(key) for key in sorted(keys)]
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
