"""A plugin for the canary of `test_shapes.py`: what this server reads of ranks, it remembers wrongly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shardproof.world import shapes

_READ = shapes.read
_WRONG: dict[Any, Any] = {}


def _larger(answer: Any) -> Any:
    """An answer, with one row more in each tensor."""
    if not answer:
        return answer
    kind, found = answer
    return kind, _row_more(found) if kind == "one" else tuple(map(_row_more, found))


def _row_more(found: Any) -> Any:
    """Of a tensor's shape, strides and dtype, or of its sharding, at whose end they stand."""
    *sharding, meta = found if found and len(found) == 4 else (found,)
    if meta is None or not meta[0]:
        return found
    if sharding:
        return (*sharding, _row_more(meta))
    (rows, *sizes), stride, dtype = meta
    return (rows + 1, *sizes), stride, dtype


def _read_wrongly(path: Path) -> None:
    _READ(path)
    if not _WRONG:  # all of it once, with what the warm-up has asked
        _WRONG.update({key: _larger(answer) for key, answer in shapes.remembered.items()})
    shapes.remembered.update(_WRONG)


shapes.read = _read_wrongly
