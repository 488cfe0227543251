"""The stacks that can be tried: those of torch and of safetensors, and what systems and plugins add.

A stack is a way to keep a checkpoint, as a user writes it down: which calls save, which load, and into which files.
What does the work is a class that only a child process imports (`Driver`). A system whose format is its own lists its
stacks as `STACKS` in the module `stacks` of its package.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from harness.errors import UsageError


@dataclass(frozen=True)
class Stack:
    """A way to keep a checkpoint.

    Attributes:
        name: what the command line calls it. doc: one line on which calls it makes.
        driver: the `module:attribute` of a `Driver`, or of what makes one.
        options: arguments of that, by name.
        requires: what pip installs beside torch, pinned. system: the system whose newest release is used, with what
            goes beside it; empty for none.
        ranks: how many processes save, each of which the driver's own process forks.
    """

    name: str
    doc: str
    driver: str
    options: tuple[tuple[str, Any], ...] = ()
    requires: tuple[str, ...] = ()
    ranks: int = 1
    system: str = ""


def stack_of_system(
    name: str, doc: str, system: str, axes: Mapping[str, str], *, tracker: str, by_script: bool = False
) -> Stack:
    """A stack whose saves and loads are those of a system's rank (`harness.resilience.rank.systems`)."""
    options = {"system": system, "axes": dict(axes), "tracker": tracker, "by_script": by_script}
    return Stack(name, doc, "harness.resilience.rank.systems:OfSystem", tuple(options.items()), system=system)


class Driver(Protocol):
    """What saves and loads, in a child process."""

    def warm(self) -> None:
        """Import and try what a child will need, in the process that forks them, so that each need not do it anew. No
        thread and no connection may stay behind."""

    def state(self, generation: int, run: int) -> Any:
        """What a training run has after so many steps; no two differ in fewer than all tensors."""

    def save(self, folder: Path, state: Any, generation: int, run: int) -> None:
        """Keep a state in a folder, which may hold earlier ones. A driver raises whatever the library raises."""

    def load(self, folder: Path) -> Any:
        """What the folder holds. A driver raises whatever the library raises."""

    def digests(self, state: Any) -> Mapping[str, str]:
        """Name of each part of a state → a digest of its type, shape and bytes."""


_TORCH = "harness.resilience.rank.torch_stacks"
_RANKS = "harness.resilience.rank.ranks"

STACKS: tuple[Stack, ...] = (
    Stack("torch-save", "torch.save over the file that is there", f"{_TORCH}:TorchSave"),
    Stack(
        "torch-save-rename", "torch.save into a new file, then os.replace", f"{_TORCH}:TorchSave",
        (("renames", True),),
    ),
    Stack(
        "safetensors", "safetensors.torch.save_file over the file that is there", f"{_TORCH}:SafeTensors",
        requires=("safetensors==0.8.0",),
    ),
    Stack("dcp", "torch.distributed.checkpoint.save into one folder, as it is by default", f"{_TORCH}:Distributed"),
    Stack(
        "dcp-no-sync", "the same with FileSystemWriter(sync_files=False)", f"{_TORCH}:Distributed",
        (("sync_files", False),),
    ),
    Stack(
        "dcp-files", "the same with FileSystemWriter(single_file_per_rank=False): a file for each tensor",
        f"{_TORCH}:Distributed", (("single_file_per_rank", False),),
    ),
    Stack(
        "dcp-threads", "the same with FileSystemWriter(thread_count=2): two files", f"{_TORCH}:Distributed",
        (("thread_count", 2),),
    ),
    Stack(
        "dcp-steps", "a new folder for each step, the newest with .metadata is loaded", f"{_TORCH}:Distributed",
        (("steps", True),),
    ),
    Stack(
        "dcp-2-ranks", "torch.distributed.checkpoint.save by 2 ranks into one folder, a shard of each tensor on each",
        f"{_RANKS}:DistributedRanks", (("world", 2),), ranks=2,
    ),
    Stack(
        "dcp-2-ranks-at-1", "the same, loaded by 1 rank", f"{_RANKS}:DistributedRanks",
        (("world", 2), ("load_world", 1)), ranks=2,
    ),
    Stack(
        "dcp-4-ranks", "torch.distributed.checkpoint.save by 4 ranks into one folder", f"{_RANKS}:DistributedRanks",
        (("world", 4),), ranks=4,
    ),
    Stack(
        "dcp-4-ranks-at-3", "the same, loaded by 3 ranks", f"{_RANKS}:DistributedRanks",
        (("world", 4), ("load_world", 3)), ranks=4,
    ),
    Stack("dcp-async", "torch.distributed.checkpoint.async_save into one folder", f"{_TORCH}:DistributedAsync"),
)  # fmt: skip


def all_stacks() -> dict[str, Stack]:
    """Every stack by name: those of the house, then those of the systems and plugins."""
    from harness.systems.registry import all_systems

    found = list(STACKS)
    for system in all_systems():
        package = hasattr(importlib.import_module(system.home), "__path__")  # a plugin's system may be a module
        if package and importlib.util.find_spec(f"{system.home}.stacks") is not None:
            found += importlib.import_module(f"{system.home}.stacks").STACKS
    return {stack.name: stack for stack in found}


def chosen(names: tuple[str, ...]) -> list[Stack]:
    """The stacks of these names; all of them for none.

    Raises:
        UsageError: there is no such stack.
    """
    known = all_stacks()
    for name in names:
        if name not in known:
            raise UsageError.of("stack", name, known, "shardproof resilience torch-save")
    return [known[name] for name in names] or list(known.values())
