"""What `shardproof export --ready` does: every finding that is ready to send, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from shardproof.cli import arguments
from shardproof.export.job import Exported, export
from shardproof.export.ready import check, entry_name, page, ready
from shardproof.protocol.registry import all_systems, system_named
from shardproof.result import Result
from shardproof.scenario import Scenario
from shardproof.verdict import ExitStatus


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
    given = {clone.partition("=")[0] for clone in clones}
    findings = ready(all_systems())
    for number, finding in enumerate(findings, 1):
        system = system_named(finding.system)
        scenario = arguments.one_scenario(entry_name(finding), None, None, keep_version=True)

        def written(result: Result, known: str, own: Path) -> Exported:
            return export(result, known, own, python, cured=True)

        cloned = bool(given & {system.name, system.package})
        row = check(finding, folder / finding.id, scenario, examined, written, cloned=cloned)
        print(f"{number}/{len(findings)} {finding.id}: {row.script}; newest commit: {row.main}", flush=True)
        rows.append(row)
        (folder / "index.md").write_text(page(rows, datetime.now(UTC).date().isoformat(), folder), "utf-8")
    print(folder / "index.md")
    return ExitStatus.OK if all(row.sound for row in rows) else ExitStatus.FAILURE
