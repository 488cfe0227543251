"""What `shardproof export --ready` does: every finding that is ready to send, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from shardproof.cli import arguments
from shardproof.export.job import MARK, Exported, export
from shardproof.export.newest import Newest
from shardproof.export.ready import check, page, ready
from shardproof.protocol.registry import all_systems, system_named
from shardproof.report.publish import publish
from shardproof.result import Result
from shardproof.scenario import Scenario
from shardproof.verdict import ExitStatus

PAGE = "index.md"


def is_cloned(system: str, clones: Sequence[str]) -> bool:
    """Whether one of `--clone NAME=DIR` is of the library of the system of that name."""
    return bool({clone.partition("=")[0] for clone in clones} & {system, system_named(system).under_test})


def export_ready(
    folder: Path, examined: Callable[[Scenario], Result], python: str | None, clones: Sequence[str],
    say: Callable[[str], None],
) -> ExitStatus:  # fmt: skip
    """Export the findings that are ready, and write `index.md` beside them. A line is printed for each as it is done.

    Args:
        examined: runs a scenario. clones: of `--clone`, `NAME=DIR`. say: is told what begins, in a line.

    Returns:
        FAILURE where one cannot be sent: its script does not show it any more, or it is gone on the newest commit.
    """
    rows = []

    def written(result: Result, known: str, folder: Path, newest: Newest) -> Exported:
        return export(result, known, folder, python, cured=True, newest=newest, say=say)

    findings = ready(all_systems())
    for number, finding in enumerate(findings, 1):
        scenario = arguments.one_scenario(finding.scenarios[0], None, None, keep_version=True)
        row = check(finding, folder / finding.id, scenario, examined, written, cloned=is_cloned(finding.system, clones))
        print(f"{number}/{len(findings)} {finding.id}: {row.script}; newest commit: {row.main}", flush=True)
        rows.append(row)
        publish(folder / PAGE, page(rows, datetime.now(UTC).date().isoformat(), folder))
        (folder / MARK).touch()
    print(folder / PAGE)
    return ExitStatus.OK if all(row.sound for row in rows) else ExitStatus.FAILURE
