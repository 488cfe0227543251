"""Below the verdict: what tests of a system share that look at ranks, files and errors.

All of them run in the one laboratory of `conftest.py`, whose warm servers they share. A test that asks for a verdict
calls its `examine_one`. One that looks further down (an error's type, the bytes of an observation) runs the ranks, and
then has their observations judged:

    outcomes = run(laboratory, scenario, tmp_path)
    judgement = judged(laboratory, scenario, tmp_path, outcomes)
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from shardproof.laboratory.laboratory import Laboratory, judge_request
from shardproof.observe.record import Record, unpack
from shardproof.scenario import Scenario
from shardproof.world.job import JobOutcome

LENGTH = struct.Struct("<Q")
"""What stands before every packed observation in a rank's file."""


def run(laboratory: Laboratory, scenario: Scenario, folder: Path, *, quiet: bool = False) -> list[JobOutcome]:
    """The outcome of every session of the scenario.

    Args:
        quiet: ranks observe after a session's last operation only.
    """
    outcomes = laboratory.run_ranks(scenario, folder, quiet=quiet)
    assert all(outcome.ok for outcome in outcomes), outcomes
    return outcomes


def judged(laboratory: Laboratory, scenario: Scenario, folder: Path, outcomes: Sequence[JobOutcome]) -> dict[str, Any]:
    """What differs from the twin, live and written."""
    judgement: dict[str, Any] = laboratory.ask(
        "shardproof.laboratory.judge:serve", judge_request(scenario, folder, outcomes)
    )
    return judgement


def observed(outcomes: Sequence[JobOutcome]) -> list[Path]:
    """The files that the ranks of all sessions wrote."""
    return [path for outcome in outcomes for path in outcome.observations]


def blobs(path: Path) -> Iterator[bytes]:
    """The packed observations of one rank's file, one an operation."""
    content, at = path.read_bytes(), 0
    while at < len(content):
        (length,) = LENGTH.unpack_from(content, at)
        yield content[at + LENGTH.size : at + LENGTH.size + length]
        at += LENGTH.size + length


def assert_equals_the_twin(laboratory: Laboratory, scenario: Scenario, folder: Path) -> dict[str, Any]:
    """The scenario runs to its end, nothing differs from the twin, and the reference agrees. Gives the judgement."""
    judgement = judged(laboratory, scenario, folder, run(laboratory, scenario, folder))
    assert judgement["differences"] == []
    assert judgement["distrust"] == ""
    return judgement


def assert_observing_changes_nothing(laboratory: Laboratory, scenario: Scenario, folder: Path) -> None:
    """A scenario of one session ends with the same records whether it is observed after every operation or at the end
    only. Which emulated symbols were touched is no state, and observing touches some."""
    last: list[list[list[Record]]] = []
    for quiet in (False, True):
        place = folder / ("quiet" if quiet else "loud")
        place.mkdir()
        (outcome,) = run(laboratory, scenario, place, quiet=quiet)
        ended = [list(blobs(path))[-1] for path in outcome.observations]
        last.append([[record for record in unpack(blob) if record.role != "emulated"] for blob in ended])
    assert last[0] == last[1]
