"""Asks a list of optimizers, and keeps what they answered: `python -m docs.written.optimizer_survey
docs/optimizers.toml`.

The file is a list of `[[optimizer]]` with a path and, where the constructor needs some, arguments. A survey adds to
each what it answered, with the release and the day, and writes the file after every one, so that it can be cut off and
gone on with: what has an answer is asked again only with `--again`. One laboratory serves all that are asked in one
call.
"""

from __future__ import annotations

import datetime
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import tomli_w
from shardproof.cli import options
from shardproof.errors import HarnessError, UsageError
from shardproof.laboratory.laboratory import Laboratory
from shardproof.optimizers import text
from shardproof.optimizers.examine import Examination, opened
from shardproof.optimizers.request import Asked

DEADLINE_S = 300.0
HEAD = (
    "# What optimizers answered. Written by "
    "python -m docs.written.optimizer_survey; docs/optimizers.md is made of it.\n\n"
)


def asked_of(entry: dict[str, Any]) -> Asked:
    """The optimizer of an entry of the file."""
    return Asked(entry["path"], tuple((name, str(value)) for name, value in entry.get("arguments", {}).items()))


def answered(laboratory: Laboratory, entry: dict[str, Any]) -> dict[str, Any]:
    """An entry with what its optimizer answered today."""
    kept: dict[str, Any] = {name: entry[name] for name in ("path", "arguments", "note") if name in entry}
    examination = Examination(laboratory, asked_of(entry))
    try:
        found = list(examination.answers())
    except (UsageError, HarnessError) as error:
        return {**kept, "date": _today(), "failed": " ".join(str(error).split())[:1000]}
    document = text.document(examination, found)
    return {
        **kept,
        **{name: document[name].partition("+")[0] for name in ("distribution", "version", "torch", "model")},
        "date": _today(),
        "answers": {one.question: one.said for one in found},
        "why": {one.question: one.why for one in found if one.why},
    }


def _today() -> str:
    return datetime.datetime.now(datetime.UTC).date().isoformat()


def read(path: Path) -> dict[str, Any]:
    """What a file holds: a list `optimizer`, and whatever else is kept there."""
    return tomllib.loads(path.read_text("utf-8"))


@click.command()
@click.argument("path", type=click.Path(path_type=Path, exists=True))
@click.option("--only", multiple=True, help="Those whose import path begins so; repeatable.")
@click.option("--again", is_flag=True, help="Also those that have an answer.")
@click.option("-j", "--jobs", type=options.JOBS, default=1, help="Runs at once.")
def survey(path: Path, only: Sequence[str], again: bool, jobs: int) -> None:
    """Ask the optimizers of a file, and write what they answer into it."""

    def wanted(entry: dict[str, Any]) -> bool:
        named = not only or entry["path"].startswith(tuple(only))
        return named and (again or "date" not in entry)

    todo = [n for n, entry in enumerate(read(path)["optimizer"]) if wanted(entry)]
    with opened(jobs, DEADLINE_S) as laboratory:
        for index in todo:
            entry = answered(laboratory, read(path)["optimizer"][index])
            document = read(path)  # another survey may have written meanwhile
            document["optimizer"][index] = entry
            path.write_text(HEAD + tomli_w.dumps(document), "utf-8")
            print(f"{entry['path']}: {entry.get('answers') or entry.get('failed')}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    survey()
