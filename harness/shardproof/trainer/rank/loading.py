"""Imports a trainer's file on the ranks' side, once, before the ranks are forked."""

from __future__ import annotations

import importlib.util
import sys
from functools import cache
from pathlib import Path
from typing import Any

from shardproof.tables import SHIPPED
from shardproof.trainer.base import Trainer
from shardproof.trainer.described import Described, text_of


@cache
def class_of(file: Path, name: str) -> type[Trainer]:
    """The class of that name in a file, which is imported under its own name; its folder is searched for what it
    imports. That of the shipped trainers is not: they import nothing of it, and a library that looks whether
    `accelerate` is there would find the trainer of that name.

    Raises:
        TypeError: it is no subclass of `Trainer`. Whatever the file's own code raises.
    """
    if file.parent != SHIPPED / "trainers" and str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
    spec = importlib.util.spec_from_file_location(f"shardproof_trainer_{file.stem}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    found = getattr(module, name)
    if not (isinstance(found, type) and issubclass(found, Trainer)):
        raise TypeError(f"{name} of {file.name} is no subclass of shardproof.trainer.Trainer")
    return found


def values(trainer: Described, texts: dict[str, str]) -> dict[str, Any]:
    """Axis → the value that its text stands for, as it stands in the class; of a value that is not there, which an open
    axis takes, the text."""
    axes = class_of(trainer.file, trainer.name).axes
    return {axis: next((v for v in axes[axis] if text_of(v) == text), text) for axis, text in texts.items()}
