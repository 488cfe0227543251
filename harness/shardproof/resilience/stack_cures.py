"""The stacks that a command names, and the cures that can be applied to their libraries: the system's own, and cures
for defects that stacks have shown.

What a crash or a full disk makes of a checkpoint is a defect that no scenario shows, since nothing fails in one. Its
cure is a patch all the same, `scenarios/<system>/resilience/cures/<id>.patch`, of the form that
`shardproof.issues.cures` has. Its first line `Shown-by: STACK TRIAL` names a trial that the library loses without it,
and not with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from shardproof.errors import OWN_CHECKPOINTS, UsageError
from shardproof.issues import cures
from shardproof.issues.cures import Cure, Cured
from shardproof.protocol.registry import system_named
from shardproof.protocol.system import System
from shardproof.resilience.stacks import Stack, all_stacks
from shardproof.versions import split_cures

FOLDER = ("resilience", "cures")


def stacks_named(names: tuple[str, ...]) -> list[Stack]:
    """The stacks with the given names, such as `torch-save` or `deepspeed+cured`. An empty list means every stack,
    uncured.

    Raises:
        UsageError: the stack or the cure is unknown.
    """
    known = all_stacks()
    found = []
    for name in names:
        plain, wanted = split_cures(name)
        if plain not in known:
            raise UsageError.of("stack", name, known, "shardproof resilience torch-save").led_to(OWN_CHECKPOINTS)
        stack = known[plain]
        if wanted is not None:
            require_cures(stack, wanted)
            stack = replace(stack, name=name, doc=f"{stack.doc}; cured", cured=wanted)
        found.append(stack)
    return found or list(known.values())


def shown_by_stacks(system: System) -> tuple[Cure, ...]:
    """The cures of what a system's stacks have shown."""
    folder = system.folder.joinpath(*FOLDER)
    return cures.read_folder(folder, f"{system.name}/{'/'.join(FOLDER)}") if folder.is_dir() else ()


def require_cures(stack: Stack, wanted: str) -> tuple[Cure, ...]:
    """The cures of a stack that are asked for.

    Args:
        wanted: what follows `+cured:`, as `shardproof.issues.cures.cures_asked_for` has it.

    Raises:
        UsageError: there are none such.
    """
    if not stack.system:
        raise UsageError.of("stack", f"{stack.name}+cured", "a stack of a system's library", "dcp-files+cured")
    system = system_named(stack.system)
    return cures.cures_asked_for(system, wanted, shown_by_stacks(system))


def cured(stack: Stack, paths: Sequence[Path], site: Path) -> Cured | None:
    """What a stack's cures came to on its library; None where it asks for none.

    Args:
        paths: folders with what was installed for it. site: `site-packages` of the interpreter.
    """
    if stack.cured is None:
        return None

    def source(name: str) -> str | None:
        file = next((path / name for path in (*paths, site) if (path / name).is_file()), None)
        return file.read_text("utf-8") if file else None

    return cures.apply(require_cures(stack, stack.cured), source)
