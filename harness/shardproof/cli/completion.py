"""Completion in a shell: the script for it, and what the words of scenarios, systems, axes and ids may be.

`shardproof completion bash` prints the script that click writes, which asks this program at each press of the Tab key.
So what is offered here is found without numpy and torch, in a tenth of a second.

The ids of results are those of `reports/latest`, or of the folder that `--out` named before them. Zsh and fish show the
title beside each, which is that of the failure's page: what makes titles needs numpy, and its work is done there.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click

from shardproof.errors import HarnessError

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

PROGRAM = "shardproof"
VARIABLE = "_SHARDPROOF_COMPLETE"
"""With this in its environment the command answers a shell that completes a line, and runs nothing."""
SHELLS = {
    "bash": 'eval "$(shardproof completion bash)"         # in ~/.bashrc',
    "zsh": 'eval "$(shardproof completion zsh)"          # in ~/.zshrc',
    "fish": "shardproof completion fish | source          # in ~/.config/fish/config.fish",
}
"""Shell → the line that turns completion on, and where it goes."""

MOST_IDS = 200
"""So many ids are offered; one more character is quicker than reading them."""

_SILENT = ("pass", "unsupported")
_TITLE = re.compile(rb"<title>(.*) \xc2\xb7 [^<]* \xc2\xb7 [0-9a-f]{12}</title>", re.DOTALL)
_HEAD_BYTES = 4096


def script(shell: str, command: click.Command) -> str:
    """The script that a shell has to run.

    Raises:
        HarnessError: click knows nothing of the shell.
    """
    from click.shell_completion import get_completion_class

    found = get_completion_class(shell)
    if found is None:
        raise HarnessError(f"this release of click cannot complete in {shell}")
    return f"# Turn this on with:  {SHELLS[shell]}\n" + found(command, {}, PROGRAM, VARIABLE).source()


def names(context: click.Context, parameter: click.Parameter, begun: str) -> list[CompletionItem]:
    """The scenario files that ship with shardproof; where none begins so, a shell offers files."""
    from click.shell_completion import CompletionItem

    from shardproof.space.files import space_names

    found = _beginning(begun, space_names())
    return found or [CompletionItem(begun, type="file")]


def results(context: click.Context, parameter: click.Parameter, begun: str) -> list[CompletionItem]:
    """The ids of results: of failures, or, where none begins so, of the others."""
    return _ids(context, begun, failures=True) or _ids(context, begun, failures=False)


def scenarios(context: click.Context, parameter: click.Parameter, begun: str) -> list[CompletionItem]:
    """The ids of failures; where none begins so, what `names` offers."""
    return _ids(context, begun, failures=True) or names(context, parameter, begun)


def _ids(context: click.Context, begun: str, *, failures: bool) -> list[CompletionItem]:
    """Ids of a folder's results that begin so, the newest first, with what is said of each."""
    from click.shell_completion import CompletionItem

    from shardproof.folders import LATEST, REPORTS

    folder = Path(context.params.get("out") or REPORTS / LATEST)
    found: dict[str, str] = {}
    for database in sorted(folder.glob("*.sqlite")):
        for key, verdict, signature in _stored(database, begun):
            if key not in found and (verdict not in _SILENT) is failures and len(found) < MOST_IDS:
                found[key] = _title(folder / "failures" / f"{key}.html") or signature or verdict
    return [CompletionItem(key, help=" ".join(told.split())) for key, told in found.items()]


def _stored(database: Path, begun: str) -> Iterator[tuple[str, str, str]]:
    """(id, verdict, signature) of the results in a database whose ids begin so, the newest first; nothing of a file
    that cannot be read, since a shell has no place for a complaint."""
    import sqlite3

    query = "SELECT scenario_id, verdict, signature FROM results WHERE substr(scenario_id, 1, ?) = ?"
    with (
        suppress(sqlite3.Error),
        closing(sqlite3.connect(f"{database.resolve().as_uri()}?mode=ro", uri=True)) as opened,
    ):
        for row in opened.execute(f"{query} ORDER BY rowid DESC", (len(begun), begun)):
            yield str(row[0]), str(row[1]), str(row[2])


def _title(page: Path) -> str:
    """The title of a failure's page; empty without one."""
    from html import unescape

    with suppress(OSError), page.open("rb") as file:
        if found := _TITLE.search(file.read(_HEAD_BYTES)):
            return unescape(found[1].decode("utf-8", "replace"))
    return ""


def systems(context: click.Context, parameter: click.Parameter, begun: str) -> list[CompletionItem]:
    """Systems, and behind an `@` the releases of one."""
    from shardproof.protocol.registry import all_systems
    from shardproof.protocol.releases import package

    name, at, _ = begun.partition("@")
    if not at:
        return _beginning(begun, [system.name for system in all_systems()])
    wanted = next((system.package for system in all_systems() if system.name == name), "")
    return _beginning(begun, [f"{name}@{release.version}" for release in package(wanted).releases]) if wanted else []


def settings(context: click.Context, parameter: click.Parameter, begun: str) -> list[CompletionItem]:
    """The axes, with the `=` that follows."""
    from shardproof.scenario import AXES

    return _beginning(begun, [f"{axis}=" for axis in AXES])


def faults(context: click.Context, parameter: click.Parameter, begun: str) -> list[CompletionItem]:
    """The faults that can be planted."""
    from shardproof.faults.boundary import BOUNDARY
    from shardproof.faults.catalogue import CATALOGUE

    return _beginning(begun, (*CATALOGUE, *BOUNDARY))


def stacks(context: click.Context, parameter: click.Parameter, begun: str) -> list[CompletionItem]:
    """The stacks that crashes and damage can be tried on."""
    from shardproof.resilience.stacks import all_stacks

    return _beginning(begun, all_stacks())


def _beginning(begun: str, words: Iterable[str]) -> list[CompletionItem]:
    from click.shell_completion import CompletionItem

    return [CompletionItem(word) for word in words if word.startswith(begun)]
