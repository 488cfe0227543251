"""The stacks that can be tried: files of torch.save and of safetensors, and what systems and plugins add.

A stack is a way to keep a checkpoint, as a user writes it down: which calls save, which load, and into which files.
What does the work is a class that only a child process imports (`Driver`). A system whose format is its own lists its
stacks as `STACKS` in the module `stacks` of its package.

After a stack's name `+cured` asks for it on the system's library with all cures that apply, `+cured:ID,ID` with some:
those of the system, and those of what stacks have shown (`scenarios/<system>/resilience/cures/`), which no
scenario can.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from shardproof.protocol.system import System


@dataclass(frozen=True)
class Stack:
    """A way to keep a checkpoint.

    Attributes:
        name: what the command line calls it. doc: one line on which calls it makes.
        driver: the `module:attribute` of a `Driver`, or of what makes one.
        options: arguments of that, by name.
        requires: what pip installs beside torch, pinned. system: the system whose newest release is used, with what
            goes beside it, and whose cures there are; empty for none. cured: which of them, as
            `shardproof.issues.cures` has it; None for none.
        ranks: how many processes save, each of which the driver's own process forks.
        by_load: the states to compare with are what loads of the undamaged folders give, and not what was saved: a
            load that restores less than all, as one of a user's own may, can then be tried too.
        words: how the command line names it, if not by its name. made_of: what else its trials depend on, such as the
            digest of a user's file.
    """

    name: str
    doc: str
    driver: str
    options: tuple[tuple[str, Any], ...] = ()
    requires: tuple[str, ...] = ()
    ranks: int = 1
    system: str = ""
    cured: str | None = None
    by_load: bool = False
    words: str = ""
    made_of: str = ""


def stack_of_system(
    name: str, doc: str, system: str, axes: Mapping[str, str], *, tracker: str, by_script: bool = False
) -> Stack:
    """A stack whose saves and loads are those of a system's rank (`shardproof.resilience.rank.systems`)."""
    options = {"system": system, "axes": dict(axes), "tracker": tracker, "by_script": by_script}
    return Stack(name, doc, "shardproof.resilience.rank.systems:OfSystem", tuple(options.items()), system=system)


class Driver(Protocol):
    """What saves and loads, in a child process."""

    def warm(self) -> None:
        """Import and try what a child will need, in the process that forks them, so that each need not do it anew. No
        thread and no connection may stay behind."""

    def state(self, generation: int, run: int) -> Any:
        """What a training run has after so many steps; no two differ in fewer than all tensors."""

    def save(self, folder: Path, state: Any, generation: int, run: int) -> Mapping[str, str] | None:
        """Keep a state in a folder, which may hold earlier ones. A driver raises whatever the library raises.

        Returns: the digests of what was saved, where only the ranks that save it know them; else None.
        """

    def load(self, folder: Path) -> Any:
        """What the folder holds. A driver raises whatever the library raises."""

    def digests(self, state: Any) -> Mapping[str, str]:
        """Name of each part of a state → a digest of its type, shape and bytes."""


_TORCH = "shardproof.resilience.rank.torch_stacks"

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
)  # fmt: skip


def all_stacks() -> dict[str, Stack]:
    """Every stack by name: those of the house, then those of the systems and plugins."""
    from shardproof.protocol.registry import all_systems

    found = [*STACKS, *(stack for system in all_systems() for stack in stacks_of(system))]
    return {stack.name: stack for stack in found}


def stacks_of(system: System) -> Sequence[Stack]:
    """The stacks of a system's own."""
    package = hasattr(importlib.import_module(system.home), "__path__")  # a plugin's system may be a module
    if not package or importlib.util.find_spec(f"{system.home}.stacks") is None:
        return ()
    stacks: Sequence[Stack] = importlib.import_module(f"{system.home}.stacks").STACKS
    return stacks
