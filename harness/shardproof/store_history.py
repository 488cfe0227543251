"""Queries earlier runs in a results database for the outcomes of a run's scenarios.

A scenario is the same in two runs if its id is. The id of one that runs on a commit has the commit in it
(`megatron-core@git:5be9626`), and the next night runs on another commit. So these, and only these, are compared by what
they are without the commit.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from shardproof.verdict import Verdict
from shardproof.versions import split_cures

Read = Callable[..., list[tuple[Any, ...]]]
"""A query and its parameters → rows, as `shardproof.store.Store` reads them."""

_OF_COMMITS = "SELECT scenario_id FROM planned WHERE version LIKE 'git:%'"


@dataclass(frozen=True)
class Past:
    """The latest conclusive verdict of a scenario before some run."""

    run_id: str
    version: str
    verdict: Verdict
    signature: str


class Shown(NamedTuple):
    """What a scenario showed in a run.

    * scenario: which one; a scenario of a commit is the same one on another commit. id: of the scenario as it ran.
    * known: the known issue that its failure is due to. op, mechanism: the operation that failed and what explains it.
    """

    run: str
    scenario: str
    id: str
    verdict: str
    signature: str
    known: str | None
    system: str
    op: str | None
    mechanism: str | None


def before(read: Read, run_id: str) -> dict[str, Past]:
    """For every scenario of a run: its latest verdict in an earlier run, where that says pass or failure.

    `unsupported` and `unknown` say nothing about the system, so the search goes on past them.
    """
    rows = read(
        "SELECT r.scenario_id, r.run_id, r.version, r.verdict, r.signature, MAX(runs.sequence) FROM results r"
        " JOIN runs ON runs.id = r.run_id WHERE r.verdict NOT IN ('unsupported', 'unknown')"
        " AND runs.sequence < (SELECT sequence FROM runs WHERE id = ?)"
        " AND (r.scenario_id IN (SELECT scenario_id FROM planned WHERE run_id = ?)"
        f" OR r.scenario_id IN ({_OF_COMMITS})) GROUP BY r.scenario_id ORDER BY 6",
        run_id, run_id,
    )  # fmt: skip
    own = {scenario_id for scenario_id, _ in _of_commits(read, run_id)}
    same = _same(read, run_id)
    found = {}
    for scenario_id, run, version, verdict, signature, _ in rows:
        name = str(same.get(str(scenario_id), scenario_id))
        if scenario_id not in same or name in own:
            found[name] = Past(str(run), str(version), Verdict(verdict), str(signature))
    return found


def shown(read: Read, run_id: str) -> list[Shown]:
    """The outcomes of all scenarios with at least one failure, in each run up to the given run, oldest first. Runs in
    which the verdict was `unsupported` or `unknown` are left out."""
    rows = read(
        "SELECT r.run_id, r.scenario_id, r.scenario_id, r.verdict, r.signature, r.known_issue, r.system,"
        " CASE r.verdict WHEN 'pass' THEN NULL ELSE json_extract(r.content, '$.failed_op.name') END,"
        " CASE r.verdict WHEN 'pass' THEN NULL ELSE json_extract(r.content, '$.explanations[0].mechanism') END"
        " FROM results r JOIN runs ON runs.id = r.run_id WHERE r.verdict NOT IN ('unsupported', 'unknown')"
        " AND runs.sequence <= (SELECT sequence FROM runs WHERE id = ?) AND (r.scenario_id IN (SELECT scenario_id"
        " FROM results WHERE verdict NOT IN ('pass', 'unsupported', 'unknown'))"
        f" OR r.scenario_id IN ({_OF_COMMITS})) ORDER BY runs.sequence",
        run_id,
    )
    same = _same(read, run_id)
    every = [Shown(*row)._replace(scenario=same.get(str(row[1]), str(row[1]))) for row in rows]
    failing = {row.scenario for row in every if row.verdict != Verdict.PASS.value}
    return [row for row in every if row.scenario in failing]


def _same(read: Read, run_id: str) -> dict[str, str]:
    """Id of a scenario of a commit → the id that stands for it on every commit: that of the run, if it has it."""
    names: dict[str, str] = {}
    both = [*_of_commits(read, run_id), *_of_commits(read)]
    return {scenario_id: names.setdefault(without, scenario_id) for scenario_id, without in both}


def _of_commits(read: Read, run_id: str = "") -> list[tuple[str, str]]:
    """(id, the scenario without its commit) of the scenarios of commits that a run planned, or that all runs did."""
    rows = read(
        "SELECT DISTINCT scenario_id, version, scenario FROM planned WHERE version LIKE 'git:%'"
        + (" AND run_id = ?" if run_id else ""),
        *([run_id] if run_id else []),
    )
    return [(str(key), json.dumps([split_cures(version)[1], _without_version(text)])) for key, version, text in rows]


def _without_version(scenario: str) -> dict[str, Any]:
    return {axis: value for axis, value in json.loads(scenario).items() if axis != "version"}
