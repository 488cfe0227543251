"""The JSON report: one object with `run` and `results`, by the command line's contract."""

from __future__ import annotations

import json
from typing import Any

from shardproof.codec import to_plain
from shardproof.report.head_results import Head
from shardproof.report.model import Report
from shardproof.store import Run


def to_json(report: Report) -> dict[str, Any]:
    """The whole report in JSON types. Keys may be added, never renamed."""
    return {
        "run": _run(report),
        "results": [_result(report, r.to_json(), report.emulated_only(r)) for r in report.results],
    }


def render_json(report: Report) -> str:
    """`to_json` as text: one result a line, so that it can be read with line tools and diffs well."""
    document = to_json(report)
    results = ",\n".join(json.dumps(result, allow_nan=False) for result in document["results"])
    run = json.dumps(document["run"], indent=1, allow_nan=False)
    return f'{{"run": {run},\n"results": [\n{results}\n]}}\n'


def _run(report: Report) -> dict[str, Any]:
    run: Run = report.run
    return {
        "id": run.id,
        "versions": dict(run.versions),
        "seed": run.seed,
        "command": list(run.command),
        "counts": {verdict.value: n for verdict, n in report.counts.items()},
        "standings": {standing.value: n for standing, n in report.standings.items()},
        "known": report.known,
        "known_by_face": report.by_face,
        "changes": {change.value: n for change, n in report.changes().items()},
        "causes": {
            **{standing.value: n for standing, n in report.causes.items()},
            **({turn: len(traces) for turn, traces in report.history.tonight.items()} if report.before else {}),
        },
        "missing": [scenario.id for scenario in report.missing],
        "exclusions": dict(run.exclusions),
        "emulated": list(report.emulated),
        "devices": list(report.devices),
        "not_exercised": list(report.not_exercised),
        "outside_support": dict(report.outside_support),
        "cured": dict(report.cured),
        "heads": [_head(head) for head in report.heads],
        "started_at": run.started_at,
        "ended_at": run.ended_at,
    }


def _head(head: Head) -> dict[str, Any]:
    return {
        "system": head.system,
        "version": head.version,
        "scenarios": head.scenarios,
        "unknown": dict(head.unknown),
        "lost": head.lost.lost,
        "lost_beside": head.lost.newest,
        "lost_reasons": dict(head.lost.reasons),
        "cures": [to_plain(check) for check in head.checks],
    }


def _result(report: Report, data: dict[str, Any], emulated_only: bool) -> dict[str, Any]:
    past = report.before.get(data["id"])
    previous = None if past is None else {"run": past.run_id, "verdict": past.verdict.value}
    return {**data, "previous": previous, "emulated_only": emulated_only}
