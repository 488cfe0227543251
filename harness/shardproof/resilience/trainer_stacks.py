"""A trainer's file as stacks: a cell of it is a way to keep a checkpoint.

The trainer says how to save and load, and not where a run keeps its checkpoints. Two ways are common, and tried:

* `over`: each save goes into the same folder, over the one before, as a run with a folder `last` does it. What a crash
  in the middle leaves is up to the trainer alone.
* `steps`: each save has an empty folder, and a file beside them names the newest. A careful script around the trainer
  writes that file once `save` has returned on all ranks, under another name that it renames, and syncs it. What is left
  to the trainer is that the checkpoint is on disk when `save` returns.
"""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from shardproof.errors import UsageError
from shardproof.resilience.stack_cures import require_cures, stacks_named
from shardproof.resilience.stacks import Stack
from shardproof.trainer.base import world_of
from shardproof.trainer.cells import cells, mesh_of, scenario_of, settings_of
from shardproof.trainer.described import Described, described, is_trainer
from shardproof.trainer.system import register_described
from shardproof.versions import split_cures

OVER, STEPS = "over", "steps"
LAYOUTS = (OVER, STEPS)
TRACKER = "latest"
"""The file that names the newest checkpoint, where each has a folder of its own."""

_DOC = {
    OVER: "each save over the one before",
    STEPS: "a folder for each save, by a process of its own; a synced file says which",
}


def all_named(names: Sequence[str], sets: Sequence[str], layout: str) -> list[Stack]:
    """The stacks with the given names, among them trainers' files; every stack that is known for no name.

    Args:
        sets: values of a trainer's axes, as `--set` has them. An axis without one has its first value.

    Raises:
        UsageError: a stack or a cure is unknown; a file is none of a trainer's; `--set` or another layout without one.
    """
    files = [name for name in names if is_trainer(split_cures(name)[0])]
    given = {"--set": " ".join(sets), "--layout": layout if layout != OVER else ""}
    for option, value in given.items() if not files else ():
        if value:
            form = f"shardproof resilience my_trainer.py {option} {value}"
            raise UsageError.of(option, value, "with the file of a trainer, whose it is", form)
    if not names:
        return stacks_named(())
    return [
        stack
        for name in names
        for stack in (_of_file(name, sets, layout) if name in files else stacks_named((name,)))
    ]  # fmt: skip


def _of_file(name: str, sets: Sequence[str], layout: str) -> list[Stack]:
    """The stacks of a file: one for each combination of the values that are asked for."""
    plain, wanted = split_cures(name)
    found = described(plain)
    register_described(found)
    asked = settings_of(found, sets)
    settings = {axis: asked.get(axis, texts[:1]) for axis, texts in found.axes.items()}
    stacks = [_of_cell(found, name, plain, cell, layout) for cell in cells(found, settings)]
    if wanted is not None:
        require_cures(stacks[0], wanted)
    return [replace(stack, cured=wanted) for stack in stacks]


def _of_cell(trainer: Described, name: str, plain: str, cell: Mapping[str, str], layout: str) -> Stack:
    scenario = scenario_of(trainer, cell)
    apart = () if layout == OVER else ("--layout", layout)
    words = [name, *(word for option in scenario.options for word in ("--set", option)), *apart]
    shown = [trainer.system + name.removeprefix(plain), *scenario.options, *apart[1:]]
    return Stack(
        " ".join(shown),
        f"{trainer.doc.rstrip('.')}: {_DOC[layout]}",
        "shardproof.resilience.rank.trainers:OfTrainer",
        (("trainer", trainer.plugin), ("cell", dict(cell)), ("layout", layout)),
        system=trainer.system,
        ranks=world_of(mesh_of(trainer, scenario)),
        by_load=True,
        words=shlex.join(words),
        made_of=hashlib.sha256(Path(trainer.file).read_bytes()).hexdigest(),
    )
