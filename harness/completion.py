"""Completion in a shell: the script for it, and what the words of scenarios, systems and axes may be.

`shardproof completion bash` prints the script that click writes, which asks this program at each press of the Tab key.
So what is offered here is found without numpy and torch, in a tenth of a second.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import click

from harness.errors import HarnessError

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

PROGRAM = "shardproof"
SHELLS = {
    "bash": 'eval "$(shardproof completion bash)"         # in ~/.bashrc',
    "zsh": 'eval "$(shardproof completion zsh)"          # in ~/.zshrc',
    "fish": "shardproof completion fish | source          # in ~/.config/fish/config.fish",
}
"""Shell → the line that turns completion on, and where it goes."""


def script(shell: str, command: click.Command) -> str:
    """The script that a shell has to run.

    Raises:
        HarnessError: click knows nothing of the shell.
    """
    from click.shell_completion import get_completion_class

    found = get_completion_class(shell)
    if found is None:
        raise HarnessError(f"this release of click cannot complete in {shell}")
    return f"# Turn this on with:  {SHELLS[shell]}\n" + found(command, {}, PROGRAM, "_SHARDPROOF_COMPLETE").source()


def names(context: click.Context, parameter: click.Parameter, begun: str) -> list[CompletionItem]:
    """The scenario files that ship with shardproof; where none begins so, a shell offers files."""
    from click.shell_completion import CompletionItem

    from harness.space.files import space_names

    found = _beginning(begun, space_names())
    return found or [CompletionItem(begun, type="file")]


def systems(context: click.Context, parameter: click.Parameter, begun: str) -> list[CompletionItem]:
    """Systems, and behind an `@` the releases of one."""
    from harness.releases import package
    from harness.systems.registry import all_systems

    name, at, _ = begun.partition("@")
    if not at:
        return _beginning(begun, [system.name for system in all_systems()])
    wanted = next((system.package for system in all_systems() if system.name == name), "")
    return _beginning(begun, [f"{name}@{release.version}" for release in package(wanted).releases]) if wanted else []


def settings(context: click.Context, parameter: click.Parameter, begun: str) -> list[CompletionItem]:
    """The axes, with the `=` that follows."""
    from harness.scenario import AXES

    return _beginning(begun, [f"{axis}=" for axis in AXES])


def faults(context: click.Context, parameter: click.Parameter, begun: str) -> list[CompletionItem]:
    """The faults that can be planted."""
    from harness.faults.boundary import BOUNDARY
    from harness.faults.catalogue import CATALOGUE

    return _beginning(begun, (*CATALOGUE, *BOUNDARY))


def _beginning(begun: str, words: Iterable[str]) -> list[CompletionItem]:
    from click.shell_completion import CompletionItem

    return [CompletionItem(word) for word in words if word.startswith(begun)]
