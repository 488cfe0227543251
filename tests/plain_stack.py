"""A stack without any library, to try the trials themselves: two files of numbers, written one after the other.

python -m tests.plain_stack ARGUMENTS    # `shardproof ARGUMENTS`, with these stacks beside the others
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path

from shardproof.resilience import stacks
from shardproof.resilience.stacks import Stack

State = dict[str, list[int]]


class Plain:
    """Keeps the files `a` and `b`.

    Args:
        silent: swallow errors of the disk when saving, as no stack should. wait_s: how long a load takes.
    """

    def __init__(self, silent: bool = False, wait_s: float = 0.0) -> None:
        self.silent, self.wait_s = silent, wait_s

    def warm(self) -> None:
        """There is nothing to import."""

    def state(self, generation: int, run: int) -> State:
        return {name: [generation, run] * 300 for name in "ab"}

    def save(self, folder: Path, state: State, generation: int, run: int) -> None:
        for name, numbers in state.items():
            try:
                with (folder / f"{name}.new").open("w") as file:
                    json.dump(numbers, file)
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(folder / f"{name}.new", folder / name)
            except OSError:
                if not self.silent:
                    raise

    def load(self, folder: Path) -> State:
        time.sleep(self.wait_s)
        return {name: json.loads((folder / name).read_text()) for name in "ab"}

    def digests(self, state: State) -> Mapping[str, str]:
        return {name: hashlib.sha256(repr(numbers).encode()).hexdigest() for name, numbers in state.items()}


STACKS = (
    Stack("plain", "two files", "tests.plain_stack:Plain"),
    Stack("plain-slow", "two files, loaded slowly", "tests.plain_stack:Plain", (("wait_s", 0.05),)),
    Stack("plain-silent", "two files, and errors are swallowed", "tests.plain_stack:Plain", (("silent", True),)),
)

if __name__ == "__main__":
    from shardproof.__main__ import main

    stacks.STACKS += STACKS
    main()
