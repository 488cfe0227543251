"""A kind of checkpoint folder that only one library writes, as a system declares it for `shardproof diff`."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol, TypeVar

Contents = TypeVar("Contents", contravariant=True)
"""What a checkpoint's entries are added to: `shardproof.compare.contents.Contents`."""


class Layout(Protocol[Contents]):
    """A kind of folder that only one library writes."""

    def recognises(self, folder: Path) -> bool:
        """Whether the folder is one. It looks at names, and at small text files."""

    def add(self, contents: Contents, folder: Path) -> str:
        """Take everything in it up; what the kind is called.

        Raises:
            CheckpointError: it is damaged, or of a form that cannot be read.
        """
