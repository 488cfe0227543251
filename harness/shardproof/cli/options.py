"""Options of the command line that several commands share."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from shardproof.cli import completion
from shardproof.errors import UsageError
from shardproof.plain_values import number

DAY_S = 86400.0


class Whole(click.IntRange):
    """A whole number between two bounds, in the digits 0 to 9; python would take those of every script."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        _require_number(self, value, int, param, ctx)
        found: int = super().convert(value, param, ctx)
        return found


class Number(click.FloatRange):
    """A number between two bounds, in the digits 0 to 9; not `nan`, which is between none."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        _require_number(self, value, float, param, ctx)
        found: float = super().convert(value, param, ctx)
        return found


def _require_number(
    asking: click.ParamType[Any], value: object, to: type, param: click.Parameter | None, ctx: click.Context | None
) -> None:
    if isinstance(value, str):
        try:
            number(value, to)
        except ValueError:
            asking.fail(f"{value!r} is not a valid {'integer' if to is int else 'number'}.", param, ctx)


SEED = Whole(min=-(2**63), max=2**63 - 1)
SAMPLE = Whole(min=1, max=1_000_000)
JOBS = Whole(min=1, max=1024)
TIMES = Whole(min=1, max=1_000_000)
NIGHTS = Whole(min=1, max=1000)
DEADLINE_S = Number(min=0.1, max=DAY_S)
LIMIT_S = Number(min=0.0, max=7 * DAY_S)
"""What numbers on the command line may be. The bounds are far above all use, so that a slip of the keyboard is told."""


def require_words(words: tuple[str, ...]) -> None:
    """Check what holds for every word of every command: none is empty, and each is text.

    Raises:
        UsageError: one is empty, is an option with nothing behind its `=`, or is not in UTF-8.
    """
    for word in words:
        if not word or re.fullmatch(r"--[a-z-]+=", word):
            raise UsageError.of("argument", word, "no empty words and values", "shardproof run smoke")
        if not word.isprintable() and any("\ud800" <= character <= "\udfff" for character in word):
            raise UsageError.of("argument", word, "text in UTF-8", "shardproof run smoke")


plugin = click.option(
    "--plugin", "plugins", multiple=True, metavar="MODULE", help="Import this module first; repeatable."
)
quiet = click.option("-q", "--quiet", is_flag=True, help="No progress.")
json = click.option("--json", "json_file", type=click.Path(path_type=Path), metavar="FILE", help="Also write JSON.")
junit = click.option(
    "--junit", "junit_file", type=click.Path(path_type=Path), metavar="FILE", help="Also write JUnit XML."
)
deadline = click.option(
    "--deadline-s", type=DEADLINE_S, default=30.0, show_default=True, help="Seconds a session may take."
)
either_deadline = click.option(
    "--deadline-s", type=DEADLINE_S, help="Seconds a session may take [30], or a run of --command [900]."
)
SESSION_S, COMMAND_S = 30.0, 900.0
"""How long a session may take, and how long a run of a command."""
database = click.option("--out", type=click.Path(path_type=Path), metavar="DIR", help="Folder whose database knows ID.")


def executor(command: click.decorators.FC) -> click.decorators.FC:
    """The options that say where scenarios run: on this machine, or on a cluster."""
    where = click.option(
        "--executor", type=click.Choice(["local", "ray"]), default="local", show_default=True,
        help="Where scenarios run.",
    )  # fmt: skip
    address = click.option(
        "--ray-address", metavar="HOST:PORT", help="A running Ray cluster [one that Ray finds, or one of this machine]."
    )
    return where(address(command))


def script(command: click.decorators.FC) -> click.decorators.FC:
    """The options that put a training script, as a command with places in it, in the place of FILE or STACK."""
    every = (
        click.option("--command", metavar="TEXT",
                     help="A training script in their place, with {folder} and {until} in it."),
        click.option("--steps", default="2,4", metavar="CUT,WHOLE", show_default=True,
                     help="With --command: what {until} is in a run that is cut, and in a whole one."),
        click.option("--world", default="", metavar="N[,N]",
                     help="With --command: {world}, how many ranks train, and how many resume too [2,1]."),
        click.option("--resume", default="", metavar="TEXT",
                     help="With --command: {resume} where a run resumes; may have {checkpoint} in it."),
    )  # fmt: skip
    for option in reversed(every):
        command = option(command)
    return command


OF_COMMANDS = ("steps", "world", "resume")
"""Names of the options that say more about a command."""


def require_one_of_both(context: click.Context, names: str, given: Sequence[str], of_both: Sequence[str]) -> None:
    """Check that there is a command or something else, and no option of the other.

    Args:
        names: what the argument is called. given: its values. of_both: names of options that go with either.

    Raises:
        UsageError: there are both, or an option of the other is given.
    """
    command = context.params["command"]
    form = f"{context.command_path} --command 'python train.py --out {{folder}} --max-steps {{until}}'"
    if given and command is not None:
        raise UsageError.of(f"{names}, --command", " ".join(given), f"{names} or one --command", form)
    for param in context.command.params:
        name = param.name or ""
        apart = name not in (*OF_COMMANDS, *of_both, "command") if command is not None else name in OF_COMMANDS
        if apart and context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE:
            goes = f"with {names} only" if command is not None else "with --command only"
            raise UsageError.of("option", param.opts[-1], f"{param.opts[-1]} goes {goes}", form)


def python(command: click.decorators.FC) -> click.decorators.FC:
    """The options that choose the interpreter of the ranks: a command gets its path as `python`."""
    path = click.option("--python", default=None, metavar="PATH", is_eager=True, help="Interpreter of the ranks.")
    torch = click.option(
        "--torch", metavar="VERSION", expose_value=False, callback=_with_torch,
        help="Another release of torch for ranks and judges, installed on the spot; '<=V': the newest up to V.",
    )  # fmt: skip
    return path(torch(command))


def _with_torch(context: click.Context, _: click.Parameter, version: str | None) -> None:
    """Put the interpreter that has a release of torch in the place of the chosen one."""
    if version is not None:
        from shardproof.world.commands import OverlayError
        from shardproof.world.interpreter import interpreter
        from shardproof.world.torches import newest_torch, with_torch

        made = newest_torch if version.startswith("<=") else with_torch
        try:
            found = made(version.removeprefix("<="), interpreter(context.params.get("python")))
        except OverlayError as error:
            if "No matching distribution found" not in str(error):
                raise
            allowed = "a release that pip finds for this Python"
            raise UsageError.of("--torch", version, allowed, f"--torch 2.15.0\n{error}") from None
        context.params["python"] = found.path


def _with_max_world(context: click.Context, option: click.Parameter, ranks: int | None) -> None:
    """Set the largest world size that a run may use, for this process and its children, by an environment variable."""
    if ranks is not None:
        import os

        from shardproof.world.bounds import VARIABLE

        os.environ[VARIABLE] = str(ranks)


max_world = click.option(
    "--max-world", type=click.IntRange(min=1), metavar="N", expose_value=False, callback=_with_max_world,
    help="Ranks that a world may have [16; 256 where they are simulated].",
)  # fmt: skip
clone = click.option(
    "--clone",
    "clones",
    multiple=True,
    metavar="NAME=DIR",
    help="Repository of a system or package, bare or not, for NAME@git:REV; repeatable.",
)
system = click.option(
    "--system", metavar="NAME", shell_complete=completion.systems, help="The library; default: the scenario's."
)


def selection(command: click.decorators.FC) -> click.decorators.FC:
    """The options that choose scenarios, shared by `run` and `plan`."""
    chosen = (
        click.argument("names", nargs=-1, metavar="[NAME | FILE.toml]...", shell_complete=completion.names),
        click.option(
            "--system",
            "systems",
            multiple=True,
            metavar="NAME[@VERSION]",
            shell_complete=completion.systems,
            help="Only this; VERSION a release, path:DIR or git:REV; repeatable.",
        ),
        click.option(
            "--set", "sets", multiple=True, metavar="AXIS=V[,V]...", shell_complete=completion.settings,
            help="Override an axis; repeatable.",
        ),
        click.option("--strength", metavar="all|2|3|...", help="How many axes interact in the covering array."),
        click.option("--sample", type=SAMPLE, metavar="N", help="N scenarios in all, drawn by --seed."),
        click.option("--seed", type=SEED, default=0, show_default=True, help="Seed of arrays and samples."),
        click.option(
            "--fault", "faults", multiple=True, metavar="ID", shell_complete=completion.faults,
            help="Plant a fault; repeatable.",
        ),
        click.option(
            "--shard", metavar="I/N",
            help="The I-th of N parts, by scenario id; tonight/N: this date's, so that N nights walk all.",
        ),
        max_world,
        plugin,
    )  # fmt: skip
    for option in reversed(chosen):
        command = option(command)
    return command
