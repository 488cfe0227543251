"""The commands that show what is stored: runs (report, history and merge), and what is known of defects."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import click

from shardproof.cli import arguments, options
from shardproof.errors import UsageError, printable
from shardproof.protocol.plugin_modules import load_plugins
from shardproof.verdict import ExitStatus


@click.command()
@click.argument("folder", type=click.Path(path_type=Path), metavar="RUN")
@options.json
@options.junit
def report(folder: Path, json_file: Path | None, junit_file: Path | None) -> int:
    """Write the reports of the latest run in a folder again.

    \b
    shardproof report reports/nightly --json nightly.json
    """
    from shardproof.report.files import write_reports
    from shardproof.report.model import Report
    from shardproof.report.text import render_text, wants_colour
    from shardproof.store import DATABASE, Store

    load_plugins(())
    if not (folder / DATABASE).is_file():
        raise _without_runs("RUN", folder, "report")
    arguments.require_output_files(folder, json=json_file, junit=junit_file)
    with Store(folder / DATABASE) as store:
        latest = store.latest_run()
        if latest is None:
            raise UsageError.of("RUN", str(folder), "a database with a run", "shardproof report reports/nightly")
        found = replace(Report.from_store(store, latest, arguments.shipped_issues()), folder=str(folder))
    page = write_reports(found, folder, json_file, junit_file)
    print(render_text(found, page, wants_colour(sys.stdout, os.environ)), end="")
    return ExitStatus.OK


def _without_runs(what: str, folder: Path, command: str) -> UsageError:
    """The error about a folder without a run: which folders have one, and otherwise how one is made."""
    from shardproof.folders import LATEST, REPORTS
    from shardproof.store import DATABASE

    there = [str(path.parent) for path in sorted(REPORTS.glob(f"*/{DATABASE}")) if path.parent.name != LATEST]
    form = (
        f"shardproof {command} {there[0]}"
        if there
        else f"shardproof run smoke, then shardproof {command} reports/smoke"
    )
    allowed = f"a folder with a {DATABASE}{': ' if there else ''}{', '.join(there[:MOST_NAMED])}"
    return UsageError.of(what, str(folder), allowed, form, there)


MOST_NAMED = 5
"""So many folders with runs are listed in an error."""


@click.command()
@click.argument("folder", type=click.Path(path_type=Path), metavar="FOLDER")
@click.option(
    "--nights", type=options.NIGHTS, default=30, show_default=True, help="So many runs at most, the latest ones."
)
@options.json
def history(folder: Path, nights: int, json_file: Path | None) -> int:
    """Show what came and went in the runs of a folder: which failures are new, recurring, fixed or flaky.

    \b
    shardproof history reports/nightly
    shardproof history reports/nightly --nights 90 --json history.json
    """
    from shardproof.report.history import history_of
    from shardproof.report.history_text import render_history
    from shardproof.report.html import write_history
    from shardproof.report.publish import write_json
    from shardproof.report.text import wants_colour
    from shardproof.store import DATABASE, Store

    load_plugins(())
    form = "shardproof history reports/nightly"
    if not (folder / DATABASE).is_file():
        raise _without_runs("FOLDER", folder, "history")
    arguments.require_output_files(folder, json=json_file)
    with Store(folder / DATABASE) as store:
        latest = store.latest_run()
        if latest is None:
            raise UsageError.of("FOLDER", str(folder), "a database with a run", form)
        found = history_of(store, latest, nights, least=1)
    page = write_history(found, folder)
    print(render_history(found, str(folder), str(page), wants_colour(sys.stdout, os.environ)), end="")
    write_json(json_file, {"folder": str(folder), **found.to_json()})
    return ExitStatus.OK


@click.command()
@click.argument("folders", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="RUN...")
@click.option(
    "--out", type=click.Path(path_type=Path), required=True, metavar="DIR", help="Folder of the joined results."
)
@options.json
@options.junit
def merge(folders: tuple[Path, ...], out: Path, json_file: Path | None, junit_file: Path | None) -> int:
    """Join the latest runs of several folders, such as the parts of --shard, into one report. A part of a --shard that
    is not among them is named, and the exit status is 3.

    \b
    shardproof merge part0 part1 part2 --out reports/nightly
    """
    from shardproof.folders import at_work_in
    from shardproof.merge import absent_parts, merge_runs, read_parts
    from shardproof.report.files import write_reports
    from shardproof.report.text import render_text, wants_colour
    from shardproof.request import Outcome
    from shardproof.store import DATABASE

    load_plugins(())
    parts = read_parts([folder / DATABASE for folder in folders])
    arguments.require_output_files(out, json=json_file, junit=junit_file)
    with at_work_in(arguments.writable_folder(out)):
        found = merge_runs(parts, out / DATABASE, arguments.shipped_issues())
        page = write_reports(found, out, json_file, junit_file)
    print(render_text(found, page, wants_colour(sys.stdout, os.environ)), end="")
    absent = absent_parts(parts)
    for part in absent:
        print(f"shardproof: a part is absent: {printable(part)}", file=sys.stderr)
    return ExitStatus.HARNESS if absent else Outcome(found, page, interrupted=False).status


@click.command()
@click.argument("words", nargs=-1, metavar="[WORD]...")
@options.plugin
def known(words: tuple[str, ...], plugins: tuple[str, ...]) -> int:
    """Say what is known of a defect: by its upstream number or address, or by words.

    Every entry that has all of them is told with the commands that show it, and that run it cured; without words, one
    line for each entry.

    \b
    shardproof known 3949
    shardproof known https://github.com/NVIDIA/Megatron-LM/issues/2777
    shardproof known deepspeed offload
    """
    from shardproof.issues.lookup import described, lookup, planted
    from shardproof.protocol.registry import all_systems
    from shardproof.trainer.system import shipped

    load_plugins(plugins)
    trainers = {name: str(file) for name, file in shipped().items()}
    findings, faults = lookup(words, all_systems())
    if not findings and not faults:
        each = {word: lookup([word], all_systems()) for word in words}
        numbers = {word: len(of) + len(also) for word, (of, also) in each.items()}
        alone = ", ".join(f"{word!r} is in {number or 'no'} entr{'y' if number == 1 else 'ies'}" for word, number in
                          numbers.items())  # fmt: skip
        allowed = f"a number, an address or words that one entry has together; `shardproof known` lists them; {alone}"
        raise UsageError.of("WORD", " ".join(words), allowed, "shardproof known 2777")
    if not words:
        print("\n".join(f"{finding.id:<42} {finding.novelty.harm}" for finding in findings))
        return ExitStatus.OK
    told = (described(each, trainers.get(each.system, "")) for each in findings)
    blocks = [*told, *map(planted, faults)]
    print("\n\n".join("\n".join(block) for block in blocks))
    return ExitStatus.OK
