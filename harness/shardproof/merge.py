"""Joins the runs of several shards, or of the jobs of a matrix, into one: `shardproof merge part1 part2 --out all`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from shardproof.errors import UsageError
from shardproof.issues.cure_check import CureCheck
from shardproof.issues.known_issues import KnownIssues
from shardproof.protocol.registry import all_systems
from shardproof.report.model import Report
from shardproof.result import Result
from shardproof.scenario import Scenario
from shardproof.store import DATABASE, Run, Store

Part = tuple[Run, list[Scenario], list[Result], list[CureCheck]]


def read_parts(databases: Sequence[Path]) -> list[Part]:
    """The latest run of each database, with what it planned and its results.

    Raises:
        UsageError: one of them is no database of ours, holds no run, or shares scenarios with another.
    """
    parts: list[Part] = []
    for database in databases:
        if not database.is_file():
            raise UsageError.of(
                "RUN", str(database.parent), f"a folder with a {DATABASE}", "shardproof merge part1 part2 --out all"
            )
        with Store(database) as store:
            latest = store.latest_run()
            if latest is None:
                raise UsageError.of(
                    "RUN", str(database.parent), "a folder with a run", "shardproof merge part1 part2 --out all"
                )
            found = (store.planned(latest), store.results(latest), store.cure_checks(latest))
            parts.append((store.run(latest), *found))
    _require_apart(parts)
    return parts


def _require_apart(parts: Sequence[Part]) -> None:
    """Check that parts belong together: they ran on the same torch and the like, and no scenario is in two of them.

    Raises:
        UsageError: they do not.
    """
    form = "shardproof merge part1 part2 --out all"
    common = [_environment(run) for run, *_ in parts]
    for found in common:
        if found != common[0]:
            raise UsageError.of("versions of a part", found, common[0].items(), form)
    ids = Counter(scenario.id for _, planned, *_ in parts for scenario in planned)
    twice = [scenario_id for scenario_id, times in ids.items() if times > 1]
    if twice:
        raise UsageError.of("scenarios in several parts", twice[:3], "each scenario in one part", form)


def _environment(run: Run) -> dict[str, str]:
    """The versions that all parts of a run have in common: not those of what is under test, which a matrix of jobs
    varies, and which every result names for itself."""
    own = {name for system in all_systems() for name in (*system.distributions, system.under_test)}
    return {name: version for name, version in run.versions.items() if name not in own or name == "torch"}


def absent_parts(parts: Sequence[Part]) -> list[str]:
    """The parts that are not there: where a run was `--shard 1/4` of some selection, the others of the four that
    nobody handed in, as the words that would run them."""
    found: dict[tuple[str, ...], set[str]] = {}
    for run, *_ in parts:
        asked, shard = _without_shard(run.command)
        if shard:
            found.setdefault(asked, set()).add(shard)
    return [
        " ".join((*asked, "--shard", f"{number}/{shard.partition('/')[2]}"))
        for asked, shards in found.items()
        for shard in sorted(shards)[:1]
        for number in range(1, int(shard.partition("/")[2]) + 1)
        if f"{number}/{shard.partition('/')[2]}" not in shards
    ]


_WHERE = ("--out", "--json", "--junit", "-j", "--jobs", "--executor", "--ray-address")
"""Options of a run that do not change what runs."""


def _without_shard(command: Sequence[str]) -> tuple[tuple[str, ...], str]:
    """The words of a command that say what runs, without its `--shard`, and the value of that."""
    words = iter([part for word in command for part in (word.split("=", 1) if word.startswith("--") else [word])])
    kept, shard = [], ""
    for word in words:
        if word == "--shard":
            shard = next(words, "")
        elif word in _WHERE:
            next(words, "")
        elif not re.fullmatch("-j[0-9]+", word):
            kept.append(word)
    return tuple(kept), shard


def _releases(parts: Sequence[Part], run: Run) -> dict[str, str]:
    """The versions of a run, and with them what other parts ran of the same."""
    return {
        name: ", ".join(dict.fromkeys(other.versions[name] for other, *_ in parts if name in other.versions))
        for name in run.versions
    }


def merge_runs(parts: Sequence[Part], target: Path, known: KnownIssues) -> Report:
    """Join runs into a new run of the database `target`."""
    first = parts[0][0]
    with Store(target) as store:
        exclusions = {reason: n for run, *_ in parts for reason, n in run.exclusions.items()}
        versions = {name: version for run, *_ in parts for name, version in _releases(parts, run).items()}
        every = [scenario for _, planned, *_ in parts for scenario in planned]
        run_id = store.begin_run(first.command, first.seed, versions, exclusions, every)
        store.finished_many(run_id, [result for _, _, results, _ in parts for result in results])
        store.checked(run_id, [check for _, _, _, checks in parts for check in checks])
        store.end_run(run_id)
        return Report.from_store(store, run_id, known)
