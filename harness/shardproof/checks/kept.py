"""What checks keep of the scenarios that they ran: results in a folder's database, as a run's, so that `shardproof
explain` and `shardproof replay` find them."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from shardproof.folders import at_work_in
from shardproof.laboratory.executor import installed_versions
from shardproof.result import Result
from shardproof.store import DATABASE, Store


def keep(folder: Path, results: Iterable[Result], command: Sequence[str] = ()) -> None:
    """Store results as a run of their own.

    Args:
        command: the arguments, for the record; those of this process without.

    Raises:
        UsageError: the folder cannot be written, or another run is at work in it.
    """
    every = list({result.id: result for result in results}.values())
    versions = installed_versions({result.system for result in every}, None)
    with at_work_in(folder), Store(folder / DATABASE) as store:
        run = store.begin_run(command or sys.argv[1:], 0, versions, planned=[result.scenario for result in every])
        store.finished_many(run, every)
        store.end_run(run)
