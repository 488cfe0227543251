"""Writes `reports/sample`, the report that is kept in git for whoever wants to see one before he runs anything.

    make sample                                    runs the smoke scenarios of torch-fsdp2 first
    python -m tests.sample reports/smoke           of a run that there is already

Paths of the machine that it ran on are no part of it: those below this repository are told from its root.
"""

from __future__ import annotations

import shutil
import sys
from dataclasses import replace
from pathlib import Path

from shardproof.cli.arguments import shipped_issues
from shardproof.report.files import write_reports
from shardproof.report.model import Report
from shardproof.result import Result
from shardproof.store import DATABASE, Store

ROOT = Path(__file__).parents[1]
SAMPLE = ROOT / "reports" / "sample"
COMMAND = ("run", "smoke", "--system", "torch-fsdp2")


def main(folder: Path) -> None:
    """Write the sample from a run's folder."""
    with Store(folder / DATABASE) as store:
        report = Report.from_store(store, store.runs()[-1].id, shipped_issues())
    results = tuple(_anywhere(result) for result in report.results)
    shutil.rmtree(SAMPLE, ignore_errors=True)
    write_reports(replace(report, results=results, run=replace(report.run, command=COMMAND), before={}), SAMPLE)


def _anywhere(result: Result) -> Result:
    """A result without the paths of a machine."""
    if result.error is None:
        return result
    trace = result.error.traceback.replace(f"{ROOT}/", "")
    return replace(result, error=replace(result.error, traceback=trace))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
