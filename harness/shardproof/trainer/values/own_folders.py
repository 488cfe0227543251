"""Texts that lie in a folder that shardproof gave a trainer, such as a logger's path below `cell.folder`.

Each session has a folder of its own, and each checkpoint too, so that such a text is another one in each of them,
whatever the trainer does. What is compared is the text with `{folder}` in the place of that folder: what lies where in
it may be state, such as the name of the best checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

FOLDER = "{folder}"


def own_folders(*folders: Path) -> tuple[str, ...]:
    """The folders, as texts, in which sessions and checkpoints have theirs; each also with its links followed."""
    every = {str(path) for folder in folders for path in (folder.absolute(), folder.resolve())}
    return tuple(sorted(every, key=len, reverse=True))


def without_folders(text: str, folders: Iterable[str]) -> str:
    """A text with `{folder}` in the place of every folder of a session or a checkpoint in it."""
    for folder in folders:
        if folder in text:
            text = _of(folder).sub(FOLDER, text)
    return text


@lru_cache
def _of(folder: str) -> re.Pattern[str]:
    return re.compile(rf"{re.escape(folder)}(?![\w.-])(?:/(?:session|checkpoint)\d+)?")
