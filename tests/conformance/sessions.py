"""Scenarios on real ranks without a laboratory: what tests of a system share that look at ranks, files and errors.

A test that asks for a verdict uses the `laboratory` of `conftest.py`. One that looks below the verdict (an error's
type, the bytes of an observation, a process that is left behind) submits sessions to a fork server itself, and asks the
judge in a worker of that same server what the ranks' observations show:

    with server_of(SYSTEM, "0.16.1") as server:
        outcomes = run(server, scenario, tmp_path)
        judgement = judged(server, scenario, tmp_path, outcomes)
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.observe.record import Record, unpack
from harness.program import expand, sessions
from harness.scenario import Scenario
from harness.systems.protocol import System
from harness.world.environments import VARIANT, Environments
from harness.world.job import Job, JobOutcome
from harness.world.server import ForkServer

LENGTH = struct.Struct("<Q")
"""What stands before every packed observation in a rank's file."""

DEADLINE_S = 60.0

Servers = Callable[[Scenario], ForkServer]
"""The warm server that a scenario's ranks are forked from, where a system needs several environments."""


def server_of(
    system: System,
    version: str = "",
    *,
    variant: str = "",
    plugins: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> ForkServer:
    """A warm server of a release of a system, as the laboratory starts one. The caller ends it.

    Args:
        variant: as `System.variant` names it. plugins: modules that register more systems, imported before the warm-up.
        environment: additions to the ranks' environment.
    """
    paths: Sequence[Path] = ()
    variables: dict[str, str] = {VARIANT: variant}
    if system.package:
        overlay = Environments(None, ()).overlay(system, version)
        paths, variables = overlay.paths, {**variables, **overlay.environment}
    return ForkServer(
        path_prefix=paths,
        warm_up=(system.entry(system.warm_up),),
        plugins=plugins,
        env={**variables, **(environment or {})},
    )


def run(server: ForkServer, scenario: Scenario, folder: Path, *, quiet: bool = False) -> list[JobOutcome]:
    """The outcome of every session of the scenario, up to the first that fails.

    Args:
        quiet: ranks observe after a session's last operation only.
    """
    outcomes: list[JobOutcome] = []
    for session in range(len(sessions(expand(scenario)))):
        outcomes.append(server.submit(Job(scenario, session, folder, DEADLINE_S, quiet)).result())
        if not outcomes[-1].ok:
            break
    return outcomes


def judged(server: ForkServer, scenario: Scenario, folder: Path, outcomes: Sequence[JobOutcome]) -> dict[str, Any]:
    """What differs from the twin, live and written. The server's numeric environment decides torch's kernels."""
    saves = [op.checkpoint for op in expand(scenario) if op.kind == "save"]
    request = {
        "scenario": scenario.axis_values(only_changed=True),
        "observations": [str(path) for path in observed(outcomes)],
        "checkpoints": {number: str(folder / f"checkpoint{number}") for number in saves},
        "complete": True,
    }
    reply = server.call("harness.judge:serve", json.dumps(request).encode(), DEADLINE_S)
    judgement: dict[str, Any] = json.loads(reply)
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


def assert_equals_the_twin(server: ForkServer, scenario: Scenario, folder: Path) -> dict[str, Any]:
    """The scenario runs to its end, nothing differs from the twin, and the reference agrees. Gives the judgement."""
    outcomes = run(server, scenario, folder)
    assert all(outcome.ok for outcome in outcomes), outcomes
    judgement = judged(server, scenario, folder, outcomes)
    assert judgement["differences"] == []
    assert judgement["distrust"] == ""
    return judgement


def assert_observing_changes_nothing(server: ForkServer, scenario: Scenario, folder: Path) -> None:
    """A scenario of one session ends with the same records whether it is observed after every operation or at the end
    only. Which emulated symbols were touched is no state, and observing touches some."""
    last: list[list[list[Record]]] = []
    for quiet in (False, True):
        place = folder / ("quiet" if quiet else "loud")
        place.mkdir()
        (outcome,) = run(server, scenario, place, quiet=quiet)
        assert outcome.ok, outcome
        ended = [list(blobs(path))[-1] for path in outcome.observations]
        last.append([[record for record in unpack(blob) if record.role != "emulated"] for blob in ended])
    assert last[0] == last[1]
