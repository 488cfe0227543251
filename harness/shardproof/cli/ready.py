"""What `shardproof export --ready` does: every finding that is ready to send, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from shardproof.cli import arguments
from shardproof.export.job import MARK, export
from shardproof.export.ready import check, page, ready
from shardproof.protocol.registry import all_systems, system_named
from shardproof.report.publish import publish
from shardproof.result import Result
from shardproof.scenario import Scenario
from shardproof.verdict import ExitStatus

PAGE = "index.md"


def export_ready(
    folder: Path, examined: Callable[[Scenario], Result], python: str | None, clones: Sequence[str]
) -> ExitStatus:
    """Export the findings that are ready, and write `index.md` beside them. A line is printed for each as it is done.

    Args:
        examined: runs a scenario. clones: of `--clone`, `NAME=DIR`.

    Returns:
        FAILURE where one cannot be sent: its script does not show it any more, or it is gone on the newest commit.
    """
    rows = []
    written = partial(export, python=python, cured=True)
    given = {clone.partition("=")[0] for clone in clones}
    findings = ready(all_systems())
    for number, finding in enumerate(findings, 1):
        system = system_named(finding.system)
        scenario = arguments.one_scenario(finding.scenarios[0], None, None, keep_version=True)
        cloned = bool(given & {system.name, system.package})
        row = check(finding, folder / finding.id, scenario, examined, written, cloned=cloned)
        print(f"{number}/{len(findings)} {finding.id}: {row.script}; newest commit: {row.main}", flush=True)
        rows.append(row)
        publish(folder / PAGE, page(rows, datetime.now(UTC).date().isoformat(), folder))
        (folder / MARK).touch()
    print(folder / PAGE)
    return ExitStatus.OK if all(row.sound for row in rows) else ExitStatus.FAILURE
