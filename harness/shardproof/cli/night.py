"""`shardproof night`, for the nightly job of a library's own maintainers: tests what the last day's commits changed."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from shardproof.cli import arguments, completion, options
from shardproof.errors import UsageError, printable
from shardproof.protocol.plugin_modules import load_plugins
from shardproof.world import preflight

if TYPE_CHECKING:
    from shardproof.heads.night import Ran


@click.command()
@click.argument("name", metavar="SYSTEM", shell_complete=completion.systems)
@click.option("--now", default="HEAD", show_default=True, metavar="REV", help="Tonight's commit of the clone.")
@click.option("--last", default="", metavar="REV", help="That of the night before [as the folder knows it].")
@click.option("--sample", type=options.SAMPLE, default=300, show_default=True, help="Scenarios of the walk.")
@click.option("--budget-s", type=options.LIMIT_S, default=1200.0, show_default=True, help="Seconds for all bisections.")
@click.option("--walk", "names", multiple=True, default=("nightly",), metavar="NAME", help="What to walk [nightly].")
@click.option("-j", "--jobs", type=options.JOBS, default=None, help="Scenarios at once [cores + 1].")
@options.clone
@click.option(
    "--out", type=click.Path(path_type=Path), metavar="DIR", help="Folder of all nights [reports/night-SYSTEM]."
)
@options.plugin
def night(
    name: str, now: str, last: str, sample: int, budget_s: float, names: tuple[str, ...], jobs: int | None,
    clones: tuple[str, ...], out: Path | None, plugins: tuple[str, ...],
) -> int:  # fmt: skip
    """Say what last night's commits did to a library: port, walk, bisect what is new, and write an issue for it.

    The folder keeps every night: its history, the commit of the last one, and issues/ID.md for each new cause.

    \b
    shardproof night megatron-core --now main --clone megatron-core=../Megatron-LM
    shardproof night deepspeed --last v0.19.7 --now v0.19.8 --clone deepspeed=../DeepSpeed --out reports/night

    Exit status: 0 nothing came tonight, 1 a new cause did, 2 bad input, 3 something of ours does not fit.
    """
    from shardproof.folders import REPORTS, at_work_in
    from shardproof.heads.night import Asked, commits_of_night
    from shardproof.heads.night import night as look
    from shardproof.heads.night_text import write_night
    from shardproof.protocol.registry import all_systems, system_named
    from shardproof.protocol.releases import package_of

    load_plugins(plugins)
    preflight.use_clones(clones)
    system = system_named(name)
    if not system.package:
        raise UsageError.of("SYSTEM", name, [each.name for each in all_systems() if each.package], "megatron-core")
    folder = arguments.writable_folder(out or REPORTS / f"night-{name}")
    common = [word for plugin in plugins for word in ("--plugin", plugin)]
    asked = Asked(
        system=system, package=package_of(system), last=last, now=now, out=folder, sample=sample, budget_s=budget_s,
        jobs=jobs or (os.cpu_count() or 1) + 1, common=tuple(common), names=names,
    )  # fmt: skip
    with at_work_in(folder):
        found = look(asked, _command, arguments.shipped_issues())
        summary = write_night(found, commits_of_night(asked.package, found), folder)
    print(printable(summary.read_text("utf-8").split("### shardproof run ")[0].rstrip()))
    print(f"summary: {printable(str(summary))}")
    return found.status


def _command(words: Sequence[str]) -> Ran:
    """Run a command of shardproof's in a process of its own, which finds the clones in its environment."""
    import shlex
    import subprocess

    from shardproof.heads.night import Ran

    print(f"$ shardproof {printable(shlex.join(words))}", file=sys.stderr, flush=True)
    with subprocess.Popen(
        [sys.executable, "-m", "shardproof", *words], stderr=subprocess.PIPE, stdout=sys.stderr, text=True,
        errors="replace",
    ) as running:  # fmt: skip
        last = ""
        for line in running.stderr or ():
            print(line, end="", file=sys.stderr, flush=True)
            last = line.strip() or last
        return Ran(running.wait(), last.removeprefix("shardproof: "))
