"""Finds and imports the modules of plugins: those that installed packages name, and those of `--plugin`."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from shardproof.entry import resolve
from shardproof.errors import MOST_GIVEN, UsageError

PLUGINS = "shardproof.plugins"
"""The entry-point group in which an installed package names its plugin's module."""


def installed_plugins() -> list[str]:
    """The modules of installed plugins.

    `importlib.metadata` takes longer to import than all of this takes, so that it is asked only where a package that
    `sys.path` shows has the group's name in its entry points, or where something else than a folder may hold packages.
    """
    finders = [finder for finder in sys.meta_path if hasattr(finder, "find_distributions")]
    folders = [Path(entry or ".") for entry in sys.path]
    if len(finders) == 1 and not any(folder.is_file() or _names_plugins(folder) for folder in folders):
        return []
    from importlib.metadata import entry_points

    return [point.module for point in entry_points(group=PLUGINS)]


def _names_plugins(folder: Path) -> bool:
    """Whether the metadata of some package in a folder names the group."""
    files = [*folder.glob("*.dist-info/entry_points.txt"), *folder.glob("*.egg-info/entry_points.txt")]
    return any(PLUGINS.encode() in file.read_bytes() for file in files)


def load_plugins(modules: Sequence[str]) -> tuple[str, ...]:
    """Import installed plugins and those named, which register their systems, models, faults and rules.

    Returns all their modules, for the ranks to import too. A module beside the user is found, here and in the ranks,
    but no other module gives way to one that lies there.
    """
    if modules and not {"", os.getcwd()} & set(sys.path):
        sys.path.append(os.getcwd())
    installed = installed_plugins()
    wanted = tuple(dict.fromkeys((*installed, *modules)))
    for module in wanted:
        try:
            import_plugin(module)
            _require_whole()
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            if isinstance(error, UsageError) and _is_file(module):
                raise
            why = " ".join(f"{type(error).__name__}: {error}".split())[:MOST_GIVEN]
            raise UsageError.of(
                "--plugin" if module in modules else f"installed plugin (entry-point group {PLUGINS})",
                module,
                f"a module that imports ({why})",
                "--plugin my_package.my_rules",
            ) from error
    return wanted


def import_plugin(text: str) -> None:
    """Import a plugin's module; of a trainer's file, `FILE.py[:CLASS]`, have the trainer known as a system.

    Raises:
        UsageError: the file has no trainer. Whatever the module's own code raises.
    """
    if _is_file(text):
        resolve(TRAINERS)(text)
    else:
        import_module(text)


TRAINERS = "shardproof.trainer.system:register"
"""What makes a system of a trainer's file."""


def _is_file(text: str) -> bool:
    """Whether a plugin's name is a trainer's file."""
    return re.search(r"\.py(:\w*)?$", text) is not None


def _require_whole() -> None:
    """Check the table of models after a plugin was imported: each entry is a `ModelSpec` under its own name.

    Raises:
        TypeError: the plugin put something else into the table.
    """
    from shardproof.models import ZOO, ModelSpec

    for name, model in ZOO.items():
        if not isinstance(model, ModelSpec) or model.name != name:
            raise TypeError(f"it made model {name!r} {model!r}, which is no model of that name")
