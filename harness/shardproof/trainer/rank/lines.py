"""The line of a trainer, or of its stack, that a call comes from."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from types import FrameType

import torch

OURS = f"{Path(__file__).parents[2]}/"
TORCH = f"{Path(torch.__file__).parent}/"


def innermost(places: Iterable[tuple[str, int]]) -> str:
    """File and line of the first place, from the innermost, that is neither torch's nor ours; empty where none is."""
    for name, line in places:
        if not name.startswith((TORCH, OURS, "<")):
            return f"{Path(name).name}:{line}"
    return ""


def where_of(frame: FrameType | None) -> str:
    """Where a frame was called from."""
    places = list[tuple[str, int]]()
    while frame is not None:
        places.append((frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    return innermost(places)
